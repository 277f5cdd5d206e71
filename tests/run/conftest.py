"""Every test of a run: no wandb from the environment."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_wandb_in_the_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
