"""Keeps buffers, and values kept in frozen parameters, equal on all ranks.

Buffers are not trained, but forward may change them (running statistics). At the start all ranks
take rank 0's. After that, those that forward changes are averaged over the ranks at each step, so
that after `step()` all ranks hold the same model. The mean is weighted by the rows that each rank's
forwards saw, not by what its losses weighed: forward does not know the weight of a loss.

Which buffers change is learned in two ways:

    version counters   in every step: torch counts writes, but not those through `.data`, `.numpy()`
    a checksum         in the first steps, and then in one of EVERY: over all that is not averaged
                       yet, frozen parameters included. Where ranks differ, all look for the tensor.

What ranks found to change rides in the step's one small collective from then on. Tensors that have
another shape or dtype on each rank (caches) stay as they are; the persistent ones are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.layout import fingerprints
from shardwise.tiers.copy_stream import to_device
from shardwise.world.current_batch import Batch

FIRST = 4
"""Steps whose checksum is compared from the start on: what a forward does, it mostly does from its
first call on."""

EVERY = 32
"""After those, one step in so many. On a CPU core the checksum of 200 small buffers takes 2 to 4 ms
and that of 64 MB of frozen weights 20 to 90 ms: 1/32 of it is lost in the noise of a step."""


def write(into: Tensor, value: Tensor) -> None:
    """Write `value`, of the same shape, into a tensor that may repeat its memory, as an expanded
    buffer does, or was made in inference mode: torch's copy_ refuses those."""
    for dim, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
        if stride == 0 and size > 1:
            into, value = into.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    with writable(into):
        into.copy_(value)


def writable(tensor: Tensor) -> AbstractContextManager[Any]:
    """A block in which `tensor` may be written in place: torch allows it only in inference mode if
    the tensor was made there."""
    # Not inference_mode(False), which would turn gradients on.
    return torch.inference_mode() if tensor.is_inference() else nullcontext()


def version_of(tensor: Tensor) -> int:
    """How often torch has seen a write into `tensor`; 0 for one made in inference mode, whose
    writes torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


_ABSENT = (0, 0)
"""The mark of a buffer that is None."""

_Form = tuple[tuple[int, ...], str] | None
"""Shape and dtype of a tensor, as ranks tell each other; None if there is none."""


@dataclass(frozen=True)
class _Followed:
    """A tensor that is averaged, and the form it had when that began."""

    index: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many real numbers it has."""
        return self.shape.numel() * (2 if self.dtype.is_complex else 1)

    def fits(self, tensor: Tensor | None) -> bool:
        """Whether `tensor` has that form."""
        return tensor is not None and tensor.shape == self.shape and tensor.dtype == self.dtype


@dataclass
class _Window:
    """The rows behind the values since the last step, by stretches of backwards of equal shares.

    `open` has this rank's rows and all ranks' rows (0 if not known) of each backward of the stretch
    under way. `ended` has the earlier stretches, each with the values at its end.
    """

    open: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[list[tuple[int, int]], dict[int, Tensor]]] = field(default_factory=list)

    def shares(self) -> list[float]:
        """This rank's share of the rows of each stretch, in rows of the window's first batch."""
        stretches = [*(rows for rows, _ in self.ended), self.open]
        unit = next((whole for rows in stretches for _, whole in rows), 0) or 1
        return [
            sum(mine * unit / whole if whole else mine for mine, whole in rows) / len(rows)
            for rows in stretches
            if rows
        ]


class Buffers:
    """Keeps the buffers of the models equal; each is known by the module and key that hold it."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        group: Collectives,
        left_out: set[nn.Module],
        *,
        alone: bool | None = None,
        compares: Callable[[nn.Parameter], bool] = lambda parameter: False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """
        Args:
            models: Their buffers are kept.
            group: The ranks that hold the same.
            left_out: Modules that keep their buffers equal themselves.
            alone: There is nothing to average with; by default, if `group` has one rank.
            compares: Whether ranks hold the whole of a frozen parameter, so that it is compared.
            say: Prints a line for the user, once.
        """
        self._group = group
        self.alone = group.size == 1 if alone is None else alone
        self._models = models
        self._compares = compares
        self._say = say
        self._places: list[tuple[nn.Module, str]] = []
        self._followed: list[_Followed] = []
        self._apart: set[int] = set()
        """Those with another form on each rank, which are no longer looked at."""
        self._saved: list[tuple[int, Tensor]] = []
        self._seen: dict[int, tuple[int, int]] = {}
        """By index of a buffer, how it was when the last step ended. Frozen parameters are left
        out: target networks are moved alike on all ranks, and the checksum tells if they are not.
        """
        self._window = _Window()
        self._steps = 0
        self.rows = 0.0
        """The rows of all ranks that the last mean was over, of a step's first batch."""
        self.meet(left_out)

    def meet(self, left_out: set[nn.Module]) -> None:
        """Know the buffers and frozen parameters of modules that were added since the last call,
        except `left_out`, and forget those of modules that were removed. Parameters that are
        trained by now are forgotten too."""
        modules = dict.fromkeys(module for model in self._models for module in model.modules())
        kept = [
            i
            for i, (module, key) in enumerate(self._places)
            if module in modules and (key in module._buffers or self._is_frozen(module, key))
        ]
        if len(kept) < len(self._places):
            self._renumber({old: new for new, old in enumerate(kept)})
        places = set(self._places)
        tensors = (self._tensor(index) for index in range(len(self._places)))
        known = {id(tensor) for tensor in tensors if tensor is not None}
        for module in modules:
            frozen = [key for key in module._parameters if self._is_frozen(module, key)]
            held = [] if module in left_out else list(module._buffers)
            for key in [*held, *frozen]:
                tensor = _held(module, key)
                # A buffer that is None has a number too: a forward may set it, on one rank alone.
                if (module, key) not in places and (tensor is None or id(tensor) not in known):
                    if tensor is not None:
                        known.add(id(tensor))
                    self._places.append((module, key))
                    self._greet(len(self._places) - 1)
                    self._steps = 0  # look again from the first step on

    def _is_frozen(self, module: nn.Module, key: str) -> bool:
        """Whether a place holds a frozen parameter that ranks compare."""
        parameter = module._parameters.get(key)
        return parameter is not None and not parameter.requires_grad and self._compares(parameter)

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        """Keep the buffers that have a number, under that."""
        self._places = [self._places[old] for old in numbers]
        self._seen = {numbers[i]: mark for i, mark in self._seen.items() if i in numbers}
        followed = [each for each in self._followed if each.index in numbers]
        self._followed = [replace(each, index=numbers[each.index]) for each in followed]
        self._saved = [(numbers[old], value) for old, value in self._saved if old in numbers]
        self._apart = {numbers[old] for old in self._apart if old in numbers}
        self._window = _Window()

    def _greet(self, index: int) -> None:
        """A buffer is new: as it is now is how it was seen last."""
        module, key = self._places[index]
        if key in module._buffers:
            self._seen[index] = self._mark(index)

    def remember(self) -> None:
        """Take the present values as those that changes are looked for against."""
        self._seen = {index: self._mark(index) for index in self._seen}

    # -- which tensors change ---------------------------------------------------------------

    def news(self) -> list[int]:
        """Buffers, by index, on which the ranks have yet to agree: those not followed yet, in
        modules of which one has changed, those that were None, and those followed that have another
        form by now.

        Of the module as a whole, since torch's batch_norm writes its running statistics without
        raising their version, as it does that of the count next to them.
        """
        changed = {index for index, mark in self._seen.items() if self._mark(index) != mark}
        reshaped = [f.index for f in self._followed if not f.fits(self._tensor(f.index))]
        if not changed:
            return reshaped
        appeared = {index for index in changed if self._seen[index] == _ABSENT}
        modules = {self._places[index][0] for index in changed - appeared}
        known = {each.index for each in self._followed} | self._apart
        return reshaped + [
            index
            for index in self._seen
            if index not in known and (index in appeared or self._places[index][0] in modules)
            if self._tensor(index) is not None
        ]

    def checksum(self) -> float | Tensor:
        """A number that is equal on all ranks if they hold the same in what is not followed; 0.0 in
        steps that do not compare. On an accelerator it stays there."""
        if self.alone or not self._compares_now:
            return 0.0
        return fingerprints.checksum([tensor for _, tensor in self._unfollowed()])

    @property
    def _compares_now(self) -> bool:
        """Whether this step compares checksums, which is the same on all ranks."""
        return self._steps < FIRST or self._steps % EVERY == 0

    def _unfollowed(self) -> list[tuple[int, Tensor]]:
        """What is not followed, by index, and has elements in memory to compare."""
        known = {each.index for each in self._followed} | self._apart
        held = [(i, self._tensor(i)) for i in range(len(self._places)) if i not in known]
        return [(i, t) for i, t in held if t is not None and fingerprints.can_be_taken(t)]

    def agree(self, *, differ: bool) -> None:
        """Follow the tensors of which any rank has news. If checksums `differ`, follow those too
        whose values are not the same on all ranks. Collective.

        Of buffers that were None, only those are followed whose values are not the same: most are
        caches that each rank computes alike.
        """
        news = self.news()
        appeared = [index for index in news if self._seen.get(index) == _ABSENT]
        compared = appeared + [index for index, _ in self._unfollowed() if differ]
        found = self._group.gather_objects((news, appeared, compared))
        changed = {i for told, new, _ in found for i in told if i not in new}
        # All that any rank compares: a forward may have set a buffer to None on one rank alone.
        wanted = changed.union(*(indices for _, _, indices in found))
        # In one order: each rank lists the same tensors in what follows.
        mine = {index: self._told(index, summed=index not in changed) for index in sorted(wanted)}
        told = self._group.gather_objects(mine)
        self._followed = [each for each in self._followed if each.index not in wanted]
        for index in mine:
            forms = [each[index][0] for each in told]
            if any(form != forms[0] for form in forms):
                self._apart.add(index)
                self._say_apart(index, forms)
            elif forms[0] is not None and (
                index in changed or len({each[index][1] for each in told}) > 1
            ):
                self._follow(index, noticed=index in changed)
        self._followed.sort(key=lambda followed: followed.index)

    def _told(self, index: int, *, summed: bool) -> tuple[_Form, tuple[int, int] | None]:
        """Form and sums of a tensor, for the other ranks."""
        tensor = self._tensor(index)
        if tensor is None:
            return None, None
        form = tuple(tensor.shape), str(tensor.dtype)
        return form, fingerprints.sums_of(tensor) if summed else None

    def _follow(self, index: int, *, noticed: bool) -> None:
        """Average a tensor from now on; `noticed` if torch has counted the write."""
        tensor = self._tensor(index)
        assert tensor is not None
        self._followed.append(_Followed(index, tensor.shape, tensor.dtype))
        if not noticed and self._steps >= FIRST:
            self._say(
                f"the {self._name(index)} had other values on each worker for up to {EVERY} "
                "steps. It is averaged at each step from now on. It was changed by a write that "
                "PyTorch does not count (.data, .numpy(), or into a frozen parameter), which is "
                f"looked for in one step of {EVERY}. Make it a buffer and write under "
                "torch.no_grad(), without .data: then it is averaged from the first write on."
            )

    def _say_apart(self, index: int, forms: Sequence[_Form]) -> None:
        """Name a tensor that no mean can be taken of, if a checkpoint has it."""
        module, key = self._places[index]
        if key in module._non_persistent_buffers_set:
            return
        other = next(rank for rank, form in enumerate(forms) if form != forms[0])
        self._say(
            f"the {self._name(index)} is {_in_words(forms[0])} on worker 0 and "
            f"{_in_words(forms[other])} on worker {other}, so it is not averaged: each worker "
            "keeps its own, and a checkpoint has worker 0's. Give it one shape on all workers; or "
            "register a cache with persistent=False."
        )

    def _name(self, index: int) -> str:
        """Return the name of a tensor for messages."""
        module, key = self._places[index]
        for model in self._models:
            for path, each in model.named_modules():
                if each is module:
                    kind = "buffer" if key in module._buffers else "frozen parameter"
                    return f"{kind} {f'{path}.' if path else ''}{key}"
        return f"tensor {key} of {type(module).__name__}"

    # -- the mean ---------------------------------------------------------------------------

    def values(self) -> Tensor:
        """The followed tensors as one fp64 vector."""
        return self._flat({})

    def _flat(self, before: Mapping[int, Tensor]) -> Tensor:
        """The same vector, with the values of `before` if it has them. A tensor with another form
        by now has zeros: ranks agree on it before they use the vector."""
        where: Any = {"dtype": torch.float64, "device": self._group.small_device}
        parts = []
        for each in self._followed:
            held = (before.get(each.index), self._tensor(each.index))
            fitting = [tensor for tensor in held if tensor is not None and each.fits(tensor)]
            parts.append(_real(fitting[0]) if fitting else torch.zeros(each.numel, **where))
        return _joined(parts, **where) if parts else torch.zeros(0, **where)

    def form(self) -> list[list[Any]]:
        """Which buffers are followed, and their forms."""
        return [[each.index, tuple(each.shape), str(each.dtype)] for each in self._followed]

    def shares(self, *, counts: bool = True) -> list[float]:
        """The rows of this rank that `weighted` counts. The sum over the ranks is the divisor. Only
        one rank of a replica `counts`, since all of its ranks have the same rows."""
        return self._window.shares()[:1] if counts and self._window.shares() else [0.0]

    def weighted(self, *, counts: bool = True) -> Tensor:
        """This rank's part of the mean, times its rows.

        The change over a stretch of backwards counts by the rows that this rank has in it:

            sum over stretches j of  share_j x (values at the end of j - values at its begin)

        The values at the begin of the window are the same on all ranks, so they are left out, and
        the shares of the first stretch divide the sum. A stand-in has a share of 0, so its data
        count nothing. Its forward still advances counters and the power iteration of spectral_norm.
        """
        if not self._followed:
            return self.values()
        shares, total = self._window.shares() if counts else [], self.values()
        shares = shares or [0.0]
        # Not 0 x values, which is NaN where those are infinite.
        total = total * shares[-1] if shares[-1] else torch.zeros_like(total)
        ends = [values for _, values in self._window.ended]
        for share, after, values in zip(shares, shares[1:], ends, strict=False):
            total += self._flat(values) * (share - after)
        return total

    def average(self, rows: Tensor, shares: Tensor) -> None:
        """Set what is followed to the mean over the ranks, of their `weighted` rows (ranks, k) and
        their `shares` (ranks, 1), both on the CPU."""
        self.rows = float(shares.sum())
        if self.rows and self._followed:
            self.take(rows.sum(0) / self.rows)

    def take(self, means: Tensor) -> None:
        """Write `means`, a vector as `values` returns; those of an accelerator go there in one copy
        for each dtype."""
        held = [self._tensor(each.index) for each in self._followed]
        tensors = [tensor.detach() for tensor in held if tensor is not None]
        assert len(tensors) == len(self._followed)
        parts = means.split_with_sizes([each.numel for each in self._followed])
        for (device, dtype, _), places in _alike(tensors).items():
            found = torch.cat([parts[place] for place in places])
            if dtype.is_complex:
                found = torch.view_as_complex(found.view(-1, 2))
            elif not dtype.is_floating_point:
                self._say_rounded(found, places)
                found = found.round()
            moved = to_device(found.to(dtype), device)
            targets = [tensors[place] for place in places]
            values = moved.split_with_sizes([target.numel() for target in targets])
            shaped = [value.view(t.shape) for value, t in zip(values, targets, strict=True)]
            with writable(targets[0]):
                torch._foreach_copy_(targets, shaped)

    def _say_rounded(self, means: Tensor, places: Sequence[int]) -> None:
        """Name the first buffer of whole numbers whose mean is not whole. `means` belong to the
        followed tensors at `places`."""
        odd = ((means - means.round()).abs() > 1e-6).nonzero()
        if not odd.numel():
            return
        first = int(odd[0])
        ends = accumulate(self._followed[place].numel for place in places)
        index = next(self._followed[p].index for p, end in zip(places, ends) if first < end)  # noqa: B905
        self._say(
            f"forward changes the {self._name(index)}, of whole numbers, in another way on each "
            "worker. It becomes the rounded mean, which one process would not have. Change it by "
            "numbers over all workers in forward (world.sum)."
        )

    def stepped(self) -> None:
        """Begin the next step."""
        self._window = _Window()
        self._steps += 1
        self.remember()

    def abandon(self) -> None:
        """The step was abandoned."""
        self._window = _Window()

    # -- batches ----------------------------------------------------------------------------

    def before_batch(self, batch: Batch) -> None:
        """A batch is about to be handed out: if this rank's share of its rows differs from its
        share of the batches before, copy the values that those have led to."""
        window = self._window
        if self.alone or not window.open or not batch.whole:
            return
        mine, whole = window.open[-1]
        if whole and mine * batch.whole != batch.samples * whole:
            window.ended.append((window.open, self._copies()))
            window.open = []

    def after_backward(self, batch: Batch | None, own_rows: int | None = None) -> None:
        """Count the rows of a backward that has ended: those of its `batch`, else `own_rows`. If
        both are unknown, all backwards count the same."""
        known = (1 if own_rows is None else own_rows, 0)
        self._window.open.append(known if batch is None else (batch.samples, batch.whole))

    def _copies(self) -> dict[int, Tensor]:
        """Copy the followed tensors, and the buffers that have changed since the last step."""
        wanted = {each.index for each in self._followed} | set(self.news())
        held = {index: self._tensor(index) for index in sorted(wanted)}
        return {i: tensor.detach().clone() for i, tensor in held.items() if tensor is not None}

    # -- as they were at a boundary -----------------------------------------------------------

    def keep(self) -> None:
        """Take the present values as those that `restore` brings back."""
        # Of frozen parameters only those that change: they may be most of the model.
        kept = sorted(self._seen.keys() | {each.index for each in self._followed})
        held = ((index, self._tensor(index)) for index in kept)
        self._saved = [(i, tensor.detach().clone()) for i, tensor in held if tensor is not None]

    def restore(self) -> None:
        """Bring back the values that `keep` took."""
        for index, value in self._saved:
            buffer = self._tensor(index)
            if buffer is not None and buffer.shape == value.shape:
                write(buffer, value)
        self._saved = []

    def _tensor(self, index: int) -> Tensor | None:
        return _held(*self._places[index])

    def _mark(self, index: int) -> tuple[int, int]:
        tensor = self._tensor(index)
        return _ABSENT if tensor is None else (id(tensor), version_of(tensor))


def _held(module: nn.Module, key: str) -> Tensor | None:
    """The buffer or parameter `key` of a module."""
    return module._buffers.get(key) if key in module._buffers else module._parameters.get(key)


def _real(tensor: Tensor) -> Tensor:
    """Flat, without complex numbers."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1)


def _in_words(form: _Form) -> str:
    return "missing" if form is None else f"of shape {form[0]} and {form[1]}"


def _alike(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype, bool], list[int]]:
    """By device, dtype and whether they were made in inference mode, the places of those that one
    kernel can handle together."""
    places: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
    for place, tensor in enumerate(tensors):
        key = tensor.device, tensor.dtype, tensor.is_inference()
        places.setdefault(key, []).append(place)
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
