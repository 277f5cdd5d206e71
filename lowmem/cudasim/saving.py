"""Stops code that runs on tensors without data from saving weights: it would overwrite the user's own files."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowmem.errors import InputError


@contextmanager
def nothing_saved() -> Iterator[None]:
    """Makes torch.save and save_pretrained inside `with` raise InputError, before they write, if tensors have no
    data."""
    save, save_pretrained = torch.save, PreTrainedModel.save_pretrained

    def saved(obj, *args, **kwargs):
        _Searched(_Nowhere()).dump(obj)
        return save(obj, *args, **kwargs)

    def saved_pretrained(model, *args, **kwargs):  # would write config.json before it fails for the weights
        if any(parameter.is_meta for parameter in model.parameters()):
            _refuse()
        return save_pretrained(model, *args, **kwargs)

    with (
        patch.object(torch, "save", saved), patch.object(torch.serialization, "save", saved),
        patch.object(PreTrainedModel, "save_pretrained", saved_pretrained),
    ):  # fmt: skip
        yield


class _Nowhere:
    def write(self, data) -> int:
        return len(data)


class _Searched(pickle.Pickler):
    """Searches an object by pickling it: `dump` raises InputError if the object holds a tensor without data."""

    def reducer_override(self, obj):
        if not isinstance(obj, Tensor | torch.UntypedStorage | torch.TypedStorage):
            return NotImplemented
        if obj.is_meta if isinstance(obj, Tensor) else obj.device.type == "meta":
            _refuse()
        return int, ()


def _refuse() -> NoReturn:
    raise InputError("this code saves tensors, and in the simulation they have no data: leave the saving out")
