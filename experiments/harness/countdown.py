"""Prints how far a long command is, and how long the rest will take."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

EVERY_SECONDS = 30.0


def span(seconds: float) -> str:
    """Formats a duration for people, in seconds, minutes or hours."""
    for unit, length, least in (("h", 3600, 5400), ("min", 60, 90)):
        if seconds >= least:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def in_background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Inside `with`, runs `work(over)` in a thread. At the end, sets the event `over` and waits for the thread."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Countdown:
    """Prints on stderr which case is running and how long the rest will take, also while a case runs.

    `expected`: {case: seconds that it should take}; if all are 0, no remaining time is printed.
    """

    def __init__(self, expected: Mapping[str, float], every_seconds: float = EVERY_SECONDS):
        self._expected, self._every = dict(expected), every_seconds
        self._count, self._took, self._should = len(expected), 0.0, 0.0

    def announce(self) -> None:
        self._say(f"{self._count} to do{self._rest('about {}')}")

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Prints that the case `name` begins. Inside `with`, which must run it, prints the time so far at intervals."""
        number = self._count - len(self._expected) + 1
        title, began = f"{number} of {self._count}: {name}", time.perf_counter()
        self._say(title + self._rest("about {} left"))

        def repeat(over: threading.Event) -> None:
            while not over.wait(self._every):
                took = time.perf_counter() - began
                self._say(f"{title}, {span(took)} so far" + self._rest("about {} left", took))

        with in_background(repeat):
            yield
        self._took += time.perf_counter() - began
        self._should += self._expected.pop(name)

    def _rest(self, text: str, took: float = 0.0) -> str:
        left = self._left()
        return ", " + text.format(span(max(left - took, 0))) if left or not self._expected else ""

    def _left(self) -> float:
        # Finished cases show how fast this machine is.
        pace = self._took / self._should if self._should else 1.0
        return pace * sum(self._expected.values())

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
