"""Lists torch functions by their effect on a tensor that is split over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

METADATA = {
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
"""The functions in METADATA whose result differs between a part and the full tensor."""

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
"""Functions that read or set attributes of a leaf in the graph without computing values."""

CASTS = {
    Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type, Tensor.float, Tensor.double, Tensor.half,
    Tensor.bfloat16, Tensor.contiguous,
}  # fmt: skip
"""Functions that return the tensor itself if nothing needs to change."""

GRAPH = {getattr(Tensor, name).__get__ for name in ("grad_fn", "is_leaf", "requires_grad")}
"""Functions that read the tensor's position in the autograd graph. Only the part is in a graph."""

UNTRACKED_WRITES = {Tensor.retain_grad} | {
    getattr(Tensor, name).__set__ for name in ("data", "grad", "requires_grad")
}
"""Functions whose changes cannot be tracked. They raise an error."""

CASTS_LIKE = {Tensor.to, Tensor.type_as}
"""Functions that use only the dtype and device of their other arguments."""

ELEMENTWISE = {
    getattr(place, name)
    for place in (torch, Tensor, F)
    for name in ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg",
                 "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "log", "abs", "tanh",
                 "sigmoid", "relu", "gelu", "silu", "clamp", "where", "clone", "detach",
                 "contiguous", "float", "double", "half", "bfloat16", "dropout",
                 "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__pow__",
                 "__rpow__")
    if hasattr(place, name)
} - {torch.dropout}  # fmt: skip

ELEMENTWISE_IN_PLACE = {
    getattr(Tensor, name)
    for name in ("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__")
}

NORMS = {F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm}
"""Functions that are token-wise if their second argument covers only the feature dimension."""

FEATURE_REDUCTIONS = {torch.mean, Tensor.mean, torch.sum, Tensor.sum}
"""Functions that are token-wise if they reduce only the last dimension and keep it."""
