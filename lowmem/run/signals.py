"""Handles SIGTERM, SIGINT and SIGHUP as requests to stop with everything saved (docs/training.md).

A signal may arrive in the middle of an update or a save. So it is only counted, and the training loop reads the count
when its state is complete. A signal that is ignored when training begins, as under nohup, stays ignored.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lowmem.distributed.launch import launched_rank
from lowmem.terminal import for_terminal, output

if TYPE_CHECKING:  # importing PyTorch takes seconds
    from lowmem.core.ranks import Ranks

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
_HANG_UP = getattr(signal, "SIGHUP", None)
_END = b"\0"  # no signal has this number
_at_the_end: list[int] = []  # signals to ignore while Python frees its modules, because it then forgets their handlers


@atexit.register  # before PyTorch is imported, so it runs after PyTorch's functions
def _ignore_at_the_end() -> None:
    for number in _at_the_end:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupt_ends_at_once() -> Iterator[None]:
    """Makes SIGINT end the process silently inside the `with` block, as SIGTERM does."""
    # Python's KeyboardInterrupt would print a traceback, or be caught by some `except`.
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: not set from Python


class StopRequest:
    """Counts SIGTERM, SIGINT and SIGHUP inside a `with` block, and prints a sentence for each. The third signal ends
    the process. Until `now` is called, there is nothing to save, so the second signal already ends it. Works only in
    the main thread. `ends_process`: True if the process ends after the block; later signals then do not change the exit
    code. `name`: the first signal's name, or None."""

    def __init__(self, ends_process: bool = False):
        self.requests = 0
        self.name: str | None = None
        self._ends_process = ends_process
        self._nothing_yet = True  # True until there is something to save
        self._agreed: int | None = None  # the largest `requests` of any rank at the last `agree`
        self._finishing, self._second = "the preparation", "ends the run at once: nothing is lost"
        self._before: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        return (self.requests if self._agreed is None else self._agreed) > 0

    def agree(self, ranks: "Ranks") -> None:
        """Makes `requested` True on all ranks (processes) if any of them has had a signal. All ranks must call this."""
        if ranks.count > 1:
            self._agreed = ranks.most(self.requests)

    @property
    def urgent(self) -> bool:
        """Returns True after a second signal, which asks to give up the current step or evaluation."""
        return self.requests > 1

    def now(self, finishing: str, second: str) -> None:
        """Sets the texts that a signal prints: the work that is finished first, such as "step 12, then saving", and the
        effect of a second signal, such as "drops this step". Call this before each piece of work."""
        self._nothing_yet = False
        self._finishing, self._second = finishing, second

    def __enter__(self) -> "StopRequest":
        caught = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        # Without its default action, a signal's number arrives through a pipe.
        self._before = {number: signal.signal(number, lambda *_: None) for number in caught}
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before_pipe = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        # Python's own handlers would wait for the main thread, which may wait seconds for a GPU or a disk.
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if self._ends_process:
            self.now("the end of the process", "changes nothing")
            _at_the_end.extend(self._before)
            return
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
        # When the terminal goes away, a shell and the system may both send SIGHUP.
        if number == _HANG_UP and self.requests:
            return
        self.name = self.name or number.name
        again = {signal.SIGINT: "Ctrl-C again", _HANG_UP: "SIGTERM"}.get(number, f"{number.name} again")
        if self.requests >= (1 if self._nothing_yet else 2):
            _say(f"{number.name}: ended at once; what was saved before is safe")
            os._exit(128 + number)
        if self.requests == 0:
            _say(f"{number.name}: finishing {self._finishing}; {again} {self._second}")
        else:
            _say(f"{number.name}: the second signal {self._second}; a third ends at once")
        self.requests += 1


def _say(sentence: str) -> None:
    if launched_rank() > 0:
        return
    # A progress bar stays on its own line.
    start = "\n" if sys.stderr is not None and os.isatty(2) else ""
    with output():
        # not through Python's buffers, which the main thread may be using
        os.write(2, f"{start}{for_terminal(sentence, sys.stderr)}\n".encode())
