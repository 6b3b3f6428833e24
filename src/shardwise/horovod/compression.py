"""Compresses tensors for communication (Horovod's module of this name)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Compressor(ABC):
    """Turns a tensor into the one that is sent, and back; subclass it for your own."""

    @staticmethod
    @abstractmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and a context for `decompress`."""

    @staticmethod
    @abstractmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor restored from what was sent."""


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating tensors as fp16; sums are made in fp32 and rounded once."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """The built-in compressors; `compression=` takes any of them, or your own."""

    none = NoneCompressor
    fp16 = FP16Compressor


def compressed(
    compressor: type[Compressor],
    tensors: Sequence[Tensor],
    travel: Callable[..., Sequence[Tensor]],
) -> list[Tensor]:
    """Compress `tensors`, pass them to `travel` as arguments, and decompress its results."""
    packed = [compressor.compress(tensor) for tensor in tensors]
    found = travel(*(tensor for tensor, _ in packed))
    return [
        compressor.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, packed, strict=True)
    ]
