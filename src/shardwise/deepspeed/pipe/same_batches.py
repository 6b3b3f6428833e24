"""Compares the batches that the workers of a pipeline take, which have to be the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.layout import fingerprints


def check_same(world: sw.World, batches: Sequence[Any]) -> None:
    """Raise UsageError on all workers where two of one replica have unlike tensors in `batches`.
    Collective."""
    found = world.gather([_described(leaf) for leaf in pytree.tree_leaves(list(batches))])
    for rank, tensors in enumerate(found):
        first = rank - rank % world.mesh.replica
        if tensors != found[first]:
            raise UsageError(
                f"engine.train_batch has other batches on worker {rank} than on worker {first}, "
                f"which is of the same pipeline: the {world.mesh.replica} workers of each take the "
                "same ones. Give a sampler num_replicas=engine.world.data_size and "
                "rank=engine.world.data_rank, and let no worker draw its own augmentation; or let "
                "deepspeed.initialize read the training_data."
            )


def _described(leaf: Any) -> tuple[Any, ...]:
    """What tells `leaf` from another: of tensors their bits, where these can be read."""
    if not isinstance(leaf, Tensor):
        return (type(leaf).__name__,)
    form = (str(leaf.dtype), tuple(leaf.shape))
    if not fingerprints.can_be_taken(leaf):
        return form
    taken = fingerprints.of(leaf)
    return (*form, taken.bits, taken.placed)
