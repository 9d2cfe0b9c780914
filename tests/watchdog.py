"""A watchdog for GPU work: a kernel that spins fails the test by name, where a plain wait would never return."""

import time
from typing import Protocol


class Event(Protocol):
    """``torch.cuda.Event``, as far as the watchdog asks it."""

    def query(self) -> bool: ...


class HangError(AssertionError):
    """The GPU did not get there in time."""


def wait_for(event: Event, seconds: float, what: str) -> None:
    """Return once ``event`` has happened, without a blocking call.

    Raises:
        HangError: it has not after ``seconds``; names ``what``.
    """
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            raise HangError(f"the GPU has not finished {what} after {seconds:g} s")
        time.sleep(0.001)
