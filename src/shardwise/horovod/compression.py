"""Compresses tensors for communication. Horovod has a module of the same name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Compressor(ABC):
    """Base class for compressors, which convert a tensor to the form that is sent, and back."""

    @staticmethod
    @abstractmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and a context for `decompress`."""

    @staticmethod
    @abstractmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the original tensor, restored from the received `tensor` and `ctx`."""


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as fp16. Sums are computed in fp32 and rounded once."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """The built-in compressors, for the argument `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor


def compressed(
    compressor: type[Compressor],
    tensors: Sequence[Tensor],
    send: Callable[..., Sequence[Tensor]],
) -> list[Tensor]:
    """Compress `tensors`, call `send` with the results, and decompress what it returns."""
    packed = [compressor.compress(tensor) for tensor in tensors]
    found = send(*(tensor for tensor, _ in packed))
    return [
        compressor.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, packed, strict=True)
    ]
