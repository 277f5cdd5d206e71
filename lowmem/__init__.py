"""Train every parameter of a decoder, exactly, under hard caps of GPU memory and RAM.

The names below are loaded when they are asked for: `import lowmem` imports neither PyTorch nor transformers.
"""

from importlib import import_module

_HOMES = {  # the module that each name is loaded from
    "Batch": "core.batch",
    "CapExceeded": "errors",
    "InputError": "errors",
    "Layout": "core.layout",
    "LoadedModel": "run.api",
    "LowmemError": "errors",
    "Plan": "planning.plan",
    "PlanError": "errors",
    "Settings": "settings",
    "Stopped": "errors",
    "TrainingStep": "core.step",
    "export": "run.api",
    "load": "run.api",
    "plan": "run.api",
    "train": "run.api",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
