"""Makes the project's own checks of values pass, for a stand-in (a simulated GPU) that computes no values.

A check still allocates and launches, but its verdict is ignored.
"""

import contextlib

from lowmem.errors import InputError


def comparisons() -> None:
    """Makes checks of a decoder's pieces, and of fused kernels, find no difference. Also makes `bool(tensor)` True for
    every CUDA tensor."""
    from lowmem.core.kernels import fused
    from lowmem.models import compatibility

    check = compatibility.check_pieces

    def passing_check(*arguments, **keywords) -> None:
        with contextlib.suppress(InputError):
            check(*arguments, **keywords)

    compatibility.check_pieces = passing_check
    fused.largest_ulps = _with_verdict(fused.largest_ulps, {"weight": 0.0})
    fused.halves_agree = _with_verdict(fused.halves_agree, True)
    fused.loss_error = _with_verdict(fused.loss_error, 0.0)
    fused.norm_error = _with_verdict(fused.norm_error, 0.0)
    fused.activation_error = _with_verdict(fused.activation_error, 0.0)
    fused.rotary_error = _with_verdict(fused.rotary_error, 0.0)
    questions()


def questions() -> None:
    """Makes `bool(tensor)` True for every CUDA tensor."""
    from torch import Tensor

    # Models look at masks and positions to see if they need a mask; memory full of zeros would say that they do.
    truth = Tensor.__bool__
    Tensor.__bool__ = lambda tensor: tensor.is_cuda or truth(tensor)


def _with_verdict(comparison, verdict):
    def call(*arguments, **keywords):
        comparison(*arguments, **keywords)
        return verdict

    return call
