"""Every wait, record and hold of the code that moves states and updates weights, taken out or weakened, one at a time.

A mutation is a text of one file of lowmem/ and what stands in its place; the text occurs there once. Whatever claims to
find mistakes in the order of streams has to find these (mutations.py).
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """`file`: in lowmem/; `equivalent`: why nothing can go wrong with it, where that is so."""

    file: str
    name: str
    old: str
    new: str
    equivalent: str | None = None

    def apply(self, package: Path) -> None:
        """Changes the file in the copy `package` of lowmem/. ValueError where the text is not there exactly once."""
        (package / self.file).write_text(self.changed(package), encoding="utf-8")

    def changed(self, package: Path) -> str:
        """The text of the file in `package` with the mutation; ValueError as above."""
        text = (package / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {text.count(self.old)} places in {self.file} have the text {self.old!r}")
        return text.replace(self.old, self.new)


def without_effect(mutations: Sequence[Mutation], package: Path) -> list[str]:
    """Names of those that change comments and spaces at most, and of those whose name is another's, too."""
    names = [mutation.name for mutation in mutations]
    return [name for name in names if names.count(name) > 1] + [
        mutation.name
        for mutation in mutations
        if ast.dump(ast.parse((package / mutation.file).read_text())) == ast.dump(ast.parse(mutation.changed(package)))
    ]


COMPUTE = "torch.cuda.current_stream()"
NEXT_SLOT = "[(slot + 1) % (AHEAD + 1)]"

# Of offload.py
SLOTS_FREE = "        self._in.wait_stream(torch.cuda.current_stream())"
REFILL = "        self._in.wait_event(self._written[slot])  # an event never recorded is no obstacle\n"
FETCH = """\
        with torch.cuda.stream(self._in):
            for name, tensor in home.items():
                state[name].copy_(tensor, non_blocking=True)
            self._fetched[slot].record()
"""
WAIT_FETCHED = "        self._updates.wait_event(self._fetched[slot])\n"
UPDATING = """\
        with torch.cuda.stream(self._updates):
            yield
            self._updated.record()
"""
WEIGHTS_SLOT_FREE = "        self._weights.wait_stream(torch.cuda.current_stream())\n"
WEIGHTS_WRITTEN = "        self._weights.wait_stream(self._out)\n"
FETCH_WEIGHTS = """\
        with torch.cuda.stream(self._weights):
            for name, tensor in home.items():
                weights[name].copy_(tensor, non_blocking=True)
            self._brought.setdefault(slot, torch.cuda.Event()).record()
"""
WAIT_WEIGHTS = "        torch.cuda.current_stream().wait_event(self._brought[slot])\n"
NO_OVERLAP = "what computes orders both the copy and what it is for; they do not overlap any more"
LEAVES_AFTER_COMPUTE = "        self._leaving.wait_stream(torch.cuda.current_stream())\n"
LEAVE = """\
        with torch.cuda.stream(self._leaving):
            home.copy_(tensor, non_blocking=True)
            self._left.setdefault(slot, torch.cuda.Event()).record()
"""
WAIT_LEFT = "        torch.cuda.current_stream().wait_event(self._left[slot])\n"
FETCH_WHAT_LEFT = "            self._in.wait_stream(self._leaving)\n"
COMES_AFTER_COMPUTE = "        self._coming.wait_stream(torch.cuda.current_stream())\n"
COME_BACK = """\
        with torch.cuda.stream(self._coming):
            tensor.copy_(home, non_blocking=True)
            self._back.setdefault(slot, torch.cuda.Event()).record()
"""
WAIT_BACK = "        torch.cuda.current_stream().wait_event(self._back[slot])\n"
WAIT_FOR_COMPUTE = "        self._updates.wait_stream(torch.cuda.current_stream())\n"
HOLD_COMPUTE = "        torch.cuda.current_stream().wait_event(self._updated)"
WAIT_WRITTEN = "            self._written[slot].synchronize()  # for the host"
WAIT_UPDATED = "        self._out.wait_stream(self._updates)\n"
WRITE_BACK = """\
        with torch.cuda.stream(self._out):
            for name, tensor in home.items():
                tensor.copy_(state[name], non_blocking=True)
            self._written[slot].record()
"""
# Of deferred_updates.py
BEGIN = """\
        self.units_done = 0
        self.ring.copies.wait_for_compute()
"""
DOWNWARDS = """\
        if self.downwards:  # their gradients came to be since the pass was begun
            self.ring.copies.wait_for_compute()
"""
RUN = """\
        try:
            while self.units_done < units:
                self._go_on()
        finally:
            self.ring.copies.hold_compute()
"""
HOLD = "            self.ring.copies.hold_compute()\n"
UPDATE = """\
            with self.ring.copies.updating():
                self._update(piece, state)
        self.ring.give_back(piece)
"""
FLUSH = """\
        self.run(self.units)
        self.ring.synchronize()
"""


NEVER_RECORDED = "            self._brought.setdefault(slot, torch.cuda.Event())\n"
OTHER_WEIGHTS = """\
        if 1 - slot in self._brought:
            torch.cuda.current_stream().wait_event(self._brought[1 - slot])
"""


def without_stream(text: str) -> str:
    """The `with torch.cuda.stream(...)` at the beginning of `text` has no effect."""
    return "        if True:\n" + text.partition("\n")[2]


def without_record(text: str) -> str:
    """`text` without its last line, which records an event."""
    return "".join(text.splitlines(keepends=True)[:-1])


def recorded_first(text: str) -> str:
    """The last line comes first inside the `with` statement."""
    first, *others, last = text.splitlines(keepends=True)
    return "".join([first, last, *others])


def recorded_outside(text: str) -> str:
    """The last line comes after the `with` statement: the event is recorded on the stream that computes."""
    *others, last = text.splitlines(keepends=True)
    return "".join([*others, last.removeprefix("    ")])


_streaming: Callable[..., Mutation] = partial(Mutation, "core/offload.py")
_updates: Callable[..., Mutation] = partial(Mutation, "core/deferred_updates.py")

SLOTS = [
    _streaming("copies in do not wait for what used the slots' memory before", SLOTS_FREE, "        pass"),
    _streaming(
        "one slot too few",
        "for _ in range(AHEAD + 1)\n        ]\n",
        "for _ in range(AHEAD)\n        ]\n",
    ),
    _streaming("a piece is fetched one piece too early", "used + AHEAD + 1,", "used + AHEAD + 2,"),
]

COPIES_IN = [
    _streaming("a slot is refilled without waiting for its write-back", REFILL, ""),
    _streaming(
        "a slot is refilled after the write-back of the one before", REFILL, REFILL.replace("[slot]", "[slot - 1]")
    ),
    _streaming("a slot is refilled after the write-back of the next one", REFILL, REFILL.replace("[slot]", NEXT_SLOT)),
    _streaming("the wait for a slot's write-back comes after the copies in", REFILL + FETCH, FETCH + REFILL),
    _streaming(
        "what computes waits for a slot's write-back, not the copies in", REFILL, REFILL.replace("self._in", COMPUTE)
    ),
    _streaming("copies in run on the stream that computes", FETCH, without_stream(FETCH)),
    _streaming("copies in are not recorded", FETCH, without_record(FETCH)),
    _streaming("copies in are recorded before they are made", FETCH, recorded_first(FETCH)),
    _streaming("copies in are recorded on the stream that computes", FETCH, recorded_outside(FETCH)),
    _streaming(
        "copies in are recorded for the next slot", FETCH, FETCH.replace("_fetched[slot]", "_fetched" + NEXT_SLOT)
    ),
]

WEIGHTS = [
    _streaming("weights do not wait for what used their slot", WEIGHTS_SLOT_FREE, ""),
    _streaming("weights do not wait for their write-back", WEIGHTS_WRITTEN, ""),
    _streaming("weights come on the stream that computes", FETCH_WEIGHTS, without_stream(FETCH_WEIGHTS)),
    _streaming("weights are not recorded", FETCH_WEIGHTS, without_record(FETCH_WEIGHTS) + NEVER_RECORDED),
    _streaming("weights are recorded before they are copied", FETCH_WEIGHTS, recorded_first(FETCH_WEIGHTS)),
    _streaming("weights are recorded on the stream that computes", FETCH_WEIGHTS, recorded_outside(FETCH_WEIGHTS)),
    _streaming("what computes does not wait for its weights", WAIT_WEIGHTS, "        pass\n"),
    _streaming("what computes waits for the other slot's weights", WAIT_WEIGHTS, OTHER_WEIGHTS),
    Mutation(
        "core/step.py",
        "weights are fetched before their update",
        "                self._updates.run(following.blocks.stop + 1)  # before its weights are on their way\n",
        "                pass\n",
    ),
    Mutation(
        "core/step.py",
        "weights that were updated are taken for those of before",
        "+= 1\n\n    # ---",
        "+= 0\n\n    # ---",
    ),
]

BOUNDARIES = [
    _streaming("boundaries leave before they are made", LEAVES_AFTER_COMPUTE, ""),
    _streaming("boundaries leave on the stream that computes", LEAVE, without_stream(LEAVE), equivalent=NO_OVERLAP),
    _streaming("boundaries that leave are recorded before", LEAVE, recorded_first(LEAVE)),
    _streaming("boundaries that leave are recorded on the stream that computes", LEAVE, recorded_outside(LEAVE)),
    _streaming("a boundary's memory is free before it has left", WAIT_LEFT, "        pass\n"),
    _streaming("boundaries come back into memory that is in use", COMES_AFTER_COMPUTE, ""),
    _streaming(
        "boundaries come back on the stream that computes", COME_BACK, without_stream(COME_BACK), equivalent=NO_OVERLAP
    ),
    _streaming("boundaries that come back are recorded before", COME_BACK, recorded_first(COME_BACK)),
    _streaming("what computes does not wait for its boundary", WAIT_BACK, "        pass\n"),
]

GRADIENTS = [
    _streaming("fetches do not wait for gradients to arrive in RAM", FETCH_WHAT_LEFT, "            pass\n"),
    _streaming(
        "fetches wait for what computes, not for gradients",
        FETCH_WHAT_LEFT,
        FETCH_WHAT_LEFT.replace("self._leaving", COMPUTE),
        equivalent="what computes has waited for them by then, since their memory is free",
    ),
    Mutation(
        "core/deferred_updates.py",
        "fetches wait for gradients of the pass before",
        "        self.ring.copies.fetch_what_left()  # gradients among it\n",
        "",
    ),
    Mutation(
        "core/streamed_gradients.py",
        "a gradient's memory is free before it has left",
        "            self._ring.copies.wait_left(slot)\n",
        "            pass\n",
    ),
    Mutation(
        "core/streamed_gradients.py",
        "of the gradients that leave only the first are waited for",
        "        for slot, _ in self._leaving:\n",
        "        for slot, _ in self._leaving[:1]:\n",
    ),
]

DISK = [
    _streaming("the host does not wait for what it writes to a disk", WAIT_WRITTEN, "            # for the host"),
    _streaming(
        "the host waits for what the slot before holds", WAIT_WRITTEN, WAIT_WRITTEN.replace("[slot]", "[slot - 1]")
    ),
    _streaming("slots share their buffers for a disk", "self._buffers.fill(slot,", "self._buffers.fill(0,"),
    _streaming("what belongs on a disk stays in the buffers", "        self._buffers.settle_all()\n", ""),
    _streaming(
        "what belongs on a disk is written before it has arrived",
        "        self._in.synchronize()\n        self._out.synchronize()\n",
        "        self._buffers.settle_all()\n        self._in.synchronize()\n        self._out.synchronize()\n",
    ),
]

UPDATES = [
    _streaming("an update does not wait for its state", WAIT_FETCHED, "        pass\n"),
    _streaming("an update waits for the slot before", WAIT_FETCHED, WAIT_FETCHED.replace("[slot]", "[slot - 1]")),
    _streaming("an update waits for the next slot", WAIT_FETCHED, WAIT_FETCHED.replace("[slot]", NEXT_SLOT)),
    _streaming(
        "what computes waits for a state, not the updates", WAIT_FETCHED, WAIT_FETCHED.replace("self._updates", COMPUTE)
    ),
    _streaming("updates run on the stream that computes", UPDATING, without_stream(UPDATING)),
    _streaming("updates are not recorded", UPDATING, without_record(UPDATING)),
    _streaming("updates are recorded before they are made", UPDATING, recorded_first(UPDATING)),
    _streaming("updates are recorded on the stream that computes", UPDATING, recorded_outside(UPDATING)),
    _streaming("updates do not wait for what computes", WAIT_FOR_COMPUTE, "        pass\n"),
    _streaming(
        "what computes waits for the updates, not they for it",
        WAIT_FOR_COMPUTE,
        f"        {COMPUTE}.wait_stream(self._updates)\n",
    ),
    _streaming("what computes does not wait for updates", HOLD_COMPUTE, "        pass"),
    _streaming(
        "what computes waits for states, not for updates",
        HOLD_COMPUTE,
        f"        {COMPUTE}.wait_stream(self._in)",
    ),
    _updates("updates are made ready without a wait for what computes", BEGIN, "        self.units_done = 0\n"),
    _updates("updates in backward do not wait for their gradients", DOWNWARDS, ""),
    _updates(
        "updates in backward wait for the first gradients alone",
        "        if self.downwards:",
        "        if self.downwards and self.units_done == 0:",
    ),
    _updates("what computes is not held after updates", HOLD, "            pass\n"),
    _updates(
        "what computes is held before updates, not after",
        RUN,
        RUN.replace(HOLD, "            pass\n").replace("            while", HOLD + "            while"),
    ),
    _updates(
        "updates are not launched as updates",
        "            with self.ring.copies.updating():\n",
        "            if True:\n",
    ),
    Mutation(
        "core/optimizers.py",
        "8-bit updates count as running on any stream",
        "        any_stream=False,",
        "        any_stream=True,",
    ),
]

COPIES_OUT = [
    _streaming("copies out do not wait for the update", WAIT_UPDATED, ""),
    _streaming(
        "copies out wait for what computes, not for the update",
        WAIT_UPDATED,
        WAIT_UPDATED.replace("self._updates", COMPUTE),
    ),
    _streaming(
        "copies out wait for the copies in, not for the update",
        WAIT_UPDATED,
        WAIT_UPDATED.replace("self._updates", "self._in"),
    ),
    _streaming(
        "the wait for the update comes after the copies out", WAIT_UPDATED + WRITE_BACK, WRITE_BACK + WAIT_UPDATED
    ),
    _updates(
        "a state is written back before it is updated",
        UPDATE,
        "            self.ring.give_back(piece)\n" + UPDATE.replace("        self.ring.give_back(piece)\n", ""),
    ),
    _streaming("copies out run on the stream that computes", WRITE_BACK, without_stream(WRITE_BACK)),
    _streaming("copies out are not recorded", WRITE_BACK, without_record(WRITE_BACK)),
    _streaming("copies out are recorded before they are made", WRITE_BACK, recorded_first(WRITE_BACK)),
    _streaming("copies out are recorded on the stream that computes", WRITE_BACK, recorded_outside(WRITE_BACK)),
    _streaming(
        "copies out are recorded for the slot before",
        WRITE_BACK,
        WRITE_BACK.replace("_written[slot]", "_written[slot - 1]"),
    ),
]

SYNCHRONIZING = [
    _streaming("the host does not wait for copies out", "        self._out.synchronize()", "        pass"),
    _streaming(
        "the host does not wait for copies in",
        "        self._in.synchronize()\n",
        "",
        equivalent="flush() has completed the pass before: every copy in was awaited by the stream of the updates, and "
        "that by the copies out, for which the host waits",
    ),
    _streaming("the ring is not synchronized", "        self.copies.synchronize()\n", "        pass\n"),
    _updates("a flush does not wait for the copies", FLUSH, "        self.run(self.units)\n"),
]

MUTATIONS = SLOTS + COPIES_IN + WEIGHTS + BOUNDARIES + GRADIENTS + DISK + UPDATES + COPIES_OUT + SYNCHRONIZING
