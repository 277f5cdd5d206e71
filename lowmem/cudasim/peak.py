"""Predicts the GPU memory that any PyTorch code would take with PyTorch's own allocator, without a GPU (`cuda_peak`).

The code runs on the meta device, and may say "cuda". Meta tensors say that they are on "cuda:0", so the code takes the
branches of a GPU. Code that needs numbers or a real GPU is refused.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch._dynamo  # else an operation imports it during the record, and the import's frames keep its tensors alive
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

from lowmem.cudasim.autocast import autocast_simulated
from lowmem.cudasim.device_model import DeviceModel, gpu_model
from lowmem.cudasim.gpus import card_named
from lowmem.cudasim.meta_kernels import fused_on_meta
from lowmem.cudasim.recorder import Recorder
from lowmem.cudasim.saving import nothing_saved
from lowmem.cudasim.tape import under_cap
from lowmem.errors import InputError, first_line
from lowmem.units import parse_size

META, CUDA = torch.device("meta"), torch.device("cuda", 0)
_WITHOUT_GPU = (  # parts of PyTorch's errors for a missing GPU
    *("CUDA", "Cannot access accelerator", "called on meta tensors", "dummy base class", "sparse tensors"),
    *("module 'torch._C' has no attribute", "Declaration: aten::", "ScriptModule"),
)
_TWO_DEVICES = "is not on the expected device"
_READS_NUMBERS = {Tensor.tolist, Tensor.numpy, Tensor.__format__, torch.allclose}  # others: Recorder.number_read
_FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
_MODES = "__torch_function__", "__torch_dispatch__"
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Peak:
    """Holds the peaks that are predicted for a function, and its seconds on the card."""

    reserved_bytes: int
    allocated_bytes: int
    by_name: dict[str, int]  # adds up to allocated_bytes
    seconds: float


def cuda_peak(
    function: Callable[[], object], card: str = "RTX 3060", limit: str | int | None = None, *,
    expandable_segments: bool = False,
) -> Peak:  # fmt: skip
    """Predicts the memory that `function()` takes on `card`, and its time. The function must make its model, tensors
    and optimizer itself.

    `limit`, a size like "11GiB", caps the allocator like torch.cuda.set_per_process_memory_fraction. Raises
    SimulatedOutOfMemory if the function does not complete under the cap. Raises InputError for code that needs numbers
    or a real GPU: .item(), boolean masks, custom CUDA extensions, most functions of torch.cuda.
    """
    try:
        limit_bytes = parse_size(f"{limit}") if limit is not None else None
    except ValueError as error:
        raise InputError(f"limit: {error}") from None
    known = card_named(f"{card}", "card", "name one with its speed, and give the memory: limit='10GiB'")
    device_model = gpu_model(known, plain=not torch.are_deterministic_algorithms_enabled())
    with patch.object(torch.cuda, "get_device_capability", lambda *_: known.capability):
        recorder = record(lambda _: function(), device_model)
    memory = under_cap(recorder.tape, limit_bytes, expandable_segments=expandable_segments)
    if not memory.at_peak:
        here = "" if torch.cuda.is_available() else ": here, torch.cuda.is_available() is False"
        raise InputError(f"this code has put nothing on a GPU; name the device 'cuda' in it{here}")
    seconds = max(recorder.clock.host, recorder.clock.gpu)
    return Peak(memory.reserved_peak_bytes, memory.allocated_peak_bytes, memory.at_peak, seconds)


def record(
    function: Callable[[Recorder], object], device_model: DeviceModel, name_of: Callable | None = None
) -> Recorder:
    """Calls `function` with a new recorder, which records it on meta tensors, and returns the recorder.
    `name_of(frame)` names the storages that the code of a Python frame allocates; None: names by the phase (forward,
    backward, update). Raises InputError for code that needs numbers or a GPU."""
    recorder = Recorder(device_model, name_of or _phase, {})
    recorder.number_read = _refuse_number
    cuda_is_meta = partial(_CudaIsMeta, recorder.note)
    with (
        _named(recorder), autocast_simulated(), fused_on_meta(), nothing_saved(), _python_seen_through(),
        _devices_by_number(), _default_device_kept(), _divided_in_inference_mode(), _storages_resized(recorder),
        modes_in_backward(cuda_is_meta, device_model.functions), cuda_is_meta(), recorder, device_model.functions(),
    ):  # fmt: skip
        try:
            function(recorder)
        except (RuntimeError, AssertionError, AttributeError) as error:
            if _TWO_DEVICES in str(error):
                raise InputError("an operation of this code has a tensor on the CPU and one on 'cuda'") from error
            if isinstance(error, torch._dynamo.exc.TorchDynamoException) or "TORCHDYNAMO" in str(error):
                raise InputError(
                    "this code uses torch.compile, which the simulation cannot run; leave it out"
                ) from error
            if not isinstance(error, NotImplementedError) and not any(word in str(error) for word in _WITHOUT_GPU):
                raise
            raise InputError(f"this code cannot be simulated without a GPU: {first_line(error)}") from error
    return recorder


class _CudaIsMeta(TorchFunctionMode):
    """Makes code that asks for CUDA create its tensors on the meta device. The `device` of these tensors still says
    CUDA. `note`: called with each tensor that is made from Python numbers, as by torch.tensor."""

    def __init__(self, note: Callable[[Tensor], None]):
        super().__init__()
        self._note = note

    _replacements = {  # keys are compared by equality: Python wraps a property's getter again at each access
        Tensor.device.__get__: lambda tensor: CUDA if tensor.is_meta else tensor.device,
        Tensor.is_cuda.__get__: lambda tensor: tensor.is_meta or tensor.is_cuda,
        Tensor.get_device: lambda tensor: CUDA.index if tensor.is_meta else tensor.get_device(),
        Tensor.cuda: lambda tensor, device=None, *_, **__: tensor.to(_on_meta(_by_number(device or 0))),
        Tensor.pin_memory: lambda tensor, *_, **__: tensor,
    }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self._replacements:
            return self._replacements[func](*args, **kwargs)
        given = [*args, *kwargs.values()]
        if func in _READS_NUMBERS and any(isinstance(value, Tensor) and value.is_meta for value in given):
            _refuse_number()
        if func is torch.device:  # the code may compare the device; a function that gets it maps it
            return func(*map(_by_number, args[:1]), *args[1:], **kwargs)
        if func is Tensor.to:
            args = map(_by_number, args)
        if "device" in kwargs:
            kwargs["device"] = _by_number(kwargs["device"])
        result = func(*map(_on_meta, args), **{name: _on_meta(value) for name, value in kwargs.items()})
        # Dispatch modes do not see how such tensors are made.
        if func in _FROM_NUMBERS:
            self._note(result)
        return result


@contextmanager
def modes_in_backward(*modes: Callable) -> Iterator[None]:
    """Keeps `modes` active in backward passes inside `with`; PyTorch would disable them there. `modes`: functions that
    each create a torch function or dispatch mode."""
    # Activation checkpointing runs the model's forward code again in backward.
    run = torch.autograd._engine_run_backward

    def run_under_modes(*args, **kwargs):
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            return run(*args, **kwargs)

    # Checkpoint's check of recomputed tensors would take device "meta" for a difference from "cuda".
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    with patch.object(torch.autograd, "_engine_run_backward", run_under_modes):
        with patch.dict(checks, default=checks["none"]):
            yield


def _devices_by_number() -> AbstractContextManager:
    # makes `module.to(0)` mean the first GPU
    parse = torch._C._nn._parse_to
    parsed = lambda *args, **options: parse(*map(_by_number, args), **options)  # noqa: E731
    return patch.object(torch._C._nn, "_parse_to", parsed)


@contextmanager
def _python_seen_through() -> Iterator[None]:
    """Inside `with`, torch function modes see the operations inside functions of nn.functional and torch.functional."""
    # Else a mode gets nn.MultiheadAttention as one function, and is off while that runs.
    names = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"
    with ExitStack() as stack:
        for module in (nn.functional, torch.functional):
            stack.enter_context(patch.multiple(module, **dict.fromkeys(names, _is_overridden)))
        yield


def _is_overridden(*_) -> bool:
    return False


torch.jit._builtins._register_builtin(_is_overridden, "aten::has_torch_function")  # TorchScript takes no new function


def _divided_in_inference_mode() -> AbstractContextManager:
    # In inference mode a dispatch mode gets F.linear, not the products that it calls.
    return patch.object(torch._C, "_InferenceMode", lambda mode: torch.set_grad_enabled(not mode))


@contextmanager
def _default_device_kept() -> Iterator[None]:
    """Inside `with`, torch.set_default_device sets the meta device if it is called with CUDA, which this machine may
    lack. Restores the old default device at the end."""
    place, choose = torch._GLOBAL_DEVICE_CONTEXT, torch.set_default_device
    before = getattr(place, "device_context", None)
    try:
        with patch.object(torch, "set_default_device", lambda device: choose(_on_meta(_by_number(device)))):
            yield
    finally:
        if getattr(place, "device_context", None) is not before:
            choose(before and before.device)


def _storages_resized(recorder: Recorder) -> AbstractContextManager:
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int):
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    return patch.object(torch.UntypedStorage, "resize_", resized)


def _by_number(value):
    return torch.device("cuda", value) if type(value) is int else value


def _on_meta(value):
    if not isinstance(value, str | torch.device) or f"{value}".split(":")[0] != "cuda":
        return value
    if f"{value}" not in ("cuda", "cuda:0"):
        raise InputError(f"this code uses {value}, and the simulation has one GPU, cuda:0; call it for each GPU's part")
    return META


def _refuse_number() -> None:
    """Raises InputError if the user's own code reads a tensor's value, which meta tensors lack."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_name in _MODES:
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    # Installed packages may: transformers asks whether a mask is all ones, and gets the value 1.
    if not {"site-packages", "dist-packages"} & set(file.parts):
        raise InputError(
            f"{file.name}:{frame.f_lineno} reads a tensor's value, and the simulation has none; leave it out"
        )


@contextmanager
def _named(recorder: Recorder) -> Iterator[None]:
    """Inside `with`, names weights, buffers, gradients and optimizer states on the recorder's tape (list of
    allocations). A tensor gets its name when a module or an optimizer uses it."""

    def name_module(module: nn.Module, *_) -> None:
        for name, tensors in (("weights", module._parameters), ("buffers", module._buffers)):
            for tensor in tensors.values():
                if tensor is not None:
                    recorder.note(tensor, name)
                    recorder.rename(tensor, name)

    def name_gradients(optimizer: torch.optim.Optimizer, *_) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            recorder.rename(parameter, "weights")
            if parameter.grad is not None:
                recorder.rename(parameter.grad, "gradients")

    def name_states(optimizer: torch.optim.Optimizer, *_) -> None:
        for tensor in (value for state in optimizer.state.values() for value in state.values()):
            if isinstance(tensor, Tensor):
                recorder.rename(tensor, "optimizer_states")

    swaps = torch.__future__.get_swap_module_params_on_conversion()
    hooks = (
        nn.modules.module.register_module_forward_pre_hook(name_module),
        optimizers.register_optimizer_step_pre_hook(name_gradients),
        optimizers.register_optimizer_step_post_hook(name_states),
    )
    # Modules that are moved to meta keep their parameter objects, as on CUDA, so that tied weights stay tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        for hook in hooks:
            hook.remove()


def _phase(frame) -> str | None:
    code = frame.f_code
    if code.co_qualname.startswith("Optimizer.profile_hook_step"):
        return "update"
    return {"_engine_run_backward": "backward", "_call_impl": "forward"}.get(code.co_name)
