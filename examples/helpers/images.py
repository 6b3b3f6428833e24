"""Labelled images: MNIST's files, or the small digits that come with scikit-learn."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

UNSIGNED_BYTES = 8
"""The code of the only element type that MNIST and Fashion-MNIST have."""

NAMES = {
    "training": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


class ImagesError(Exception):
    """Files that are not there, or not what they are called."""


@dataclass(frozen=True)
class Images:
    """Images (rows, 1, height, width), fp32 in 0 to 1, and labels (rows,), int64, of `name`."""

    name: str
    training: TensorDataset
    validation: TensorDataset

    @property
    def height(self) -> int:
        """The rows of pixels in an image, as many as its columns."""
        return int(self.training.tensors[0].shape[-1])


def digits() -> Images:
    """The 1,797 digits of 8 x 8 pixels in scikit-learn; every fifth is for validation."""
    from sklearn.datasets import load_digits  # a second; not needed with files

    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(found.target).long()
    held_out = torch.arange(len(labels)) % 5 == 4
    return Images(
        "scikit-learn's digits",
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )


def read(folder: Path) -> Images:
    """The images in `folder`, in the four IDX files of MNIST, gzipped or not.

    Raises ImagesError.
    """
    pairs = {}
    for part, (images, labels) in NAMES.items():
        pixels = idx(_file(folder, images), dims=3).float().unsqueeze(1) / 255
        numbers = idx(_file(folder, labels), dims=1).long()
        if len(pixels) != len(numbers):
            raise ImagesError(f"{folder}: {len(pixels)} images, but {len(numbers)} labels ({part})")
        height, width = pixels.shape[-2:]
        if height != width:
            raise ImagesError(f"{folder}: images of {height} x {width} are not square ({part})")
        pairs[part] = TensorDataset(pixels, numbers)
    return Images(folder.name, **pairs)


def idx(path: Path, dims: int) -> Tensor:
    """The array in an IDX file: two zeros, type, number of dims, their sizes, then the bytes.

    uint8, of `dims` dims. Raises ImagesError.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ImagesError(f"{path} cannot be read: {error}") from error
    if data[:4] != bytes((0, 0, UNSIGNED_BYTES, dims)):
        raise ImagesError(
            f"{path} is no IDX file of bytes in {dims} dim(s): it begins with {data[:4]!r}"
        )
    shape = [int.from_bytes(data[4 + 4 * dim : 8 + 4 * dim], "big") for dim in range(dims)]
    start = 4 + 4 * dims
    if len(data) - start != math.prod(shape):
        raise ImagesError(
            f"{path} is cut short, or too long: {len(data) - start} bytes for the shape {shape}"
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy())


def _file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise ImagesError(
        f"{folder} has no {name}, gzipped or not. MNIST and Fashion-MNIST come as four such files."
    )
