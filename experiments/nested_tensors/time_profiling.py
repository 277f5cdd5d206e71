"""Times each stage of forward, and backward, by mode: `python -m experiments.nested_tensors.time_profiling`.

    python -m experiments.nested_tensors.time_profiling --data functions --num_samples 16 --batch_size 8 --rounds 1

Modes alternate, batch after batch. The head's time includes the loss; the time between modules is "norms, sums". Adds
rows, and writes plots/stages-<data>.png under --out.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from experiments.harness import rows as row_file
from experiments.harness.options import check_rows, exit_code_of, parser_of, positive, under_runs
from experiments.nested_tensors.main import (
    OUT,
    add_sample_options,
    chosen_device,
    chosen_samples,
    make_out,
    on_device,
    wait,
)
from experiments.nested_tensors.ragged import MODES, SHAPES, Inputs, batches_of, collate, forward, make_model
from experiments.nested_tensors.table import BACKWARD, BETWEEN, STAGE_ROWS, draw_stages, picture_name

PROGRAM = "experiments.nested_tensors.time_profiling"
STAGE_OF = {  # by the last part of a module's name
    **dict.fromkeys(("wte", "wpe", "embed_tokens"), "embedding"),
    **dict.fromkeys(("attn", "self_attn", "rotary_emb"), "attention"),
    "mlp": "MLP",
    "lm_head": "head, loss",
}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--model", choices=SHAPES, action="append", help="default: all of them")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all of them")
    add_sample_options(parser)
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="times all batches, the median counts")
    parser.add_argument(
        "--rows", type=Path, default=under_runs(STAGE_ROWS), metavar="ROWS.jsonl", help="default: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    device, samples = chosen_device(parser, options), chosen_samples(parser, options)
    path = options.out / "plots" / picture_name(options.data)
    make_out(parser, path.parent)
    check_rows(options.rows)
    common = {"sources": row_file.sources(PROGRAM), "threads": torch.get_num_threads()}
    common |= on_device(device, options.dtype)
    common |= row_file.made_by(PROGRAM, arguments)
    common |= {key: getattr(options, key) for key in ("data", "num_samples", "batch_size")}
    made = []
    for model in options.model or SHAPES:
        modes = options.mode or MODES
        clocks = {mode: StageClock(make_model(model, mode, device, options.dtype), device) for mode in modes}
        for found in rounds_of(clocks, samples, options.batch_size, options.rounds):
            made.append(common | {"model": model} | found)
            row_file.append(options.rows, made[-1])
    draw_stages(made, path)
    print(f"see {path}")
    return 0


def rounds_of(
    clocks: dict[str, "StageClock"], samples: list[list[int]], batch_size: int, rounds: int
) -> Iterator[dict]:
    """Yields, for each round and mode, the sums over all batches: tokens, positions, and seconds by stage."""
    lengths = [len(sample) for sample in samples]
    batches = {
        mode: [collate(mode, [samples[place] for place in places]) for places in batches_of(mode, lengths, batch_size)]
        for mode in clocks
    }
    for mode, clock in clocks.items():
        clock.seconds_of(batches[mode][0])  # gradients, handles and workspaces come to be
    for number in range(rounds):
        seconds = {mode: Counter() for mode in clocks}
        for turn in range(len(batches[next(iter(clocks))])):
            for mode, clock in clocks.items():
                seconds[mode].update(clock.seconds_of(batches[mode][turn]))
        for mode, of_mode in batches.items():
            sums = {key: sum(getattr(inputs, key) for inputs in of_mode) for key in ("tokens", "positions")}
            yield {"round": number, "mode": mode, **sums, "seconds": dict(seconds[mode])}


class StageClock:
    """Times the stages of a model's forward by hooks on its modules, and its backward as a whole."""

    def __init__(self, model: nn.Module, device: torch.device):
        self._model, self._device = model, device
        self._seconds: Counter[str] = Counter()
        self._began = 0.0
        for name, module in model.named_modules():
            stage = STAGE_OF.get(name.rpartition(".")[2])
            if stage is not None:
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(lambda *_, stage=stage: self._end(stage))

    def seconds_of(self, inputs: Inputs) -> dict[str, float]:
        """Returns seconds by stage for forward and backward of one batch. Gradients accumulate."""
        self._seconds = Counter()
        inputs = inputs.to(self._device)
        began = self._now()
        loss, _ = forward(self._model, inputs)
        ended = self._now()
        self._seconds["head, loss"] = ended - self._began  # the head was the last to begin
        self._seconds[BETWEEN] = ended - began - sum(self._seconds.values())
        loss.backward()
        self._seconds[BACKWARD] = self._now() - ended
        return dict(self._seconds)

    def _begin(self, *_) -> None:
        self._began = self._now()

    def _end(self, stage: str) -> None:
        self._seconds[stage] += self._now() - self._began

    def _now(self) -> float:
        wait(self._device)
        return time.perf_counter()


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
