"""Records what a storage holds now, on the storage itself, so that it lives as long as that.

Storages made inside the block have a record; others are foreign, and what is read of them is
copied. A *deferred* tensor is one on the meta device whose storage has a record: a parameter, a
view of one, or what was computed from one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.errors import ModelError
from shardwise.model.meta.tape import Content, Layout, kept, replay


@dataclass
class StorageRecord:
    """What a storage holds.

    `device` is where a plain build would have it. A real storage that shares its record with a
    deferred one is behind when `present` is not `content`. `versions` are those of its parameters
    at the end of the block.
    """

    content: Content
    device: torch.device
    present: Content | None = None
    versions: set[int] = field(default_factory=set)


def record_of(tensor: Tensor) -> StorageRecord | None:
    """The record of the memory of `tensor`, if it has one."""
    if tensor.layout is not torch.strided:
        return None
    found: StorageRecord | None = getattr(tensor.untyped_storage(), "_shardwise_record", None)
    return found


def set_record(tensor: Tensor, record: StorageRecord | None) -> None:
    """Hang `record` on the memory of `tensor`: it lives as long as that does."""
    tensor.untyped_storage()._shardwise_record = record  # type: ignore[attr-defined]


def keep_present(tensor: Tensor) -> None:
    """Record a copy of what the memory of a real tensor holds: nothing tells how it was made."""
    record = record_of(tensor)
    if record is not None:
        storage = tensor.untyped_storage()
        whole = Layout(torch.uint8, torch.Size([storage.nbytes()]), (1,), 0).view(storage)
        record.content = record.present = kept(whole)[0]


def deferred_record(tensor: object) -> StorageRecord | None:
    """The record of `tensor` if it is a deferred one."""
    return record_of(tensor) if isinstance(tensor, Tensor) and tensor.is_meta else None


def check_unwritten(parameter: Tensor, record: StorageRecord, name: str = "A parameter") -> None:
    """Raise ModelError if `parameter` was written after its block, where nothing is recorded."""
    if record.versions and parameter._version not in record.versions:
        raise ModelError(
            f"{name} of shape {tuple(parameter.shape)} was written after the block that built "
            "it, where nothing is recorded: write it inside `with shardwise.on_meta():` (or the "
            "init_module of Lightning that built it)."
        )


def value_of(tensor: Tensor, record: StorageRecord) -> Tensor:
    """The real tensor for a deferred one: made again, in memory of its own."""
    layout = Layout.of(tensor)
    whole = layout.view(replay(record.content))
    return whole if layout.fills(whole.untyped_storage().nbytes()) else whole.clone()
