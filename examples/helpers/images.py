"""Labelled images: the files of MNIST, or the small digits of scikit-learn."""

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
"""The IDX code of unsigned bytes, the only element type in MNIST and Fashion-MNIST."""

NAMES = {
    "training": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


class ImagesError(Exception):
    """An error about missing or invalid image files."""


@dataclass(frozen=True)
class Images:
    """Images (rows, 1, height, width) in fp32 from 0 to 1, and labels (rows,) in int64."""

    name: str
    training: TensorDataset
    validation: TensorDataset

    @property
    def height(self) -> int:
        """The height of an image in pixels, which equals its width."""
        return int(self.training.tensors[0].shape[-1])


def digits() -> Images:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels. Every fifth is for validation."""
    from sklearn.datasets import load_digits  # takes a second, and is not needed for --data

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
    """Read the images of the four IDX files of MNIST in `folder`, gzipped or not.

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
    """Return the uint8 array of `dims` dims in an IDX file. Raises ImagesError."""
    # The format: two zeros, the type, the number of dims, the size of each dim, the elements.
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ImagesError(f"{path} cannot be read: {error}") from error
    if data[:4] != bytes((0, 0, UNSIGNED_BYTES, dims)):
        raise ImagesError(
            f"{path} is not an IDX file of bytes in {dims} dim(s): it begins with {data[:4]!r}"
        )
    shape = [int.from_bytes(data[4 + 4 * dim : 8 + 4 * dim], "big") for dim in range(dims)]
    start = 4 + 4 * dims
    if len(data) - start != math.prod(shape):
        raise ImagesError(
            f"{path} has the wrong length: {len(data) - start} bytes for the shape {shape}"
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy())


def _file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise ImagesError(
        f"{folder} has no {name}, gzipped or not. MNIST and Fashion-MNIST have four such files."
    )
