"""Lists the compared cases: models, cards, caps and options of training, as command lines.

Most layouts are given, because a search takes longer than the run; in SEARCHED and PROMISED the planner chooses.
"""

from dataclasses import dataclass

CARDS = ("rtx3060", "t4", "rtx4090", "a100", "h100")
NO_CAP, TIGHT = "none", "tight"


@dataclass(frozen=True)
class Case:
    """A run to compare. `model`: of harness/models.py, or a script's. `cap`: NO_CAP, a size, or TIGHT, which is between
    allocated and reserved bytes without a cap. `grow`: expandable segments. `two_passes`: forward and backward run
    twice."""

    model: str
    card: str
    options: tuple[str, ...]
    cap: str = NO_CAP
    grow: bool = True
    two_passes: bool = False
    script: str | None = None

    @property
    def name(self) -> str:
        parts = [self.script or self.model, self.card, *self.options, f"cap {self.cap}"]
        parts += [] if self.grow else ["segments do not grow"]
        parts += ["two passes"] if self.two_passes else []
        return " ".join(parts)


def _of(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LAYOUTS = {
    "recomputed": _of("--recompute on --segment-blocks 1 --group 1 --states streamed"),
    "segments of two": _of("--recompute on --segment-blocks 2 --group 2 --states streamed"),
    "products kept": _of("--recompute products --segment-blocks 1 --group 1 --states streamed"),
    "kept": _of("--recompute off --segment-blocks 1 --group 1 --states streamed"),
    "resident": _of("--recompute on --segment-blocks 1 --group 1 --states resident"),
    "in backward": _of("--recompute on --segment-blocks 1 --group 2 --states streamed --clip-norm 0"),
}
BATCH = _of("--batch 4 --micro-batch 2")
MORE = (  # options added to the layouts, in turn
    (),
    _of("--seq 900"),
    _of("--optimizer adamw8bit"),
    _of("--residual 16bit"),
    _of("--optimizer sgd --seq 777"),
    _of("--precision fp32 --seq 512"),
    _of("--seq 1023 --residual 16bit"),
)
SMALL = ("opt-125m", "opt-350m", "bloom-560m", "codegen-350M-mono", "biogpt", "gpt-neo-125m", "gpt2", "gpt2-medium")
MIDDLE = (
    *("opt-1.3b", "bloom-1b1", "gpt_bigcode-santacoder", "gpt-neo-1.3B", "gpt2-large", "gpt2-xl", "llama-1b"),
    "codegen-2B-mono",
)
LARGE = ("gpt-j-6b", "llama-7b", "pythia-12b")
NO_DOCUMENT_MASK = ("opt", "bloom", "biogpt")  # which cannot


def _models() -> list[Case]:
    found = []
    for place, model in enumerate((*SMALL, *MIDDLE)):
        for turn, card in enumerate(CARDS):
            if model == "codegen-2B-mono" and card == "t4":
                continue  # loss scaling looks at all gradients first, which do not fit
            number = place * len(CARDS) + turn + place
            small = model in SMALL
            layouts = list(LAYOUTS.values()) if small else [LAYOUTS["in backward"], LAYOUTS["recomputed"]]
            roomy = model in SMALL or card in ("a100", "h100")
            layout = layouts[number % len(layouts)] if roomy else LAYOUTS["in backward"]
            more = MORE[number % len(MORE)]
            if "fp32" in more and not small:
                more = ()
            masked = number % 4 == 1 and not model.startswith(NO_DOCUMENT_MASK)
            options = (*BATCH, *layout, *more, *(_of("--document-mask on") if masked else ()))
            found.append(Case(model, card, options, TIGHT if number % 3 == 2 else NO_CAP, grow=number % 5 != 3))
    for model in LARGE:
        for card in ("a100", "h100") if model != "pythia-12b" else ("h100",):
            found.append(Case(model, card, (*BATCH, *LAYOUTS["in backward"])))
    return found


def _one_model_with_everything() -> list[Case]:
    found = []
    for place, options in enumerate(LAYOUTS.values()):
        for turn, more in enumerate((_of("--optimizer adamw"), _of("--optimizer adamw8bit"), _of("--optimizer sgd"))):
            card = CARDS[(place + turn) % len(CARDS)]
            grow = (place + turn) % 2 == 0
            found.append(Case("gpt2", card, (*_of("--batch 8 --micro-batch 4"), *options, *more), TIGHT, grow))
    for card in CARDS:
        for grow in (True, False):
            two = (*BATCH, *_of("--recompute on --segment-blocks 1 --group 2 --states streamed"))
            found.append(Case("gpt2-medium", card, two, grow=grow, two_passes=True))
    return found


SEARCHED = [Case("gpt2", card, _of("--batch 8"), cap) for card in CARDS for cap in ("1400MiB", "2GiB", "4GiB")]

_FULL = {
    "recomputed": _of("--micro-batch 4 --group 1 --segment-blocks 1 --recompute on --states streamed"),
    "groups": _of("--micro-batch 2 --group 2 --segment-blocks 2 --recompute on --states streamed"),
    "in backward": _of("--micro-batch 2 --group 32 --segment-blocks 8 --recompute on --states streamed --clip-norm 0"),
}
SCRIPTS = [
    Case(model, card, (*options, "--ram-limit", "none"), cap, script=f"train_{model.replace('-', '_')}.py")
    for model in ("gpt2-large", "gpt2-xl")
    for card in CARDS
    for options, cap in zip(_FULL.values(), (NO_CAP, TIGHT, TIGHT), strict=True)
]
OTHERS = [*_models(), *_one_model_with_everything()]
CASES = [*OTHERS, *SEARCHED, *SCRIPTS]

_LEFT_OPEN = {  # what a plan may choose in the cells of promise.py: everything, or what an option leaves of it
    "all": (),
    "one pass": _of("--group 1 --micro-batch 1"),
    "in backward": _of("--clip-norm 0 --micro-batch 1"),
    "recomputed": _of("--recompute on --micro-batch 2"),
    "products kept": _of("--recompute products --micro-batch 1"),
    "kept": _of("--recompute off --micro-batch 1 --group 1"),
    "resident": _of("--states resident --micro-batch 1"),
}
_PROMISED_CARDS = ("rtx3060", "t4", "h100")
_PROMISED_MODELS = ("gpt2", "opt-125m", "gpt-neo-125m", "opt-350m", "bloom-560m", "biogpt", "gpt2-medium")
_PROMISED_SHAPES = (_of("--batch 2 --seq 512"), _of("--batch 4 --seq 256"), _of("--batch 2 --seq 777"))
_PROMISED_MORE = (
    (), _of("--optimizer adamw8bit"), _of("--optimizer sgd"), _of("--residual 16bit"), _of("--optimizer adamw8bit"),
)  # fmt: skip


def _promised() -> list[Case]:
    found = []
    for place, model in enumerate(_PROMISED_MODELS):
        for turn, left_open in enumerate(_LEFT_OPEN.values()):
            number = place * len(_LEFT_OPEN) + turn
            if (place + turn) % 7 == 6 or (place > 2 and not left_open):  # where everything is open a search takes long
                continue
            shape, more = _PROMISED_SHAPES[number % 3], _PROMISED_MORE[(number + place) % 5]
            card = _PROMISED_CARDS[(number + turn + place) % 3]
            found.append(Case(model, card, (*shape, *left_open, *more), "the smallest"))
    for model, name, card in (
        ("gpt2-large", "resident", "h100"), ("gpt2-large", "kept", "rtx3060"), ("opt-1.3b", "resident", "h100"),
        ("bloom-1b1", "kept", "t4"), ("gpt-neo-1.3B", "in backward", "t4"), ("gpt2-xl", "one pass", "rtx3060"),
    ):  # fmt: skip
        found.append(Case(model, card, (*_of("--batch 2 --seq 512"), *_LEFT_OPEN[name]), "the smallest"))
    return found


PROMISED = _promised()
_ONE_LAYOUT = _of("--batch 2 --seq 256 --micro-batch 1 --segment-blocks 1")
PROMISED_RAM = [
    Case("gpt2", "rtx3060", (*_ONE_LAYOUT, *_of("--group 2 --recompute on --clip-norm 0")), "760MiB"),
    Case("gpt2", "h100", (*_ONE_LAYOUT, *_of("--group 1 --recompute off")), "1300MiB"),
    Case("opt-125m", "t4", (*_ONE_LAYOUT, *_of("--group 1 --recompute on --optimizer adamw8bit")), "1000MiB"),
    Case("opt-125m", "a100", (*_ONE_LAYOUT, *_of("--group 1 --recompute products")), "1300MiB"),
    Case("gpt-neo-125m", "rtx4090", (*_ONE_LAYOUT, *_of("--group 2 --recompute on --states streamed")), "1200MiB"),
    Case("gpt-neo-125m", "t4", (*_ONE_LAYOUT, *_of("--group 1 --recompute off --residual 16bit")), "1400MiB"),
    Case("opt-350m", "rtx3060", (*_ONE_LAYOUT, *_of("--group 2 --recompute on --clip-norm 0")), "1500MiB"),
    Case("gpt2-medium", "rtx4090", (*_ONE_LAYOUT, *_of("--group 1 --recompute on")), "2600MiB"),
    Case("gpt2-large", "rtx3060", (*_ONE_LAYOUT, *_of("--group 2 --recompute on --clip-norm 0")), "2400MiB"),
]
