"""Runs a training script as a user would, but within this process, so that its objects can be observed or replaced."""

import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from unittest.mock import patch

from experiments.harness.rows import ROOT
from lowmem.run import prepare, train


def run_script(script: str, arguments: Sequence[str], **instead: Callable) -> int:
    """Runs `script` and returns its exit code. `instead`: replacements for names in lowmem/run/train.py or prepare.py
    during the run."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(sys, "argv", [script, *arguments]))
        for name, function in instead.items():
            patches.enter_context(patch.object(train if hasattr(train, name) else prepare, name, function))
        try:
            # By path: experiments do not import the scripts.
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as exit:
            return exit.code or 0
    return 0


def remembering(function: Callable, kept: dict, begin: Callable[[], None] = lambda: None) -> Callable:
    """Wraps `function` to store its arguments and its result in `kept`, by name. `begin` is called after the arguments
    are stored."""

    def call(*arguments, **keywords):
        kept.update(inspect.signature(function).bind(*arguments, **keywords).arguments)
        begin()
        kept[function.__name__] = function(*arguments, **keywords)
        return kept[function.__name__]

    return call
