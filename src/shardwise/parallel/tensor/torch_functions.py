"""What asks a tensor for its form, its place or its history and never for its numbers: all ranks
can answer, wherever it is, and nothing is sent."""

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

SIZES = {
    getattr(Tensor, name).__get__ for name in ("shape", "nbytes")
} | {
    Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel,
}  # fmt: skip
"""What of it a part has otherwise than the whole."""

MEMORY = {
    getattr(Tensor, name).__get__
    for name in ("grad", "grad_fn", "_version", "is_leaf", "requires_grad", "_backward_hooks",
                 "retains_grad", "name")
} | {
    getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")
} | {
    Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage_offset, Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_, Tensor.retain_grad,
    Tensor.is_shared, Tensor.is_inference,
}  # fmt: skip
"""What looks at a leaf of the graph as such, and computes nothing."""

CASTS = {
    Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type, Tensor.float, Tensor.double, Tensor.half,
    Tensor.bfloat16, Tensor.contiguous,
}  # fmt: skip
"""What gives the tensor itself where there is nothing to change."""
