"""Joins the documents of each row into the tensors of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import DataError
from shardwise.model.varlen_attention import flash_arguments

IGNORED = -100
"""Label of tokens without a loss: the default `ignore_index` of cross_entropy."""


@dataclass(frozen=True)
class PackedCollate:
    """Collates rows of documents. See `Packing` for the fields of a batch."""

    row: int
    attention: str

    def __call__(self, rows: Sequence[Sequence[tuple[Any, int]]]) -> dict[str, Any]:
        """Return the batch for `rows`. Each row is a list of samples with their lengths."""
        documents = [[_fields_of(sample) for sample, _ in row] for row in rows]
        for row, fields in zip(rows, documents, strict=True):
            for (_, length), document in zip(row, fields, strict=True):
                if len(document["input_ids"]) != length:
                    raise DataError(
                        f"length= returned {length} for a sample with "
                        f"{len(document['input_ids'])} input_ids, so it does not fit into its row: "
                        "return len(sample['input_ids'])."
                    )
        keys = documents[0][0].keys()
        if any(document.keys() != keys for row in documents for document in row):
            raise DataError(
                "The samples of a batch have different fields, so they cannot be packed: give "
                f"every sample the fields {', '.join(keys)}."
            )
        batch: dict[str, Any] = {
            key: torch.stack([self._join(row, key) for row in documents]) for key in keys
        }
        # Free positions at the end of a row count as one more document. If the mask hid all tokens
        # from them, softmax would return NaN.
        sizes = [[len(document["input_ids"]) for document in row] for row in documents]
        for lengths in sizes:
            if free := self.row - sum(lengths):
                lengths.append(free)
        positions = [torch.cat([torch.arange(size) for size in each]) for each in sizes]
        batch["position_ids"] = torch.stack(positions)
        if self.attention == "mask":
            numbers = torch.stack(
                [torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in sizes]
            )
            same = numbers[:, :, None] == numbers[:, None, :]  # (rows, row, row)
            batch["attention_mask"] = same.tril()[:, None]
        flat_sizes = [size for each in sizes for size in each]
        if self.attention == "flash":
            batch |= flash_arguments(flat_sizes)
        elif self.attention == "cu_seqlens":
            batch["cu_seqlens"] = torch.tensor([0, *accumulate(flat_sizes)], dtype=torch.int32)
            batch["max_seqlen"] = max(flat_sizes)
        return batch

    def _join(self, row: Sequence[Mapping[str, Tensor]], key: str) -> Tensor:
        parts = [document[key] for document in row]
        free = self.row - sum(map(len, parts))
        assert free >= 0, "the schedule assigned more documents to a row than it can hold"
        fill = IGNORED if key in ("labels", "shift_labels") else 0
        return torch.cat([*parts, parts[0].new_full((free,), fill)])


def _fields_of(sample: Any) -> dict[str, Tensor]:
    """Return the fields of a sample as tensors with one value per token."""
    fields = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    if "input_ids" not in fields:
        raise DataError(
            f"A sample to pack needs input_ids, but has {', '.join(map(str, fields))}. Rename the "
            "field in the dataset, or return a tensor of token numbers."
        )
    tensors: dict[str, Tensor] = {}
    for key, value in fields.items():
        try:
            tensors[key] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"The field {key} of a sample is not a list of numbers, so it cannot be packed: "
                "remove it from the samples."
            ) from error
    tokens = tensors["input_ids"]
    if tokens.dim() != 1:
        raise DataError(
            f"input_ids of a sample has the shape {tuple(tokens.shape)}, but a sample to pack is "
            "one document: return a list or a tensor of one dim."
        )
    mask = tensors.pop("attention_mask", None)
    if mask is not None and not bool((mask != 0).all()):
        raise DataError(
            "The attention_mask of a sample hides tokens. Remove padding in the dataset, because "
            "packing sets the mask: tokenize with padding=False."
        )
    if "position_ids" in tensors:
        raise DataError(
            "A sample has position_ids, but packing sets them: remove them from the samples."
        )
    labels = tensors.get("labels", tokens).long().clone()
    if len(labels):
        # Without this, the last token of the previous document would be trained to predict it.
        labels[0] = IGNORED
    tensors["labels"] = labels
    for key, value in tensors.items():
        if value.dim() == 0 or len(value) != len(tokens):
            raise DataError(
                f"The field {key} of a sample has the shape {tuple(value.shape)}, but its document "
                f"has {len(tokens)} tokens. Packing joins fields with one value per token: remove "
                "the others from the samples."
            )
    return tensors
