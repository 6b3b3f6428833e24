"""What asks a tensor for its form and never for its numbers: all ranks can answer, wherever it
is, and nothing is sent."""

from __future__ import annotations

import torch
from torch import Tensor

FORM = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta",
                 "is_sparse", "is_quantized", "itemsize", "nbytes")
} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_signed,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device,
    Tensor.__len__, Tensor.nelement, Tensor.ndimension,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
