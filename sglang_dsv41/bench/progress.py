"""A progress bar on stderr, and lines on stdout that do not cut through it."""

from __future__ import annotations

import sys


class Progress:
    """A bar over ``total`` cases; off where stderr is no terminal or ``show`` is false. A context manager."""

    def __init__(self, total: int, *, show: bool = True) -> None:
        from tqdm import tqdm  # SGLang's dependency

        self._bar = tqdm(total=total, unit="case", disable=None if show else True, dynamic_ncols=True)

    def at(self, what: str) -> None:
        """Name the case at hand, and what is done of it."""
        self._bar.set_description_str(what)

    def done(self) -> None:
        """A case is through, measured or not."""
        self._bar.update()

    def say(self, line: str) -> None:
        """Print a line to stdout at once."""
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
