"""Tracks the current content of each storage, in a record that lives as long as the storage.

A storage that was created inside an `on_meta` block has a record. The values read from any other
storage are copied. A tensor is *deferred* if it is on the meta device and its storage has a record:
a parameter, a view of one, or a tensor computed from one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.errors import ModelError
from shardwise.model.meta.tape import Content, Layout, copy_content, replay


@dataclass
class StorageRecord:
    """The content of a storage.

    Args:
        content: Current content according to the tape.
        device: Device of the storage in a plain build.
        present: Content of the real storage. If it differs from `content`, the storage is out of
            date, because a deferred tensor with the same record was written to.
        versions: Versions of the storage's parameters at the end of the block.
    """

    content: Content
    device: torch.device
    present: Content | None = None
    versions: set[int] = field(default_factory=set)


def record_of(tensor: Tensor) -> StorageRecord | None:
    """Return the record of the tensor's storage, or None if it has none."""
    if tensor.layout is not torch.strided:
        return None
    found: StorageRecord | None = getattr(tensor.untyped_storage(), "_shardwise_record", None)
    return found


def set_record(tensor: Tensor, record: StorageRecord | None) -> None:
    """Attach `record` to the tensor's storage, for as long as the storage exists."""
    # torch returns the same Python object for a storage as long as it lives, so attributes persist.
    tensor.untyped_storage()._shardwise_record = record  # type: ignore[attr-defined]


def keep_present(tensor: Tensor) -> None:
    """Record a copy of a real tensor's storage, after a write that cannot be recorded."""
    record = record_of(tensor)
    if record is not None:
        storage = tensor.untyped_storage()
        whole = Layout(torch.uint8, torch.Size([storage.nbytes()]), (1,), 0).view(storage)
        record.content = record.present = copy_content(whole)[0]


def deferred_record(tensor: object) -> StorageRecord | None:
    """Return the record of `tensor` if it is deferred, else None."""
    return record_of(tensor) if isinstance(tensor, Tensor) and tensor.is_meta else None


def check_unwritten(parameter: Tensor, record: StorageRecord, name: str = "A parameter") -> None:
    """Raise ModelError if `parameter` was written to after the block in which it was built."""
    if record.versions and parameter._version not in record.versions:
        raise ModelError(
            f"{name} of shape {tuple(parameter.shape)} was written after the block that built it, "
            "where writes are not recorded. Write it inside `with shardwise.on_meta():` (or inside "
            "Lightning's init_module if that built it)."
        )


def value_of(tensor: Tensor, record: StorageRecord) -> Tensor:
    """Return the real values of a deferred tensor, recomputed in new memory."""
    layout = Layout.of(tensor)
    whole = layout.view(replay(record.content))
    return whole if layout.fills(whole.untyped_storage().nbytes()) else whole.clone()
