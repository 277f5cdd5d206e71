"""Every wait, record and hold of the code that moves states and updates weights, taken out or weakened, one at a
time."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """A text of one file, which occurs there once, and its replacement. `file`: in lowmem/; `equivalent`: why nothing
    can go wrong with it, or None."""

    file: str
    name: str
    old: str
    new: str
    equivalent: str | None = None

    def apply(self, package: Path) -> None:
        """Changes the file in the copy `package` of lowmem/. Raises ValueError if the text is not there exactly
        once."""
        (package / self.file).write_text(self.changed(package), encoding="utf-8")

    def changed(self, package: Path) -> str:
        """Returns the text of the file in `package` with the mutation. Raises ValueError as `apply`."""
        text = (package / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {text.count(self.old)} places in {self.file} have the text {self.old!r}")
        return text.replace(self.old, self.new)


def without_effect(mutations: Sequence[Mutation], package: Path) -> list[str]:
    """Returns the names of mutations that change no code, and of those that share a name."""
    names = [mutation.name for mutation in mutations]
    return [name for name in names if names.count(name) > 1] + [
        mutation.name
        for mutation in mutations
        if ast.dump(ast.parse((package / mutation.file).read_text())) == ast.dump(ast.parse(mutation.changed(package)))
    ]


# Of transfers.py
COPY = """\
        with torch.cuda.stream(self._stream(lane)):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        return self.mark(lane)
"""
AFTER = "        self.wait(lane, *after)\n"
UPDATING = "        return torch.cuda.stream(self._stream(Lane.UPDATES))\n"
# Of window.py
FETCH = "        slot.arrived = self.transfers.copy(self.into, pairs, slot.left, *after)\n"
USE = "        self.transfers.wait(self.user, *(slot.arrived for slot in slots))\n"
SEND = "        slot.left = self.transfers.copy(self.out, pairs, self.transfers.mark(self.user))\n"
TAKE = "        slot = self._slot(self._used)\n        self._window.use(slot)\n"
FREE = "            for lane in (self.user, *lanes):\n"
HOST_WAITS = "            self._transfers.wait(Lane.HOST, slot.left)  # the host"
SYNCHRONIZE = "        self._transfers.synchronize()\n"
# Of segment_windows.py
WEIGHTS_AFTER = "mark(Lane.COMPUTE), mark(Lane.STATES_OUT))"
USE_WEIGHTS = "            self._window.use(slot)\n        if following is not None and self.fetches_any_of"
USE_BOUNDARY = "            self._window.use(slot)\n            here.boundary"
SEND_GRADIENT = "            self._window.send_away(part.gradient, part.gradient_home)\n"
RELEASE_GRADIENTS = "        self._window.release(0, Lane.STATES_IN)\n"
# Of deferred_updates.py
WAIT_FOR_GRADIENTS = "        self._transfers.wait(Lane.UPDATES, self._transfers.mark(Lane.COMPUTE))\n"
BEGIN = """\
        self.state_window.begin(pieces)
        self._wait_for_gradients()
"""
TURNING = """\
            self.state_window.synchronize()
        self.state_window.begin(pieces)
"""
DOWNWARDS = """\
        if self._downwards:  # their gradients are newer than `begin`
            self._wait_for_gradients()
"""
HOLD = "            self._transfers.wait(Lane.COMPUTE, self._updated)\n"
RUN = """\
        try:
            while self._due(units):
                self._update_next()
        finally:  # kernels launched later may read the weights and use the memory that the updates freed
"""
MARK_UPDATED = "            self._updated = self._transfers.mark(Lane.UPDATES)\n"
UPDATE = """\
            with self._transfers.updating():
                try:
                    self._operations.update(piece, state, self.hyper)
                except torch.OutOfMemoryError:  # nothing was changed
                    self._torn = False
                    raise
                part.version += 1
"""
GIVE_BACK = "        self.state_window.give_back(piece)\n"
FLUSH = """\
        self.run_until(self.units)
        self.state_window.synchronize()
"""

_lanes: Callable[..., Mutation] = partial(Mutation, "core/transfers.py")
_window: Callable[..., Mutation] = partial(Mutation, "core/window.py")
_segments: Callable[..., Mutation] = partial(Mutation, "core/segment_windows.py")
_updates: Callable[..., Mutation] = partial(Mutation, "core/deferred_updates.py")


def on_lane(lane: str, text: str, instead: str) -> str:
    """Returns `instead` of a copy's statement `text` for copies on that lane (stream of copies)."""
    return f"        if lane is Lane.{lane}:\n{indented(instead)}        else:\n{indented(text)}"


def indented(text: str) -> str:
    return "".join("    " + line for line in text.splitlines(keepends=True))


ON_COMPUTE = COPY.replace("self._stream(lane)", "torch.cuda.current_stream()").replace(
    "mark(lane)", "mark(Lane.COMPUTE)"
)
RECORDED_FIRST = """\
        event = self.mark(lane)
""" + COPY.replace("return self.mark(lane)", "return event")
RECORDED_ON_COMPUTE = COPY.replace("self.mark(lane)", "self.mark(Lane.COMPUTE)")
NOT_RECORDED = COPY.replace("self.mark(lane)", "None")
LANES = {  # and what is copied on them
    "STATES_IN": "states in",
    "STATES_OUT": "states out",
    "WEIGHTS_IN": "weights",
    "RAM_OUT": "what waits in RAM",
    "BOUNDARIES_IN": "boundaries in",
}

COPIES = [
    _lanes(f"copies of {name} {said}", text, on_lane(lane, text, instead))
    for lane, name in LANES.items()
    for said, text, instead in (("wait for nothing", AFTER, "        pass\n"), ("are not recorded", COPY, NOT_RECORDED))
] + [
    _lanes("copies run on the stream that computes", COPY, ON_COMPUTE),
    _lanes("copies are recorded before they are made", COPY, RECORDED_FIRST),
    _lanes("copies are recorded on the stream that computes", COPY, RECORDED_ON_COMPUTE),
]

# fmt: off
SLOTS = [
    _window("copies in do not wait for what used the slots' memory before",
        "        return Slot(tensors, left=self.transfers.mark(Lane.COMPUTE))\n", "        return Slot(tensors)\n"),
    _window("one slot too few", "self._window.fit(AHEAD + 1,", "self._window.fit(AHEAD,"),
    _window("a piece is fetched one piece too early", "self._used + AHEAD + 1,", "self._used + AHEAD + 2,"),
    _window("a slot is refilled without waiting for its write-back", FETCH, FETCH.replace(" slot.left,", "")),
    _window("a slot is refilled after the write-back of the one before", FETCH,
        FETCH.replace("slot.left,", "(self.slots[self.slots.index(slot) - 1] if slot in self.slots else slot).left,")),
    _window("the wait for a slot's write-back comes after the copies in", FETCH,
        FETCH.replace(" slot.left,", "") + "        self.transfers.wait(self.into, slot.left)\n"),
    _window("what computes waits for a slot's write-back, not the copies in", FETCH,
        "        self.transfers.wait(Lane.COMPUTE, slot.left)\n" + FETCH.replace(" slot.left,", "")),
    _window("arrivals are noted in another slot", FETCH, FETCH.replace("slot.arrived", "self.slots[-1].arrived")),
]

WEIGHTS = [
    _segments("weights do not wait for what used their slot", WEIGHTS_AFTER, "mark(Lane.STATES_OUT))"),
    _segments("weights do not wait for their write-back", WEIGHTS_AFTER, "mark(Lane.COMPUTE))"),
    _segments("what computes does not wait for its weights", USE_WEIGHTS,
        USE_WEIGHTS.replace("self._window.use(slot)", "pass")),
    _segments("what computes waits for the other slot's weights", USE_WEIGHTS,
        USE_WEIGHTS.replace("use(slot)", "use(*(s for s in self._window.slots if s is not slot))")),
    Mutation("core/step.py", "weights are fetched before their update",
        "                self._updates.run_until(following.blocks.stop + 1)  # before its weights are on their way\n",
        "                pass\n"),
    Mutation("core/deferred_updates.py", "weights that were updated are taken for those of before", "part.version += 1",
        "part.version += 0"),
]

BOUNDARIES = [
    _segments("a boundary's memory is free before it has left",
        "        self._window.release(LEAVING - 1)\n        self._window.send_away(tensor, saved.boundary)\n",
        "        self._window.send_away(tensor, saved.boundary)\n        self._window.sent.clear()\n"),
    _segments("boundaries come back before they have left", "        self._window.release()  # the copy below",
        "        # the copy below"),
    _segments("boundaries come back into memory that is in use",
        '        self._window.fetch(slot, [(slot.tensors["boundary"]',
        '        slot.left = None\n        self._window.fetch(slot, [(slot.tensors["boundary"]'),
    _segments("what computes does not wait for its boundary", USE_BOUNDARY,
        USE_BOUNDARY.replace("self._window.use(slot)", "pass")),
]

GRADIENTS = [
    _window("what is sent leaves before it is made", SEND,
        SEND.replace("self.transfers.mark(self.user)", "self.transfers.mark(self.user) if self.slots else None")),
    _segments("fetches do not wait for gradients to arrive in RAM", RELEASE_GRADIENTS,
        "        self._window.release()\n"),
    _segments("fetches wait for what computes, not for gradients", RELEASE_GRADIENTS, "        self._window.release()\n"
        "        transfers = self._window.transfers\n"
        "        transfers.wait(Lane.STATES_IN, transfers.mark(Lane.COMPUTE))\n",
        equivalent="what computes has waited for them by then, since their memory is free"),
    _segments("a gradient's memory is free before it has left", SEND_GRADIENT,
        SEND_GRADIENT + "            self._window.sent.clear()\n"),
    _window("of what was sent only the newest is waited for", FREE,
        "            for lane in (self.user, *lanes) if len(self.sent) == keep + 1 else ():\n",
        equivalent="a lane's copies are made in order: what waits for the newest waits for all"),
    _window("of what was sent only the oldest is waited for", FREE,
        "            for lane in (self.user, *lanes) if len(self.sent) > keep + 1 else ():\n"),
]

DISK = [
    _window("the host does not wait for what it writes to a disk", HOST_WAITS, "            # the host"),
    _window("the host waits for what the slot before holds", HOST_WAITS,
        HOST_WAITS.replace("slot.left", "self._slot(self._fetched - 1).left")),
    _window("slots share their buffers for a disk", "        return _views(slot, slot.buffers, {",
        "        slot.buffers = self._window.slots[0].buffers or slot.buffers\n"
        "        return _views(slot, slot.buffers, {"),
    _window("what belongs on a disk stays in the buffers", SYNCHRONIZE + "        for slot in self._window.slots:\n",
        SYNCHRONIZE + "        for slot in ():\n"),
    _window("what belongs on a disk is written before it has arrived", SYNCHRONIZE,
        "        for slot in self._window.slots:\n            self._settle(slot)\n" + SYNCHRONIZE),
]

UPDATES = [
    _window("an update does not wait for its state", TAKE, "        slot = self._slot(self._used)\n"),
    _window("an update waits for the slot before", TAKE, TAKE.replace("use(slot)", "use(self._slot(self._used - 1))")),
    _window("an update waits for the next slot", TAKE, TAKE.replace("use(slot)", "use(self._slot(self._used + 1))")),
    _window("what computes waits for a state, not the updates", TAKE,
        TAKE.replace("self._window.use(slot)", "self._transfers.wait(Lane.COMPUTE, slot.arrived)")),
    _lanes("updates run on the stream that computes", UPDATING, "        return nullcontext()\n"),
    _updates("updates are not recorded", MARK_UPDATED, ""),
    _updates("updates are recorded before they are made", UPDATE + MARK_UPDATED, MARK_UPDATED + UPDATE),
    _updates("updates are recorded on the stream that computes", MARK_UPDATED,
        MARK_UPDATED.replace("UPDATES", "COMPUTE")),
    _updates("updates do not wait for what computes", WAIT_FOR_GRADIENTS, "        pass\n"),
    _updates("what computes waits for the updates, not they for it", WAIT_FOR_GRADIENTS,
        "        self._transfers.wait(Lane.COMPUTE, self._transfers.mark(Lane.UPDATES))\n"),
    _updates("what computes does not wait for updates", HOLD, "            pass\n"),
    _updates("what computes waits for states, not for updates", HOLD,
        HOLD.replace("self._updated", "self._transfers.mark(Lane.STATES_IN)")),
    _updates("updates are made ready without a wait for what computes", BEGIN,
        "        self.state_window.begin(pieces)\n"),
    _updates("updates in the other order do not wait for those before", TURNING,
        TURNING.replace("self.state_window.synchronize()", "pass")),
    _updates("updates in backward do not wait for their gradients", DOWNWARDS, ""),
    _updates("updates in backward wait for the first gradients alone", "        if self._downwards:  # their",
        "        if self._downwards and self._next == 0:  # their"),
    _updates("what computes is held before updates, not after", RUN + HOLD,
        RUN.replace("            while", HOLD + "            while") + "            pass\n"),
    _updates("updates are not launched as updates", "            with self._transfers.updating():\n",
        "            if True:\n"),
    Mutation("core/optimizers.py", "8-bit updates count as running on any stream", "        any_stream=False,",
        "        any_stream=True,"),
]

COPIES_OUT = [
    _window("copies out do not wait for the update", SEND, SEND.replace("self.transfers.mark(self.user)", "None")),
    _window("copies out wait for what computes, not for the update", SEND,
        SEND.replace("mark(self.user)", "mark(Lane.COMPUTE)")),
    _window("copies out wait for the copies in, not for the update", SEND,
        SEND.replace("mark(self.user)", "mark(self.into)")),
    _window("the wait for the update comes after the copies out", SEND,
        SEND.replace(", self.transfers.mark(self.user))",
        ")\n        self.transfers.wait(self.out, self.transfers.mark(self.user))")),
    _updates("a state is written back before it is updated", UPDATE + MARK_UPDATED + GIVE_BACK,
        indented(GIVE_BACK) + UPDATE + MARK_UPDATED),
    _window("copies out are recorded for the slot before", SEND,
        SEND.replace("slot.left", "(self.slots[self.slots.index(slot) - 1] if slot in self.slots else slot).left")),
]

SYNCHRONIZING = [
    _lanes("the host does not wait for copies out", "            stream.synchronize()\n",
        "            if stream is not self._streams[Lane.STATES_OUT]:\n                stream.synchronize()\n"),
    _lanes("the host does not wait for copies in", "            stream.synchronize()\n",
        "            if stream is not self._streams[Lane.STATES_IN]:\n                stream.synchronize()\n",
        equivalent="flush() has completed the pass before: every copy in was awaited by the stream of the updates, and "
        "that by the copies out, for which the host waits"),
    _window("the window is not synchronized", SYNCHRONIZE, ""),
    _updates("a flush does not wait for the copies", FLUSH, "        self.run_until(self.units)\n"),
]
# fmt: on
MUTATIONS = COPIES + SLOTS + WEIGHTS + BOUNDARIES + GRADIENTS + DISK + UPDATES + COPIES_OUT + SYNCHRONIZING
