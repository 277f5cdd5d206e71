"""SIGTERM and SIGINT as a request: stop at the next step boundary, with everything saved.

A signal arrives at any instruction: half-way through an update, a save or an evaluation. So its handler only takes a
note, and the loop looks at the note where the state is whole. What is in the middle of a step is not worth saving: its
micro-batches are functions of the step's number and are run again.

    with StopRequest() as stop:
        for step in steps:
            ...
            if stop.requested:
                save; exit with 75

A second signal ends the process at once, as if it had never been caught: after the first one both signals have their
default action again, so the operating system sees to it even while Python waits for a slow disk or a long computation.
The first is noted when the interpreter comes back from such a call; all that came until then count as one.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def interrupt_ends_at_once() -> Iterator[None]:
    """Inside the block SIGINT ends the process as SIGTERM does, without a word (a shell reports 130). Python's own way,
    an exception at whatever instruction comes next, prints a traceback or is lost in somebody's `except`."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: not set from Python


class StopRequest:
    """Catches SIGTERM and SIGINT inside a `with` block, in the main thread (ValueError elsewhere).

    `requested`: whether one has come; `name`: which, "SIGTERM" or "SIGINT", or None.
    """

    def __init__(self):
        self.name: str | None = None
        self._before: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        return self.name is not None

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python

    def _note(self, number: int, _: FrameType | None) -> None:
        for caught in SIGNALS:
            signal.signal(caught, signal.SIG_DFL)
        self.name = signal.Signals(number).name
