"""Numbers that are NaN are found wherever they stand, and a training that diverges is told from a noisy one."""

import math
from types import SimpleNamespace

import pytest
import torch

from experiments.gpu_acceptance import bitwise, kernels
from experiments.harness.comparison import divergence, worst


def test_the_worst_of_numbers_is_nan_wherever_it_stands():
    assert worst([]) == 0.0 and worst([1.0, 3.0, 2.0]) == 3.0
    for numbers in ([math.nan, 1.0], [1.0, math.nan], [2.0, math.nan, 1.0]):
        assert math.isnan(worst(numbers))


@pytest.mark.parametrize("losses, said", [
    ([2.0, 2.5, 2.2], None), ([2.0, 90.0, 1.5], None), ([2.0], None),
    ([2.0, math.inf, 1.0], "the loss of step 2 is not finite"), ([2.0, 1.9, None], "the loss of step 3 is not finite"),
    ([2.0, 8.0, 9.0, 7.0], "its loss rose from 2 to 7 or more"),
])  # fmt: skip
def test_a_training_diverges_by_its_losses(losses, said):
    assert divergence(losses) == (said and f"the training diverged: {said}")


def test_a_training_diverges_by_its_last_update():
    """No loss is computed of it any more."""
    weights = {"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])}
    assert divergence([2.0], weights) == "the training diverged: b is not finite after the last step"


def test_acceptance_passes_over_no_nan(monkeypatch):
    """Seen to fail: max() keeps the number before it."""
    truth, found = (SimpleNamespace(losses=losses) for losses in ([2.0, 1.0], [2.0, math.nan]))
    assert not all(bitwise._follows(lambda: truth, lambda: found, 1e-4).checks.values())
    monkeypatch.setattr(kernels, "loss_errors", lambda *_: {"loss": 0.0, "hidden": 0.0, "weight": math.nan})
    checks = kernels._loss(torch.device("cpu"), "fp32", (8, 8, 8), False).checks
    assert checks == {"loss": True, "gradients": False}
