"""Makes all figures of this experiment: `python -m experiments.nested_tensors.run`.

    python -m experiments.nested_tensors.run --num_samples 16 --batch_size 8 --model gpt2

Runs eval, memory and time_profiling one after the other. Under --out: their rows, the tables, and pictures in plots/.
"""

import sys

from experiments.harness.options import exit_code_of, parser_of, positive
from experiments.nested_tensors import eval, memory, table, time_profiling
from experiments.nested_tensors.main import OUT, add_sample_options, chosen_device, chosen_samples, make_out
from experiments.nested_tensors.ragged import SHAPES

PROGRAM = "experiments.nested_tensors.run"
QUICK = ("equal", "tokens", "one token")  # lists of lengths; the others take minutes on a CPU


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--model", choices=SHAPES, action="append", help="default: all of them")
    add_sample_options(parser)
    parser.add_argument("--rounds", type=positive, default=1, metavar="N", help="of time_profiling (%(default)s)")
    parser.add_argument(
        "--lengths", choices=eval.LENGTHS, action="append", help=f"of eval (default: {', '.join(QUICK)})"
    )
    parser.add_argument("--out", type=type(OUT), default=OUT, metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    chosen_device(parser, options)
    chosen_samples(parser, options)
    make_out(parser, options.out / "plots")
    files = {name: options.out / f"{name}.jsonl" for name in ("eval", "peaks", "stages")}
    for path in (*files.values(), *(options.out / "plots").glob("*.png")):  # an older run's
        path.unlink(missing_ok=True)
    models = [word for model in options.model or SHAPES for word in ("--model", model)]
    device = ["--device", options.device, "--dtype", options.dtype]
    samples = ["--data", options.data, "--num_samples", str(options.num_samples)]
    samples += ["--batch_size", str(options.batch_size), *device]
    lengths = [word for kind in options.lengths or QUICK for word in ("--lengths", kind)]
    commands = {
        "what each mode computes": (eval, [*models, *lengths, *device, "--rows", str(files["eval"])]),
        "memory of each mode": (memory, [*models, *samples, "--out", str(files["peaks"])]),
        "time by stage": (
            time_profiling,
            [*models, *samples, "--rounds", str(options.rounds), "--rows", str(files["stages"]), "--out",
             str(options.out)],
        ),
    }  # fmt: skip
    codes = []
    for number, (title, (module, words)) in enumerate(commands.items(), 1):
        print(f"{number} of {len(commands)}: {title}", file=sys.stderr, flush=True)
        codes.append(module.main(words))
    for path in table.draw(options.out, options.out / "plots"):
        print(f"see {path}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
