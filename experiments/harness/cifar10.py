"""Reads CIFAR-10: images fp32 [N, 3, 32, 32] from -1 to 1, and labels int64 [N].

A folder of data is the unpacked archive (`cifar-10-batches-py`, or its parent). Or it has images in a folder for each
class: `train/<class>/*.png` and `test/<class>/*.png`.
"""

import io
import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowmem.errors import InputError, first_line

ARCHIVE = "cifar-10-batches-py"
BATCHES = {True: [f"data_batch_{number}" for number in range(1, 6)], False: ["test_batch"]}
SIDE, CLASSES = 32, 10
IMAGES = (".png", ".jpg", ".jpeg", ".bmp")
Samples = tuple[Tensor, Tensor]
_ARRAYS = {
    *(("numpy", name) for name in ("ndarray", "dtype")),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    ("_codecs", "encode"),
}


def read(folder: str | None, train: bool) -> Samples:
    """Returns the images and labels of the training set, or of the test set if `train` is False. `folder` None: reads
    the cache of the package `datasets`, or the hub. Raises InputError if the data is missing or is not CIFAR-10."""
    if folder is None:
        return _from_hub("train" if train else "test")
    place = Path(folder).expanduser()
    archive = place / ARCHIVE if (place / ARCHIVE).is_dir() else place
    if (archive / BATCHES[train][0]).is_file():
        return _from_pickles([archive / name for name in BATCHES[train] if (archive / name).is_file()])
    part = place / ("train" if train else "test")
    if part.is_dir():
        return _from_images(part)
    raise InputError(
        f"--data {folder} has neither {BATCHES[train][0]} of {ARCHIVE} nor a folder {part.name} with a folder of "
        "images for each class"
    )


class _Arrays(pickle.Unpickler):
    """Unpickles only arrays and plain values (a pickle may call any function). Raises UnpicklingError for others."""

    def find_class(self, module: str, name: str):
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _from_pickles(paths: list[Path]) -> Samples:
    images, labels = [], []
    for path in paths:
        try:
            batch = _Arrays(io.BytesIO(path.read_bytes()), encoding="bytes").load()
            images.append(np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, SIDE, SIDE))
            labels.append(np.asarray(batch[b"labels"], np.int64))
        except (OSError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise InputError(f"{path} is no batch of CIFAR-10 ({first_line(error)})") from error
    return _samples(np.concatenate(images), np.concatenate(labels))


def _from_images(folder: Path) -> Samples:
    from PIL import Image, UnidentifiedImageError

    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    images, labels = [], []
    for label, of_class in enumerate(classes):
        for path in sorted(path for path in of_class.iterdir() if path.suffix.lower() in IMAGES):
            try:
                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("RGB"))
            except (OSError, UnidentifiedImageError) as error:
                raise InputError(f"{path} cannot be read as an image") from error
            if pixels.shape[:2] != (SIDE, SIDE):
                raise InputError(f"{path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, and not {SIDE} x {SIDE}")
            images.append(pixels.transpose(2, 0, 1))
            labels.append(label)
    if not images or len(classes) > CLASSES:
        raise InputError(f"{folder} has {len(images)} images in {len(classes)} classes, of at most {CLASSES}")
    return _samples(np.stack(images), np.asarray(labels, np.int64))


def _from_hub(split: str) -> Samples:
    try:
        import datasets

        data = datasets.load_dataset("uoft-cs/cifar10", split=split).with_format("torch")
        images, labels = data["img"][:], data["label"][:]
    except Exception as error:  # datasets, the hub's client and its transport each have their own family of errors
        raise InputError(
            f"CIFAR-10 is neither in the cache nor to be had from the hub ({first_line(error).rstrip('.')}); name a "
            "folder with --data, or use --task digits, which needs no network"
        ) from error
    return torch.stack(list(images)).float() / 127.5 - 1, torch.as_tensor(labels)


def _samples(images: np.ndarray, labels: np.ndarray) -> Samples:
    if len(images) != len(labels) or labels.min() < 0 or labels.max() >= CLASSES:
        raise InputError(f"CIFAR-10 has a label from 0 to {CLASSES - 1} for each image")
    return torch.from_numpy(images).float() / 127.5 - 1, torch.from_numpy(labels)
