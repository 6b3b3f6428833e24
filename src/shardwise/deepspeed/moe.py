"""Implements the names in deepspeed.moe that scripts with an optional mixture of experts import.

DeepSpeed's expert layers are not supported. Creating one raises UsageError, and the functions that
search for experts find none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from shardwise.errors import UsageError

__all__ = [
    "MoE",
    "has_moe_layers",
    "is_moe_param",
    "split_params_into_different_moe_groups_for_optimizer",
]


class MoE:
    """Raises UsageError, because DeepSpeed's expert layer is not supported."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        raise UsageError(
            "deepspeed.moe.layer.MoE is not supported. Build the experts as modules of the model, "
            "as transformers' Mixtral does. Each worker then has all of them, and --zero 3 shards "
            "them."
        )


def is_moe_param(param: Tensor) -> bool:
    """Return False, because no parameter belongs to an MoE layer."""
    del param
    return False


def has_moe_layers(m: Any) -> tuple[bool, int]:
    """Return (False, 0), because no model has MoE layers or experts."""
    del m
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: Any = None
) -> list[dict[str, Any]]:
    """Return the parameter groups as a list, unchanged."""
    del max_group_size
    several = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [dict(group) for group in several]
