"""deepspeed.moe: what scripts import of it that have mixtures of experts as an option.

There are no layers of experts here. Where a script asks for one it is refused; what sorts
parameters by experts finds none.
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
    """Raises UsageError: DeepSpeed's layer of experts is not here."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        raise UsageError(
            "deepspeed.moe.layer.MoE is not here: build the experts as modules of the model, as "
            "transformers' Mixtral does. Each worker then has all of them; --zero 3 shards them."
        )


def is_moe_param(param: Tensor) -> bool:
    """Whether `param` belongs to an expert of a MoE layer: none does."""
    del param
    return False


def has_moe_layers(m: Any) -> tuple[bool, int]:
    """Whether a model has MoE layers, and how many experts: none, and 0."""
    del m
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: Any = None
) -> list[dict[str, Any]]:
    """The parameter groups as they are, in a list: no parameter of an expert is among them."""
    del max_group_size
    several = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [dict(group) for group in several]
