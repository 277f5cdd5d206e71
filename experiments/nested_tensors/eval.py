"""Compares each mode's logits and gradients with one sample at a time: `python -m experiments.nested_tensors.eval`.

One sample at a time runs the stock model in fp32. Relative distances are reported, the largest of all:

    output    of a token's logits
    gradient  of a parameter's gradient; if its norm is below a thousandth of all gradients', relative to that

Both have to be below 1e-5 in fp32, and below 0.1 in bf16, where a rounding is 4e-3.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.harness import rows as row_file
from experiments.harness.comparison import worst
from experiments.harness.options import check_rows, exit_code_of, parser_of, under_runs
from experiments.nested_tensors.main import add_device_options, chosen_device, on_device
from experiments.nested_tensors.picture import DISTANCE_EDGES, LOGIT_EDGES
from experiments.nested_tensors.ragged import (
    LONGEST,
    MODES,
    PADDED,
    SHAPES,
    VOCABULARY,
    Inputs,
    collate,
    forward,
    make_model,
)

PROGRAM = "experiments.nested_tensors.eval"
RESULTS = Path(__file__).parent / "results" / "eval.jsonl"
# fp32 sums of a thousand terms in another order make a few 1e-7; a document that sees another makes 0.3. In bf16 up to
# 7e-2 was seen.
TOLERANCES = {"fp32": 1e-5, "bf16": 0.1}
# Some gradients are nothing but rounding: of queries, if a sample has one token.
VANISHING = 1e-3  # of the norm of all gradients
LAST_LABEL = 0  # so that a sample of one token has a loss, too
LENGTHS = {  # of the samples in one batch
    "many": [1, 2, 3, 17, 64, 65, 200, 300, LONGEST],
    "equal": [40] * 6,
    "one token": [1],
    "tokens": [1] * 9,
    "one": [500],
}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--model", choices=SHAPES, action="append", help="default: all of them")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all of them")
    parser.add_argument("--lengths", choices=LENGTHS, action="append", help="default: all of them")
    add_device_options(parser)
    parser.add_argument(
        "--rows", type=Path, default=under_runs(RESULTS), metavar="ROWS.jsonl", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    device, allowed = chosen_device(parser, options), TOLERANCES[options.dtype]
    common = {"sources": row_file.sources(PROGRAM)} | row_file.made_by(PROGRAM, arguments)
    common |= on_device(device, options.dtype)
    check_rows(options.rows)
    largest = 0.0
    for shape in options.model or SHAPES:
        for kind in options.lengths or LENGTHS:
            samples = drawn_samples(LENGTHS[kind])
            expected = truth(shape, samples, device)
            for mode in options.mode or MODES:
                began = time.perf_counter()
                results = computed(shape, mode, samples, device, options.dtype)
                found = compared(results, expected)
                seconds = time.perf_counter() - began
                largest = worst((largest, *found.values()))
                row = common | {"model": shape, "mode": mode, "lengths": kind, "seconds": seconds} | found
                row["distribution"] = distribution(results[0], expected[0])
                row_file.append(options.rows, row)
                print(f"{shape:6} {mode:9} {kind:10} output {found['output']:.1e}  gradient {found['gradient']:.1e}")
    if not largest <= allowed:
        print(f"a distance of {largest:.1e} is above {allowed:.0e}", file=sys.stderr)
        return 1
    return 0


def drawn_samples(lengths: list[int], vocabulary: int = VOCABULARY, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


Results = tuple[list[Tensor], dict[str, Tensor]]  # logits [tokens, V] of each sample, gradients by name


def truth(shape: str, samples: list[list[int]], device: torch.device) -> Results:
    model = make_model(shape, PADDED, device)
    outputs = []
    for sample in samples:
        loss, logits = forward(model, collate(PADDED, [sample], LAST_LABEL).to(device))
        loss.backward()
        outputs.append(logits[0].detach())
    return outputs, _gradients(model)


def distances(
    shape: str, mode: str, samples: list[list[int]], expected: Results, device: torch.device, dtype: str = "fp32"
) -> dict:
    return compared(computed(shape, mode, samples, device, dtype), expected)


def computed(shape: str, mode: str, samples: list[list[int]], device: torch.device, dtype: str = "fp32") -> Results:
    """Computes a mode, all samples as one batch. Results are fp32."""
    model = make_model(shape, mode, device, dtype)
    inputs = collate(mode, samples, LAST_LABEL).to(device)
    loss, logits = forward(model, inputs)
    loss.backward()
    return _of_samples(logits.detach().float(), inputs, [len(sample) for sample in samples]), _gradients(model)


def compared(found: Results, expected: Results) -> dict:
    gradients = expected[1]
    least = VANISHING * float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    gradient = worst(
        float((one - gradients[name]).norm()) / max(float(gradients[name].norm()), least)
        for name, one in found[1].items()
    )
    return {"output": worst(tokens_distances(found[0], expected[0])), "gradient": gradient}


def tokens_distances(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = zip(found, expected, strict=True)
    return [distance for one, true in pairs for distance in ((one - true).norm(dim=1) / true.norm(dim=1)).tolist()]


def distribution(found: list[Tensor], expected: list[Tensor]) -> dict[str, list[int]]:
    """Counts logits by their value (`logits`, `expected`), and tokens by the power of ten of their relative distance
    (`distances`), in bins of LOGIT_EDGES and DISTANCE_EDGES."""

    def counts(values: Tensor, edges: Sequence[float]) -> list[int]:
        inside = values.nan_to_num(edges[-1]).clamp(edges[0], edges[-1])
        return torch.histc(inside.cpu(), len(edges) - 1, edges[0], edges[-1]).long().tolist()

    tens = torch.tensor(tokens_distances(found, expected)).log10()
    return {
        "logits": counts(torch.cat(found).flatten(), LOGIT_EDGES),
        "expected": counts(torch.cat(expected).flatten(), LOGIT_EDGES),
        "distances": counts(tens, DISTANCE_EDGES),
    }


def _of_samples(logits: Tensor, inputs: Inputs, lengths: list[int]) -> list[Tensor]:
    if "documents" in inputs.keywords:
        return list(logits[0].split(lengths))
    return [row[:length] for row, length in zip(logits, lengths, strict=True)]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.float() for name, p in model.named_parameters()}


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
