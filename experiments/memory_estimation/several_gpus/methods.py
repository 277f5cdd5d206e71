"""Which of PyTorch's methods divides a decoder among several GPUs: each one's largest micro-batch, and its time.

    python -m experiments.memory_estimation.several_gpus.methods --model gpt2-large --gpu rtx3090 --gpus 4

NCCL's buffers are not counted: a figure within 1 GiB of the card is no promise. Seconds are good for an order of the
methods only. Not compared with GPUs.
"""

import json
import sys
from dataclasses import dataclass

from transformers import PretrainedConfig

from experiments.harness.options import exit_code_of
from experiments.memory_estimation.several_gpus.rank import METHODS, PLAIN, RankPeak, peak_of, record, tensor_ranks
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.cudasim.gpus import Card
from lowmem.errors import InputError, LowmemError, PlanError
from lowmem.limits import CONTEXT_BYTES
from lowmem.models.build import build_model
from lowmem.models.compatibility import architecture_blamed
from lowmem.planning.simulated_step import Target, gpu_target
from lowmem.run.cli import parse_plan
from lowmem.run.early import check_target
from lowmem.run.prepare import ask
from lowmem.settings import Settings
from lowmem.terminal import say
from lowmem.units import format_size

_FIGURES = (  # of a RankPeak, in JSON
    "ranks", "tensor_ranks", "micro_batch", "allocated_peak_bytes", "reserved_peak_bytes", "persistent_bytes",
    "at_peak",
)  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """One row. `peak`: None if the method cannot be had; `refusal` says why."""

    method: str
    peak: RankPeak | None
    accumulation: int
    step_seconds: float
    refusal: str = ""


def main(arguments: list[str] | None = None) -> int:
    program = {"prog": f"python -m {__spec__.name}", "description": __doc__.split("\n")[0]}
    try:
        settings, options = parse_plan(sys.argv[1:] if arguments is None else arguments, program)
        if options.machines != 1:
            raise InputError("--machines is for lowmem plan: this divides a model among the GPUs of one machine")
        question = ask(check_target(settings, say))
        return answer(question.settings, question.config, question.card, options.gpus, options.json)
    except LowmemError as error:
        say(f"error: {error}")
        return error.exit_code


def answer(settings: Settings, config: PretrainedConfig, card: Card, ranks: int, as_json: bool) -> int:
    if settings.target_tokens is not None:
        raise InputError("the advice is for decoders, and this model is an encoder-decoder")
    limit = settings.gpu_limit_bytes
    memory = card.memory_bytes if limit is None else min(limit + CONTEXT_BYTES, card.memory_bytes)
    with architecture_blamed(settings.model, "16 bit"):
        rows, sentence = advise(config, ranks, memory, settings.seq, settings.batch, gpu_target(card))
    print(json.dumps(to_dict(rows, sentence), indent=2) if as_json else describe(rows, sentence))
    if any(row.peak is not None for row in rows):
        return 0
    say(f"error: {sentence}")
    return PlanError.exit_code


def advise(
    config: PretrainedConfig, ranks: int, card_bytes: int, seq: int, batch: int, target: Target = PLAIN
) -> tuple[list[Advice], str]:
    """Returns every method with its largest micro-batch that fits, and a sentence of advice. `card_bytes`: with CUDA's
    context. Micro-batches are powers of two that divide a rank's share of `batch` sequences per step. Raises InputError
    for impossible numbers, and for a card without room for CUDA."""
    for name, number in (("GPUs", ranks), ("sequences per step", batch), ("tokens per sequence", seq)):
        if number < 1:
            raise InputError(f"there have to be {name}: at least 1, and not {number}")
    if card_bytes <= CONTEXT_BYTES:
        raise InputError(f"cards of {format_size(card_bytes)} have no room beside CUDA's {format_size(CONTEXT_BYTES)}")
    rows = [_advice(config, method, ranks, card_bytes - CONTEXT_BYTES, seq, batch, target) for method in METHODS]
    possible = [row for row in rows if row.peak is not None]
    if not possible:
        return rows, f"No method can train this on {ranks} GPUs of {format_size(card_bytes)}: each row says why."
    if target.copies:
        best = min(possible, key=lambda row: row.step_seconds)
        reason = f"its step takes least, about {best.step_seconds:.3g} s"
    else:
        best = min(possible, key=lambda row: row.accumulation)
        reason = "it needs the fewest micro-batches per step"
    return rows, (
        f"Take {best.method} with micro-batches of {best.peak.micro_batch}, {best.accumulation} of them per step: of "
        f"what fits, {reason}, and it reserves {format_size(best.peak.reserved_peak_bytes)} per card."
    )


def describe(rows: list[Advice], sentence: str) -> str:
    columns = "{:<8}{:>12}{:>14}{:>14}{:>14}{:>12}".format
    lines = [columns("method", "micro-batch", "accumulation", "allocated", "reserved", "s/step")]
    for row in rows:
        if row.peak is None:
            lines.append(f"{row.method:<8}  no: {row.refusal}")
        else:
            seconds = f"{row.step_seconds:.3g}" if row.step_seconds else "-"
            sizes = format_size(row.peak.allocated_peak_bytes), format_size(row.peak.reserved_peak_bytes)
            lines.append(columns(row.method, row.peak.micro_batch, row.accumulation, *sizes, seconds))
    lines.append("micro-batch and bytes are per GPU; NCCL's buffers, up to 1 GiB, come on top; not measured on GPUs")
    return "\n".join([*lines, sentence])


def to_dict(rows: list[Advice], sentence: str) -> dict:
    """Returns the advice for JSON, with bytes by name at each peak; null if there is no figure."""
    return {
        "advice": sentence,
        "methods": [
            {
                "method": row.method,
                "possible": row.peak is not None,
                "refusal": row.refusal or None,
                "accumulation": row.accumulation or None,
                "step_seconds": row.step_seconds or None,
                **{name: getattr(row.peak, name, None) for name in _FIGURES},
            }
            for row in rows
        ],
    }


def _advice(config, method: str, ranks: int, limit_bytes: int, seq: int, batch: int, target: Target) -> Advice:
    try:
        data_ranks = ranks // tensor_ranks(method, ranks)
        if batch % data_ranks:
            raise InputError(f"a batch of {batch} cannot be divided among {data_ranks} data-parallel ranks")
        peak = _largest(config, method, ranks, limit_bytes, seq, batch // data_ranks, target)
    except SimulatedOutOfMemory as error:
        return Advice(method, None, 0, 0.0, f"not even one sequence fits: {error}")
    except InputError as error:
        return Advice(method, None, 0, 0.0, str(error))
    accumulation = batch // data_ranks // peak.micro_batch
    return Advice(method, peak, accumulation, _step_seconds(config, peak, accumulation, seq, target))


def _largest(config, method: str, ranks: int, limit_bytes: int, seq: int, per_rank: int, target: Target) -> RankPeak:
    """Returns the peak with the largest micro-batch that fits. Raises SimulatedOutOfMemory if one sequence does not."""

    def peak(micro_batch: int) -> RankPeak:
        recording = record(config, method, ranks, micro_batch, seq, target, per_rank // micro_batch)
        return peak_of(recording, method, ranks, micro_batch, limit_bytes)

    sizes = [2**k for k in range(per_rank.bit_length()) if per_rank % 2**k == 0]
    largest = None
    while sizes:
        middle = len(sizes) // 2
        try:
            largest = peak(sizes[middle])
            sizes = sizes[middle + 1 :]
        except SimulatedOutOfMemory as error:
            refusal = error
            sizes = sizes[:middle]
    if largest is None:
        raise refusal
    return largest


def _step_seconds(config, peak: RankPeak, accumulation: int, seq: int, target: Target) -> float:
    if not target.copies:
        return 0.0
    text = config.get_text_config()
    compute = peak.seconds + (accumulation - min(accumulation, 2)) * peak.micro_batch_seconds
    parameters = sum(p.numel() for p in build_model(config).parameters())
    data_ranks = peak.ranks // peak.tensor_ranks
    parameters_here = parameters / peak.tensor_ranks
    share, tensor_share = ((r - 1) / r for r in (data_ranks, peak.tensor_ranks))
    if peak.method == "ddp":  # a ring: every gradient passes twice, once per step
        hidden = 2 * 4 * parameters_here * share
    else:  # gathered forward and backward in 16 bit, reduced in fp32, for every micro-batch
        hidden = (2 + 2 + 4) * parameters_here * share * accumulation
    activation = peak.micro_batch * seq * text.hidden_size * 2
    exposed = 2 * tensor_share * activation * (6 * text.num_hidden_layers + 2) * accumulation
    # Communication at the speed of a copy over the bus in one direction; tensor parallelism's is not hidden.
    return max(compute, hidden / target.copies) + exposed / target.copies


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
