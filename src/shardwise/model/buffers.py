"""Keeps buffers alike on all ranks: broadcast at the start, averaged at each step.

Buffers are not trained, but forward may change them (running statistics). At the start all ranks
take rank 0's. After that, those that forward is seen to change are averaged over the ranks at
each step, weighted by what each rank's window weighed, so that after `step()` all ranks hold the
same model. Which ones change is learned: a rank that sees a new one says so, and from then on its
values ride in the step's one small collective.

Left to the model: buffers whose shapes differ between ranks or change on the way (caches), complex
ones, and what is written through `.data`, which leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.collectives import Collectives
from shardwise.tiers.copy_stream import to_device


def write(into: Tensor, value: Tensor) -> None:
    """Write `value`, of the same shape, into a tensor that may repeat its memory, as an expanded
    buffer does: torch's copy_ refuses those."""
    for dim, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
        if stride == 0 and size > 1:
            into, value = into.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    into.copy_(value)


@dataclass(frozen=True)
class _Followed:
    """A buffer that is averaged, and the shape it had when that began."""

    index: int
    shape: torch.Size


class Buffers:
    """Keeps the buffers of the models alike; each is known by the module and key that hold it."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        group: Collectives,
        left_out: set[nn.Module],
        *,
        alone: bool | None = None,
    ) -> None:
        """`left_out` are modules that keep their buffers in step themselves; `alone` says that
        there is nothing to average with, by default where `group` has one rank."""
        self._group = group
        self.alone = group.size == 1 if alone is None else alone
        self._models = models
        self._places: list[tuple[nn.Module, str]] = []
        self._followed: list[_Followed] = []
        self._saved: list[tuple[int, Tensor]] = []
        self._seen: list[tuple[int, int]] = []
        self.meet(left_out)

    def meet(self, left_out: set[nn.Module]) -> None:
        """Know the buffers of modules that have come since the last call, but of `left_out`, and
        forget those of modules that have gone."""
        modules = dict.fromkeys(module for model in self._models for module in model.modules())
        kept = [i for i, (module, _) in enumerate(self._places) if module in modules]
        if len(kept) < len(self._places):
            self._renumber({old: new for new, old in enumerate(kept)})
        places = set(self._places)
        known = {id(module._buffers.get(key)) for module, key in places}
        for module in modules:
            for key, buffer in module._buffers.items():
                if buffer is None or id(buffer) in known or module in left_out:
                    continue
                known.add(id(buffer))
                if not buffer.is_complex() and (module, key) not in places:
                    self._places.append((module, key))
                    self._greet(len(self._places) - 1)

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        """Keep the buffers that have a number, under that."""
        self._places = [self._places[old] for old in numbers]
        self._seen = [self._seen[old] for old in numbers]
        followed = [each for each in self._followed if each.index in numbers]
        self._followed = [replace(each, index=numbers[each.index]) for each in followed]
        self._saved = [(numbers[old], value) for old, value in self._saved if old in numbers]

    def _greet(self, index: int) -> None:
        """A buffer is new: as it is now is how it was seen last."""
        self._seen.append(self._mark(index))

    def remember(self) -> None:
        """Take the present values as those that changes are looked for against."""
        self._seen = [self._mark(index) for index in range(len(self._places))]

    def news(self) -> list[tuple[int, tuple[int, ...]]]:
        """Index and shape of buffers not followed yet, in modules of which one has changed.

        Of the module as a whole, since torch's batch_norm writes its running statistics without
        raising their version, as it does that of the count beside them.
        """
        changed = {
            self._places[index][0]
            for index, mark in enumerate(self._seen)
            if self._mark(index) != mark
        }
        known = {followed.index for followed in self._followed}
        return [
            (index, tuple(buffer.shape))
            for index, (module, _) in enumerate(self._places)
            if module in changed and index not in known
            if (buffer := self._buffer(index)) is not None
        ]

    def follow_agreed(self) -> None:
        """Follow what any rank has news of and all ranks hold in one shape. Collective."""
        found = self._group.gather_objects(self.news())
        # The union, in one order: each rank lists the same buffers in what follows.
        wanted = sorted({index for each in found for index, _ in each})
        mine = {index: self._shape(index) for index in wanted}
        all_shapes = self._group.gather_objects(mine)
        for index in wanted:
            shapes = {each[index] for each in all_shapes}
            if len(shapes) == 1 and (shape := shapes.pop()) is not None:
                self._followed.append(_Followed(index, torch.Size(shape)))
        self._followed.sort(key=lambda followed: followed.index)

    def values(self) -> Tensor:
        """What is followed, as one fp64 vector for `gather_rows`; NaN for a buffer that has changed
        its shape."""
        where: Any = {"dtype": torch.float64, "device": self._group.small_device}
        parts = []
        for followed in self._followed:
            buffer = self._buffer(followed.index)
            if buffer is None or buffer.shape != followed.shape:
                parts.append(torch.full((followed.shape.numel(),), torch.nan, **where))
            else:
                parts.append(buffer.detach().reshape(-1))
        return _joined(parts, **where) if parts else torch.zeros(0, **where)

    def form(self) -> list[list[int]]:
        """Which buffers are followed, and their shapes."""
        return [[followed.index, *followed.shape] for followed in self._followed]

    def average(self, rows: Tensor, weights: Tensor) -> None:
        """Set what is followed to the mean of the ranks' `rows` by `weights` (each ≥ 0).

        What is NaN on a rank is followed no longer, on all ranks alike.
        """
        weights = weights.flatten()
        counted = weights > 0
        offset, kept, means = 0, [], []
        for followed in self._followed:
            part = rows[:, offset : offset + followed.shape.numel()]
            offset += followed.shape.numel()
            if bool(part.isnan().any()):
                continue
            kept.append(followed)
            mean = (part[counted] * weights[counted].unsqueeze(1)).sum(0) / weights.sum()
            means.append(mean)
        self._followed = kept
        self._take(means)

    def _take(self, means: list[Tensor]) -> None:
        """Write the means of what is followed; those of an accelerator go there in one copy for
        each dtype."""
        held = [self._buffer(followed.index) for followed in self._followed]
        buffers = [buffer for buffer in held if buffer is not None]
        assert len(buffers) == len(means)
        for (device, dtype), places in _alike(buffers).items():
            found = torch.cat([means[place] for place in places])
            exact = found if dtype.is_floating_point else found.round()
            moved = to_device(exact.to(dtype), device)
            parts = moved.split_with_sizes([means[place].numel() for place in places])
            targets = [buffers[place] for place in places]
            values = [part.view(t.shape) for part, t in zip(parts, targets, strict=True)]
            torch._foreach_copy_(targets, values)

    def after_backward(self) -> None:
        """A backward has ended: what forward has changed stays for the next one."""

    def abandon(self) -> None:
        """The step was abandoned."""

    def before_batch(self, stand_in: bool) -> None:
        """A batch is about to be handed out: undo a stand-in's forward, make ready for another."""
        self.restore()
        if stand_in:
            self.keep()

    def keep(self) -> None:
        """Take the present values as those that `restore` brings back."""
        held = ((i, self._buffer(i)) for i in range(len(self._places)))
        self._saved = [(i, buffer.clone()) for i, buffer in held if buffer is not None]

    def restore(self) -> None:
        """Undo what a forward did that does not count."""
        for index, value in self._saved:
            buffer = self._buffer(index)
            if buffer is not None and buffer.shape == value.shape:
                buffer.copy_(value)
        self._saved = []

    def _buffer(self, index: int) -> Tensor | None:
        module, key = self._places[index]
        return module._buffers.get(key)

    def _shape(self, index: int) -> tuple[int, ...] | None:
        buffer = self._buffer(index)
        return None if buffer is None else tuple(buffer.shape)

    def _mark(self, index: int) -> tuple[int, int]:
        buffer = self._buffer(index)
        return (0, 0) if buffer is None else (id(buffer), buffer._version)


def _alike(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """By device and dtype, the places of those that one kernel can handle together."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.device, tensor.dtype), []).append(place)
    return places


def _joined(parts: Sequence[Tensor], **where: Any) -> Tensor:
    """Flat `parts` end to end, `where` they are wanted: cast and moved together, since each by
    itself would be a kernel on an accelerator."""
    placed = list(parts)
    for places in _alike(parts).values():
        whole = torch.cat([parts[place] for place in places]).to(**where)
        lengths = [parts[place].numel() for place in places]
        for place, part in zip(places, whole.split_with_sizes(lengths), strict=True):
            placed[place] = part
    return torch.cat(placed)
