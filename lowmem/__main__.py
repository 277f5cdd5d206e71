"""lowmem train|plan|demo|report [options], or python -m lowmem ...

train    any model: the options of train_gpt2_large.py, --model among them
plan     what it would take: the options of `python -m lowmem.plan`
demo     a pretrained model learns to answer like a ship's captain, in 3 minutes
report   a page about one run or several: report RUN [RUN ...] [--out FILE]
"""

import sys
from importlib import import_module

from lowmem.run.signals import interrupt_ends_at_once
from lowmem.terminal import output, say

_PROGRAMS = {  # {command: (module of lowmem/run, function)}
    "train": ("main", "main"),
    "plan": ("plan_command", "main"),
    "demo": ("demo", "demo"),
    "report": ("report_command", "main"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command `arguments[0]`, such as "train", with the options `arguments[1:]`. If `arguments` is None, takes
    those of the command line. Returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    command, options = (words[0], words[1:]) if words else ("", [])
    if command in _PROGRAMS:
        module, function = _PROGRAMS[command]
        with interrupt_ends_at_once():  # the program does the same, but only after its imports
            program = getattr(import_module(f"lowmem.run.{module}"), function)
            first = [import_module("lowmem.settings").Settings()] if command == "train" else []
        ends = {"ends_process": arguments is None} if command in ("train", "demo") else {}
        return program(*first, options, **ends)
    if command in ("-h", "--help"):
        with output():
            print(__doc__, flush=True)
        return 0
    said = f"{command!r} is no command" if command else "no command is given"
    say(f"lowmem: {said}; the commands are train, plan, demo and report (lowmem --help).")
    return 2


if __name__ == "__main__":
    sys.argv[0] = "lowmem"  # the program's name in errors and in --help
    sys.exit(main())
