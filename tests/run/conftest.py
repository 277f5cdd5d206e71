"""Every test of a run: no wandb from the environment; held-out losses that a test gives."""

import os

import pytest

import lowmem.run.evaluation


@pytest.fixture(autouse=True)
def no_wandb_in_the_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def held_out(monkeypatch):
    """Gives the losses that a run's evaluations find, one after another."""

    def give(*losses: float) -> None:
        rest = iter(losses)
        real = lowmem.run.evaluation.evaluated
        monkeypatch.setattr(lowmem.run.evaluation, "evaluated", lambda *given: real(*given) | {"eval_loss": next(rest)})

    return give
