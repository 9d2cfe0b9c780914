"""The watchdog of the GPU tests, on events that happen and one that never does."""

import pytest

from tests.watchdog import HangError, wait_for


class After:
    """An event that has happened when it is asked for the nth time."""

    def __init__(self, count):
        self.count, self.asked = count, 0

    def query(self):
        self.asked += 1
        return self.asked >= self.count


@pytest.mark.parametrize("count", [1, 5])
def test_an_event_that_happens(count):
    event = After(count)
    wait_for(event, 60, "replay 1")
    assert event.asked == count


def test_an_event_that_never_does():
    event = After(float("inf"))
    with pytest.raises(HangError, match="not finished replay 7 of 9 after 0.01 s"):
        wait_for(event, 0.01, "replay 7 of 9")
    assert event.asked > 1
