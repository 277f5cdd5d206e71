"""Small programs, whose peaks in PyTorch's own allocator (2.14.1, on an RTX 3060) programs.json has. To write it again:

python -m stand_in --gpu rtx3060 -- -m tests.cuda.programs > tests/cudasim/programs.json
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CUDA = "cuda"
PROGRAMS: dict[str, Callable[[], object]] = {}


def _step(make: Callable[[], nn.Module], shape: tuple, autocast: bool, call: Callable = lambda module, x: module(x)):
    module, x = make().to(CUDA), torch.randn(*shape, device=CUDA)
    with torch.autocast(CUDA, torch.bfloat16, enabled=autocast):
        out = call(module, x)
    out.float().sum().backward()


def _function(function: Callable[[Tensor], Tensor], autocast: bool = False, shape: tuple = (16, 256, 256)) -> None:
    """Runs a function of fp32 numbers, or of bf16 numbers under autocast, and its backward."""
    x = torch.randn(*shape, device=CUDA, requires_grad=True)
    with torch.autocast(CUDA, torch.bfloat16, enabled=autocast):
        out = function(x.bfloat16() if autocast else x)
    out.backward(torch.empty_like(out))


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device=CUDA)


def _attention(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return module(x, x, x, need_weights=False)[0]


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


for _autocast in (False, True):
    _make = partial(nn.MultiheadAttention, 256, 4, batch_first=True, dropout=0.1)
    PROGRAMS[f"attention module, autocast {_autocast}"] = partial(_step, _make, (4, 512, 256), _autocast, _attention)
    PROGRAMS[f"encoder, autocast {_autocast}"] = partial(_step, _encoder, (4, 512, 256), _autocast)
for _name, _of in (
    ("normalize", lambda x: F.normalize(x, dim=-1)),
    ("gumbel_softmax", lambda x: F.gumbel_softmax(x, dim=-1)),
    ("softmin", lambda x: F.softmin(x, -1)),
    ("lp_pool2d", lambda x: F.lp_pool2d(x[None], 2, 2)),
    ("local_response_norm", lambda x: F.local_response_norm(x[None], 3)),
    ("pairwise_distance", lambda x: F.pairwise_distance(x, x * 2)),
    ("cross_entropy", lambda x: F.cross_entropy(x, _zeros(16, 256))),
    ("cross_entropy of probabilities", lambda x: F.cross_entropy(x, torch.softmax(x.detach(), 1))),
    ("interpolate", lambda x: F.interpolate(x[None], scale_factor=1.5, mode="bilinear")),
    ("vector_norm", lambda x: torch.linalg.vector_norm(x, 3, dim=1)),
    ("binary_cross_entropy of logits", lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x))),
    ("norm", lambda x: torch.norm(x, dim=-1)),
    ("cumsum", lambda x: x.cumsum(-1)),
    ("sum", lambda x: x.sum(-1)),
    ("bernoulli", lambda x: x * torch.bernoulli(torch.sigmoid(x.detach()))),
):
    PROGRAMS[f"{_name}, autocast True"] = partial(_function, _of, True)
for _name in ("mse", "smooth_l1", "huber", "l1", "soft_margin", "poisson_nll", "binary_cross_entropy"):
    _loss = getattr(F, _name if "cross" in _name else f"{_name}_loss")
    for _reduction in ("mean", "sum", "none"):
        _of = partial(lambda loss, how, x: loss(x.sigmoid(), torch.zeros_like(x), reduction=how), _loss, _reduction)
        PROGRAMS[f"{_name} {_reduction}"] = partial(_function, _of)
    if "cross" not in _name:
        PROGRAMS[f"{_name}, autocast True"] = partial(
            _function, partial(lambda loss, x: loss(x, x.detach()), _loss), True
        )
for _name, _of in (
    ("binary_cross_entropy of logits", lambda x: F.binary_cross_entropy_with_logits(x, x.detach())),
    ("max", lambda x: x.max(-1)[0]),
    ("median", lambda x: x.median(-1)[0]),
    ("kthvalue", lambda x: x.kthvalue(3, -1)[0]),
    ("topk", lambda x: x.topk(10, -1)[0]),
    ("sort", lambda x: x.sort(-1)[0]),
    ("cummax", lambda x: x.cummax(-1)[0]),
    ("gather", lambda x: x.gather(1, _zeros(16, 100, 256))),
    ("index_select", lambda x: x.index_select(0, _zeros(100))),
    ("indexing", lambda x: x[_zeros(100)]),
    ("indexing with many", lambda x: x.view(4096, 256)[_zeros(5000)]),
    ("indexing with two", lambda x: x[_zeros(100), _zeros(100)]),
    ("indexing of columns", lambda x: x[:, _zeros(100)]),
    ("permutation", lambda x: x[torch.randperm(16, device=CUDA)]),
    ("mish", F.mish),
    ("logsigmoid", F.logsigmoid),
    ("bilinear", lambda x: F.bilinear(x[0], x[1], x[:8])),
    ("unfold", lambda x: F.unfold(x[:8][None], 3)),
    ("solve_triangular", lambda x: torch.linalg.solve_triangular(x, x, upper=True)),
    ("inv", torch.linalg.inv),
    ("rms_norm", lambda x: F.rms_norm(x, (256,))),
    ("rms_norm with a weight", lambda x: F.rms_norm(x, (256,), torch.ones(256, device=CUDA, requires_grad=True))),
):
    PROGRAMS[_name] = partial(_function, _of)
for _name, _make, _shape, _call in (
    ("GRUCell", partial(nn.GRUCell, 256, 256), (512, 256), lambda m, x: m(x)),
    ("LSTMCell", partial(nn.LSTMCell, 256, 256), (512, 256), lambda m, x: m(x)[0]),
    ("Bilinear", partial(nn.Bilinear, 64, 64, 16), (512, 64), lambda m, x: m(x, x)),
    ("RNNCell", partial(nn.RNNCell, 256, 256), (512, 256), lambda m, x: m(x)),
):
    PROGRAMS[_name] = partial(_step, _make, _shape, False, _call)
    PROGRAMS[f"{_name}, autocast True"] = partial(_step, _make, _shape, True, _call)


def _enabled_by_a_flag() -> None:
    layer, x = nn.Linear(1024, 1024, device=CUDA), torch.randn(4096, 1024, device=CUDA)
    torch.set_autocast_enabled(CUDA, True)
    torch.set_autocast_dtype(CUDA, torch.bfloat16)
    try:
        loss = layer(x).float().pow(2).mean()
    finally:
        torch.set_autocast_enabled(CUDA, False)
    loss.backward()


PROGRAMS["autocast by a flag"] = _enabled_by_a_flag
