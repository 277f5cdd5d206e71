"""A training script, run as a user would run it but within this process, so that what it has in its hands can be seen.

The scripts are called by path, since experiments do not import them; what is watched or disturbed is put in the place
of names in lowmem/run/train.py and prepare.py for as long as the script runs."""

import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from unittest.mock import patch

from experiments.harness.rows import ROOT
from lowmem.run import prepare, train


def run_script(script: str, arguments: Sequence[str], **instead: Callable) -> int:
    """Its exit code. `instead`: what replaces names in lowmem/run/train.py or prepare.py."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(sys, "argv", [script, *arguments]))
        for name, function in instead.items():
            patches.enter_context(patch.object(train if hasattr(train, name) else prepare, name, function))
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as exit:
            return exit.code or 0
    return 0


def remembering(function: Callable, kept: dict, begin: Callable[[], None] = lambda: None) -> Callable:
    """`function`, which leaves its arguments and what it returns in `kept`, by their names and by its own; `begin` is
    called once the arguments are there."""

    def call(*arguments, **keywords):
        kept.update(inspect.signature(function).bind(*arguments, **keywords).arguments)
        begin()
        kept[function.__name__] = function(*arguments, **keywords)
        return kept[function.__name__]

    return call
