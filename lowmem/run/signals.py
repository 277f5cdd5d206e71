"""SIGTERM, SIGINT and SIGHUP as a request: stop, with everything saved; and what is said at once.

A signal arrives at any instruction: half-way through an update, a save or an evaluation. So it is only counted, and the
loop looks at the count where the state is whole.

    first    what is under way is finished, saved, and the run ends with exit code 75
    second   the step or evaluation that is under way is given up, and what was done before it is saved (a step whose
             updates have begun is finished; before the first step nothing is worth saving, so the process ends)
    third    the process ends at once; what was saved before is safe

The count is kept, and the answer given, by a thread: Python's own handlers wait for the main thread, which may be
waiting itself for seconds, for a GPU or a disk. A hang-up (the terminal went away) only ever counts once, since a shell
and the system may both send it; what is written to that terminal goes nowhere from then on. A signal that is ignored
when the run begins, as under nohup or in the background of a script, stays ignored.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lowmem.run.terminal import for_terminal, output

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
_HANG_UP = getattr(signal, "SIGHUP", None)
_END = b"\0"  # no signal has this number


@contextmanager
def interrupt_ends_at_once() -> Iterator[None]:
    """Inside the block SIGINT ends the process as SIGTERM does, without a word (a shell reports 130). Python's own way,
    an exception at whatever instruction comes next, prints a traceback or is lost in somebody's `except`."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: not set from Python


class StopRequest:
    """Catches SIGNALS inside a `with` block, in the main thread (ValueError elsewhere).

    `requests`: how many have come; `name`: the first one's, "SIGINT" say, or None.
    """

    def __init__(self):
        self.requests = 0
        self.name: str | None = None
        self._nothing_yet = True  # to lose
        self._finishing, self._second = "what comes before the first step", "ends at once, and nothing is lost"
        self._before: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        return self.requests > 0

    @property
    def urgent(self) -> bool:
        """Whether what is under way is to be given up."""
        return self.requests > 1

    def now(self, finishing: str, second: str) -> None:
        """What the run is at, for the answer to a signal: "step 12, about 35 s, then saving", and what a second signal
        does then: "drops this step". To be called from the first step on."""
        self._nothing_yet = False
        self._finishing, self._second = finishing, second

    def __enter__(self) -> "StopRequest":
        caught = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, _nothing) for number in caught}
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before_pipe = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python
        signal.set_wakeup_fd(self._before_pipe)
        os.write(self._writing, _END)
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)

    def _listen(self) -> None:
        while (received := os.read(self._reading, 1)) != _END:
            if received[0] in self._before:
                self._note(signal.Signals(received[0]))

    def _note(self, number: signal.Signals) -> None:
        if number == _HANG_UP and self.requested:
            return
        self.name = self.name or number.name
        again = "Ctrl-C again" if number == signal.SIGINT else f"{number.name} again"
        if self.requests >= (1 if self._nothing_yet else 2):
            _say(f"{number.name}: ended at once; what was saved before is safe")
            os._exit(128 + number)
        if not self.requested:
            _say(f"{number.name}: finishing {self._finishing}; {again} {self._second}")
        else:
            _say(f"{number.name} again: it {self._second}; the next one ends at once")
        self.requests += 1


def _nothing(number: int, frame) -> None:
    """Takes the place of a signal's default action; the number comes through the pipe."""


def _say(sentence: str) -> None:
    """Past Python's buffers, in the middle of which the main thread may be; on a line of its own beside a bar."""
    start = "\n" if sys.stderr is not None and os.isatty(2) else ""
    with output():
        os.write(2, f"{start}{for_terminal(sentence)}\n".encode())
