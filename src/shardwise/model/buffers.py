"""Keeps buffers, and values in frozen parameters, identical on all ranks.

Buffers are not trained, but a forward pass may change them (running statistics). At the start, all
ranks adopt rank 0's buffers. After that, the buffers that forward passes change are averaged across
the ranks in each step, so that after `step()` all ranks hold the same model. The mean is weighted
by the number of rows in each rank's forward passes. Loss weights cannot be used, because they are
unknown during a forward pass.

Changes to buffers are detected in two ways:

    version counters   in every step. torch counts writes, except through `.data` and `.numpy()`.
    a checksum         in the first steps, and then in one of EVERY. It covers everything that is
                       not averaged yet, and frozen parameters. If it differs between ranks, they
                       search for the tensor that differs.

Once detected, the changing values become part of the step's single small collective. Tensors whose
shape or dtype differs between ranks (caches) are left unchanged. If checkpoints contain such a
tensor, a message names it.
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
"""Number of steps at the start that all compare checksums. Most forward passes change the same
buffers from the first call on."""

EVERY = 32
"""After that, one in EVERY steps compares checksums. On a CPU core the checksum takes 2 to 4 ms for
200 small buffers, and 20 to 90 ms for 64 MB of frozen weights. 1/32 of that is within the noise."""


def write(into: Tensor, value: Tensor) -> None:
    """Copy `value` to `into`, which has the same shape but which torch's copy_ may reject.

    copy_ rejects tensors whose elements overlap in memory (an expanded buffer), and tensors that
    were created in inference mode.
    """
    for dim, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
        # All elements of this dim share memory, so writing one of them writes all.
        if stride == 0 and size > 1:
            into, value = into.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    with writable(into):
        into.copy_(value)


def writable(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager that allows writes to `tensor`.

    torch allows writes to a tensor created in inference mode only in that mode.
    """
    # inference_mode(False) is not an option, because it would enable gradients.
    return torch.inference_mode() if tensor.is_inference() else nullcontext()


def version_of(tensor: Tensor) -> int:
    """Return the number of writes to `tensor` that torch has counted.

    Returns 0 for a tensor created in inference mode, because torch does not count its writes.
    """
    return 0 if tensor.is_inference() else tensor._version


_ABSENT = (0, 0)
"""Mark of a buffer that is None."""

_Form = tuple[tuple[int, ...], str] | None
"""Shape and dtype of a tensor, as exchanged between ranks; None if there is no tensor."""


@dataclass(frozen=True)
class _AveragedTensor:
    """A tensor that is averaged, with the shape and dtype that it had when averaging started."""

    index: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of real values. A complex element has two."""
        return self.shape.numel() * (2 if self.dtype.is_complex else 1)

    def fits(self, tensor: Tensor | None) -> bool:
        """Return whether `tensor` still has the recorded shape and dtype."""
        return tensor is not None and tensor.shape == self.shape and tensor.dtype == self.dtype


@dataclass
class _Window:
    """The batch rows processed since the last step.

    A run consists of consecutive backward passes for which this rank's share of the rows is the
    same.

    Args:
        open: For each backward pass of the current run, this rank's rows and all ranks' rows (0 if
            unknown).
        ended: Earlier runs, each with copies of the tensors at its end.
    """

    open: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[list[tuple[int, int]], dict[int, Tensor]]] = field(default_factory=list)

    def shares(self) -> list[float]:
        """Return this rank's share of the rows in each run, in units of the first batch's rows."""
        stretches = [*(rows for rows, _ in self.ended), self.open]
        unit = next((all_rows for rows in stretches for _, all_rows in rows), 0) or 1
        return [
            sum(own_rows * unit / all_rows if all_rows else own_rows for own_rows, all_rows in rows)
            / len(rows)
            for rows in stretches
            if rows
        ]


class Buffers:
    """Keeps the models' buffers identical across ranks.

    A buffer is identified by its module and key.

    Args:
        models: Models whose buffers are kept identical.
        group: Ranks that hold the same buffers.
        left_out: Modules that synchronise their buffers themselves.
        alone: True if there are no other ranks to average with. Default: True if `group` has only
            one rank.
        compares: Returns whether every rank holds a frozen parameter in full, so that its values
            can be compared.
        say: Prints a message for the user, once.
    """

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
        self._group = group
        self.alone = group.size == 1 if alone is None else alone
        self._models = models
        self._compares = compares
        self._report = say
        self._places: list[tuple[nn.Module, str]] = []
        self._averaged: list[_AveragedTensor] = []
        self._unequal: set[int] = set()
        """Tensors whose shape or dtype differs between ranks. They are ignored from then on."""
        self._boundary_values: list[tuple[int, Tensor]] = []
        self._seen: dict[int, tuple[int, int]] = {}
        """Mark of each buffer at the end of the last step. Frozen parameters are excluded: scripts
        update target networks identically on all ranks, and the checksum detects it if they do not.
        """
        self._window = _Window()
        self._steps = 0
        self.rows = 0.0
        """Number of rows of all ranks in the last mean, in units of the first batch's rows."""
        self.meet(left_out)

    def meet(self, left_out: set[nn.Module]) -> None:
        """Update the list of tensors after the models have changed.

        Adds the buffers and frozen parameters of new modules, except those in `left_out`. Drops
        tensors of removed modules, and parameters that are now trained.
        """
        modules = dict.fromkeys(module for model in self._models for module in model.modules())
        kept = [
            i
            for i, (module, key) in enumerate(self._places)
            if module in modules and (key in module._buffers or self._is_frozen(module, key))
        ]
        # Indices are exchanged between ranks, so they must stay dense and identical on all ranks.
        if len(kept) < len(self._places):
            self._renumber({old: new for new, old in enumerate(kept)})
        places = set(self._places)
        tensors = (self._tensor(index) for index in range(len(self._places)))
        # A tied buffer appears in several modules, but must be averaged only once.
        known = {id(tensor) for tensor in tensors if tensor is not None}
        for module in modules:
            frozen = [key for key in module._parameters if self._is_frozen(module, key)]
            held = [] if module in left_out else list(module._buffers)
            for key in [*held, *frozen]:
                tensor = _tensor_at(module, key)
                # List a buffer that is None, too: a forward pass may set it, even on a single rank.
                if (module, key) not in places and (tensor is None or id(tensor) not in known):
                    if tensor is not None:
                        known.add(id(tensor))
                    self._places.append((module, key))
                    self._watch(len(self._places) - 1)
                    self._steps = 0  # compare checksums again in the next steps

    def _is_frozen(self, module: nn.Module, key: str) -> bool:
        """Return whether attribute `key` of `module` is a frozen parameter that ranks compare."""
        parameter = module._parameters.get(key)
        return parameter is not None and not parameter.requires_grad and self._compares(parameter)

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        """Renumber the buffers: `numbers` maps old indices to new ones. Drop all other buffers."""
        self._places = [self._places[old] for old in numbers]
        self._seen = {numbers[i]: mark for i, mark in self._seen.items() if i in numbers}
        followed = [averaged for averaged in self._averaged if averaged.index in numbers]
        self._averaged = [replace(averaged, index=numbers[averaged.index]) for averaged in followed]
        self._boundary_values = [
            (numbers[old], value) for old, value in self._boundary_values if old in numbers
        ]
        self._unequal = {numbers[old] for old in self._unequal if old in numbers}
        self._window = _Window()

    def _watch(self, index: int) -> None:
        """Start detecting changes to a new buffer."""
        module, key = self._places[index]
        if key in module._buffers:
            self._seen[index] = self._mark(index)

    def remember(self) -> None:
        """Use the current values as the reference when detecting changes."""
        self._seen = {index: self._mark(index) for index in self._seen}

    # -- which tensors change ---------------------------------------------------------------

    def news(self) -> list[int]:
        """Return the indices of buffers that the ranks must still agree on.

        These are: buffers that are not averaged yet and whose module has changed, buffers that were
        None until now, and averaged buffers whose shape or dtype has changed.

        A change counts for the whole module, because torch's batch_norm increments the version of
        its counter but not the versions of its running statistics.
        """
        changed = {index for index, mark in self._seen.items() if self._mark(index) != mark}
        # A forward pass may replace a buffer by one with a different shape (a growing cache).
        reshaped = [f.index for f in self._averaged if not f.fits(self._tensor(f.index))]
        if not changed:
            return reshaped
        appeared = {index for index in changed if self._seen[index] == _ABSENT}
        modules = {self._places[index][0] for index in changed - appeared}
        known = {averaged.index for averaged in self._averaged} | self._unequal
        return reshaped + [
            index
            for index in self._seen
            if index not in known and (index in appeared or self._places[index][0] in modules)
            if self._tensor(index) is not None
        ]

    def checksum(self) -> float | Tensor:
        """Return a checksum of all tensors that are not averaged, for comparison across ranks.

        Returns 0.0 in steps that do not compare. On an accelerator, the checksum stays on the
        device.
        """
        if self.alone or not self._compares_now:
            return 0.0
        return fingerprints.checksum([tensor for _, tensor in self._not_averaged()])

    @property
    def _compares_now(self) -> bool:
        """True if this step compares checksums. The same on all ranks."""
        return self._steps < FIRST or self._steps % EVERY == 0

    def _not_averaged(self) -> list[tuple[int, Tensor]]:
        """Return the index and tensor of everything comparable that is not averaged."""
        known = {averaged.index for averaged in self._averaged} | self._unequal
        held = [(i, self._tensor(i)) for i in range(len(self._places)) if i not in known]
        return [(i, t) for i, t in held if t is not None and fingerprints.can_be_taken(t)]

    def agree(self, *, differ: bool) -> None:
        """Start averaging the tensors that any rank lists in its `news`. Collective.

        If `differ` is true (the checksums differ), also average all tensors whose values differ
        between ranks. A buffer that was None before is averaged only if its values differ, because
        most such buffers are caches that all ranks compute identically.
        """
        # Exchange the news, then the tensors' shapes and dtypes. Only steps with news pay for this,
        # and after the first steps there are usually none.
        news = self.news()
        appeared = [index for index in news if self._seen.get(index) == _ABSENT]
        compared = appeared + [index for index, _ in self._not_averaged() if differ]
        news_by_rank = self._group.gather_objects((news, appeared, compared))
        changed = {i for indices, new, _ in news_by_rank for i in indices if i not in new}
        # Everything that any rank compares: a forward pass may have set a buffer to None on a
        # single rank.
        wanted = changed.union(*(indices for _, _, indices in news_by_rank))
        # Sort, so that all ranks list the same tensors in the same order.
        own_forms: dict[int, tuple[_Form, tuple[int, int] | None]] = {}
        for index in sorted(wanted):
            if (tensor := self._tensor(index)) is None:
                own_forms[index] = None, None
            else:
                form = tuple(tensor.shape), str(tensor.dtype)
                own_forms[index] = form, None if index in changed else fingerprints.sums_of(tensor)
        forms_by_rank = self._group.gather_objects(own_forms)
        # Tensors with news are added again below, with their new shape and dtype.
        self._averaged = [item for item in self._averaged if item.index not in wanted]
        for index in own_forms:
            forms = [item[index][0] for item in forms_by_rank]
            if any(form != forms[0] for form in forms):
                self._unequal.add(index)
                self._report_unequal(index, forms)
            elif forms[0] is not None and (
                index in changed or len({item[index][1] for item in forms_by_rank}) > 1
            ):
                self._average_from_now(index, noticed=index in changed)
        # The vector of means must have the same order on all ranks.
        self._averaged.sort(key=lambda followed: followed.index)

    def _average_from_now(self, index: int, *, noticed: bool) -> None:
        """Start averaging a tensor. `noticed` is True if torch has counted the write."""
        tensor = self._tensor(index)
        assert tensor is not None
        self._averaged.append(_AveragedTensor(index, tensor.shape, tensor.dtype))
        if not noticed and self._steps >= FIRST:
            self._report(
                f"the {self._name(index)} differed between workers for up to {EVERY} steps. It is "
                "averaged at each step from now on. It was changed by a write that PyTorch does "
                "not count (.data, .numpy(), or into a frozen parameter), and such writes are "
                f"detected in one step of {EVERY}. Make it a buffer and write under "
                "torch.no_grad(), without .data: it is then averaged from the first write on."
            )

    def _report_unequal(self, index: int, forms: Sequence[_Form]) -> None:
        """Tell the user about a tensor that cannot be averaged if checkpoints contain it."""
        module, key = self._places[index]
        if key in module._non_persistent_buffers_set:
            return
        other = next(rank for rank, form in enumerate(forms) if form != forms[0])
        self._report(
            f"the {self._name(index)} is {_in_words(forms[0])} on worker 0 and "
            f"{_in_words(forms[other])} on worker {other}, so it is not averaged. Each worker "
            "keeps its own value, and a checkpoint contains worker 0's. Give it the same shape on "
            "all workers, or register a cache with persistent=False."
        )

    def _name(self, index: int) -> str:
        module, key = self._places[index]
        for model in self._models:
            for path, candidate in model.named_modules():
                if candidate is module:
                    kind = "buffer" if key in module._buffers else "frozen parameter"
                    return f"{kind} {f'{path}.' if path else ''}{key}"
        return f"tensor {key} of {type(module).__name__}"

    # -- the mean ---------------------------------------------------------------------------

    @property
    def averages(self) -> bool:
        """True if any tensor is averaged, or is waiting for the ranks to agree on its average."""
        return bool(self._averaged) or (not self.alone and bool(self.news()))

    def values(self) -> Tensor:
        """Return the averaged tensors as a single fp64 vector."""
        # fp64 represents int64 counters exactly up to 2**53, and a mean of fp32 is rounded only
        # once.
        return self._flat({})

    def _flat(self, before: Mapping[int, Tensor]) -> Tensor:
        """Return the vector of `values`, but take each tensor from `before` if it is there.

        A tensor whose shape or dtype has changed contributes zeros. The ranks agree on which
        tensors these are before they use the vector.
        """
        where: Any = {"dtype": torch.float64, "device": self._group.small_device}
        parts = []
        for averaged in self._averaged:
            held = (before.get(averaged.index), self._tensor(averaged.index))
            fitting = [tensor for tensor in held if tensor is not None and averaged.fits(tensor)]
            if not fitting:
                parts.append(torch.zeros(averaged.numel, **where))
                continue
            tensor = fitting[0].detach()
            if tensor.is_complex():
                # A complex number counts as two real ones in the vector of means.
                tensor = torch.view_as_real(tensor.resolve_conj())
            parts.append(tensor.reshape(-1))
        return _concatenate(parts, **where) if parts else torch.zeros(0, **where)

    def form(self) -> list[list[Any]]:
        """Return the indices, shapes and dtypes of the averaged buffers."""
        return [
            [averaged.index, tuple(averaged.shape), str(averaged.dtype)]
            for averaged in self._averaged
        ]

    def shares(self, *, counts: bool = True) -> list[float]:
        """Return this rank's number of rows, by which `weighted` multiplies its values.

        The mean is divided by the total over all ranks. `counts` is True on only one rank per
        replica, because all ranks of a replica have the same rows.
        """
        return self._window.shares()[:1] if counts and self._window.shares() else [0.0]

    def weighted(self, *, counts: bool = True) -> Tensor:
        """Return this rank's contribution to the mean, multiplied by its number of rows.

        In each run of backward passes, the change of the values is weighted by this rank's share of
        the rows:

            sum over runs j of  share_j x (values at the end of j - values at the start of j)

        The initial values are identical on all ranks, so they are omitted, and the sum is divided
        by the shares of the first run. A stand-in has a share of 0, so its data has no effect. Its
        forward pass still advances counters and the power iteration of spectral_norm.
        """
        if not self._averaged:
            return self.values()
        shares, total = self._window.shares() if counts else [], self.values()
        shares = shares or [0.0]
        # Use zeros, because 0 x infinite values would be NaN.
        total = total * shares[-1] if shares[-1] else torch.zeros_like(total)
        ends = [values for _, values in self._window.ended]
        for share, after, values in zip(shares, shares[1:], ends, strict=False):
            total += self._flat(values) * (share - after)
        return total

    def average(self, rows: Tensor, shares: Tensor) -> None:
        """Set the averaged tensors to the weighted mean across ranks.

        Args:
            rows: `weighted` from every rank, shape (ranks, k), on the CPU.
            shares: `shares` from every rank, shape (ranks, 1), on the CPU.
        """
        self.rows = float(shares.sum())
        if self.rows and self._averaged:
            self.take(rows.sum(0) / self.rows)

    def take(self, means: Tensor) -> None:
        """Write `means`, a vector laid out like `values`, to the averaged tensors."""
        held = [self._tensor(averaged.index) for averaged in self._averaged]
        tensors = [tensor.detach() for tensor in held if tensor is not None]
        assert len(tensors) == len(self._averaged)
        parts = means.split_with_sizes([averaged.numel for averaged in self._averaged])
        # The means are a single fp64 vector on the CPU. Use one copy per dtype to move them to a
        # device.
        for (device, dtype, _), places in _group_by_kind(tensors).items():
            found = torch.cat([parts[place] for place in places])
            if dtype.is_complex:
                found = torch.view_as_complex(found.view(-1, 2))
            elif not dtype.is_floating_point:
                self._report_rounding(found, places)
                found = found.round()
            moved = to_device(found.to(dtype), device)
            targets = [tensors[place] for place in places]
            values = moved.split_with_sizes([target.numel() for target in targets])
            shaped = [value.view(t.shape) for value, t in zip(values, targets, strict=True)]
            # Use a single kernel, because a model has hundreds of running statistics.
            with writable(targets[0]):
                torch._foreach_copy_(targets, shaped)

    def _report_rounding(self, means: Tensor, places: Sequence[int]) -> None:
        """Tell the user about the first integer buffer whose mean is not an integer.

        Args:
            means: Means of the averaged tensors at `places`.
            places: Indices into the list of averaged tensors.
        """
        odd = ((means - means.round()).abs() > 1e-6).nonzero()
        if not odd.numel():
            return
        first = int(odd[0])
        ends = accumulate(self._averaged[place].numel for place in places)
        index = next(self._averaged[p].index for p, end in zip(places, ends) if first < end)  # noqa: B905
        self._report(
            f"forward changes the integer {self._name(index)} differently on each worker. It is "
            "set to the rounded mean, which differs from one process. In forward, change it by "
            "numbers over all workers (world.sum)."
        )

    def stepped(self) -> None:
        """Finish a step: start counting rows and detecting changes for the next one."""
        # Call this after the mean was written, so that `remember` marks the averaged values.
        self._window = _Window()
        self._steps += 1
        self.remember()

    def abandon(self) -> None:
        """Discard the row counts of an abandoned step."""
        # Keep the values: all ranks abandon a step together, and the next mean makes them identical
        # again.
        self._window = _Window()

    def agreed(self) -> tuple[list[_AveragedTensor], set[int], int]:
        """Return a copy of what the ranks have agreed on so far, for `go_back`."""
        return list(self._averaged), set(self._unequal), self._steps

    def go_back(self, agreed: tuple[list[_AveragedTensor], set[int], int]) -> None:
        """Undo agreements made since `agreed` was called. Call this after restoring the values.

        Needed after a step was interrupted: some ranks may have made further agreements, and others
        not.
        """
        averaged, unequal, self._steps = agreed
        self._averaged, self._unequal = list(averaged), set(unequal)
        self._window = _Window()
        self.remember()

    # -- batches ----------------------------------------------------------------------------

    def before_batch(self, batch: Batch) -> None:
        """Start a new run if this rank's share of the rows changes with `batch`.

        Copies the current values first, because they belong to the previous share.
        """
        window = self._window
        if self.alone or not window.open or not batch.whole:
            return
        own_rows, all_rows = window.open[-1]
        if all_rows and own_rows * batch.whole != batch.samples * all_rows:
            # Copy averaged tensors, and buffers that have changed since the last step, because the
            # ranks may still agree to average those.
            wanted = {averaged.index for averaged in self._averaged} | set(self.news())
            held = ((index, self._tensor(index)) for index in sorted(wanted))
            copies = {i: tensor.detach().clone() for i, tensor in held if tensor is not None}
            window.ended.append((window.open, copies))
            window.open = []

    def after_backward(self, batch: Batch | None, own_rows: int | None = None) -> None:
        """Count the rows of a completed backward pass, from its `batch` or else from `own_rows`.

        If both are None, all backward passes count equally.
        """
        known = (1 if own_rows is None else own_rows, 0)
        self._window.open.append(known if batch is None else (batch.samples, batch.whole))

    # -- values at a boundary -----------------------------------------------------------------

    def keep(self) -> None:
        """Copy the current values for `restore`."""
        # Copy only frozen parameters that change, because frozen parameters may be most of the
        # model.
        kept = sorted(self._seen.keys() | {averaged.index for averaged in self._averaged})
        held = ((index, self._tensor(index)) for index in kept)
        self._boundary_values = [
            (i, tensor.detach().clone()) for i, tensor in held if tensor is not None
        ]

    def restore(self) -> None:
        """Restore the values that `keep` copied."""
        for index, value in self._boundary_values:
            buffer = self._tensor(index)
            # In place, because the user's code or a compiled graph may hold the tensor.
            if buffer is not None and buffer.shape == value.shape:
                write(buffer, value)
        self._boundary_values = []

    def _tensor(self, index: int) -> Tensor | None:
        return _tensor_at(*self._places[index])

    def _mark(self, index: int) -> tuple[int, int]:
        tensor = self._tensor(index)
        return _ABSENT if tensor is None else (id(tensor), version_of(tensor))


def _tensor_at(module: nn.Module, key: str) -> Tensor | None:
    return module._buffers.get(key) if key in module._buffers else module._parameters.get(key)


def _in_words(form: _Form) -> str:
    return "missing" if form is None else f"of shape {form[0]} and {form[1]}"


def _group_by_kind(
    tensors: Sequence[Tensor],
) -> dict[tuple[torch.device, torch.dtype, bool], list[int]]:
    """Group the indices of those tensors that a single kernel can process together.

    The keys are device, dtype and inference mode.
    """
    places: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
    for place, tensor in enumerate(tensors):
        key = tensor.device, tensor.dtype, tensor.is_inference()
        places.setdefault(key, []).append(place)
    return places


def _concatenate(parts: Sequence[Tensor], **where: Any) -> Tensor:
    """Concatenate the flat `parts`, converted to the dtype and device in `where`."""
    # Group by dtype and device, which needs one kernel per group instead of two per part.
    placed = list(parts)
    for places in _group_by_kind(parts).values():
        whole = torch.cat([parts[place] for place in places]).to(**where)
        lengths = [parts[place].numel() for place in places]
        for place, part in zip(places, whole.split_with_sizes(lengths), strict=True):
            placed[place] = part
    return torch.cat(placed)
