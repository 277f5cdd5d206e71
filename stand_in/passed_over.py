"""What this project's own checks cannot do on the stand-in, and so do not.

Without values device memory is never written, so what compares values is carried out, it allocates and launches as
ever, and its verdict is not looked at; what is asked of a value is so. With values nothing is passed over.
"""

import contextlib

from lowmem.errors import InputError


def comparisons() -> None:
    """From here on the comparison of a decoder's pieces with the whole model, and of the fused kernels with the lines
    that they stand for, find no difference."""
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
    questions()


def questions() -> None:
    """From here on the answer is yes when a program asks whether a value on the card is true, as in a simulated step
    (recorder.py). Models ask of masks and positions whether they need a mask; memory that is 0 says that they do."""
    from torch import Tensor

    truth = Tensor.__bool__
    Tensor.__bool__ = lambda tensor: tensor.is_cuda or truth(tensor)


def _with_verdict(comparison, verdict):
    def call(*arguments, **keywords):
        comparison(*arguments, **keywords)
        return verdict

    return call
