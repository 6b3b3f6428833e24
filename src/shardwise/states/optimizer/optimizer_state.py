"""Optimizer state: inner copies of the user's optimizer that update this rank's intervals.

Schedulers and edits of `param_groups` act on the user's optimizer. Its options are copied to the
inner optimizers before every update (`optimizer_options.py`).

An element-wise optimizer updates the rank's interval of each bucket, in the master dtype, as one
flat tensor:

    bucket flat   | ........ | own interval ........ | ........ |
    segments                 |  a  |  b   |    c     |

Initially there is a single segment. It is split between two parameters once their states must
differ: if one parameter had no gradient on any rank, its value, moments and step count must not
change (`update_interval.cut_by_use`). If the optimizer needs full tensors, there is one segment per
tensor from the start.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Hashable, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim

from shardwise.layout.bucket_layout import Bucket, Span
from shardwise.model.optimizer_access import held
from shardwise.model.precision import NARROW
from shardwise.states.optimizer.existing_optimizer_state import Blank, ExistingState
from shardwise.states.optimizer.inner_optimizer import InnerOptimizer, SplitTensors, in_memory
from shardwise.states.optimizer.offloaded_update import by_spans
from shardwise.states.optimizer.optimizer_kind import common_state, may_fuse
from shardwise.states.optimizer.optimizer_options import (
    ParameterGroup,
    write_back_attributes,
    write_back_options,
)
from shardwise.states.optimizer.update_interval import (
    BucketUpdate,
    ReducedGradient,
    UpdatedTensor,
    has_no_memory,
)
from shardwise.states.optimizer.users_optimizer import UsersOptimizer
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.storage.quantised_storage import SIGNED_KEYS, QuantisedStorage
from shardwise.states.storage.rounded_masters import NoisePiece, RoundedMaster
from shardwise.states.storage.storage import Storage, in_spans, spans_of
from shardwise.states.storage.storage_factory import StorageFactory

_MASTER = "master"


class UpdatedParameters(Protocol):
    """The attributes and methods of `Parameters` that an optimizer update uses."""

    named: Sequence[NamedParameter]
    buckets: Sequence[Bucket]
    wide: dict[int, Tensor]

    def kind(self, index: int, /) -> tuple[torch.dtype, torch.device]: ...
    def part(self, index: int, own: Span, /) -> Storage: ...


class OptimizerState:
    """The inner optimizers of all buckets, and the master weights.

    A parameter has a master if it has a 16-bit dtype or is stored on a different tier. State that
    is on a disk or quantised has separate storage. The inner optimizers allocate all other state.

    Args:
        parameters: The parameters in buckets.
        groups: The user's parameter group of each bucket.
        gradients: The gradients of each bucket.
        factory: Creates the storage of masters, and of state on a disk.
        by_spans: True if some state is on a disk, or quantised.
        quantised: True to store state in 8 bits.
        rounds: True to update bf16 parameters without a master, by stochastic rounding.
        sends: True if updated buckets are sent to other ranks.
        known: Parameters' values in the master dtype, used instead of the rounded parameters.
        split: The parameters that tensor parallelism splits, or None.
        is_copy: True for a copy of another rank's state, which leaves the user's optimizer alone.
    """

    def __init__(
        self,
        parameters: UpdatedParameters,
        groups: Sequence[ParameterGroup],
        gradients: Sequence[ReducedGradient],
        factory: StorageFactory,
        *,
        by_spans: bool,
        quantised: bool,
        rounds: bool = False,
        sends: bool,
        known: Mapping[nn.Parameter, Tensor],
        split: SplitTensors | None = None,
        is_copy: bool = False,
    ) -> None:
        self._parameters = parameters
        self._split = split
        self._is_copy = is_copy
        self._one_by_one = sends or by_spans
        self.groups = groups
        self.rounds = rounds
        self.seed = 0
        """32 bits that determine the stochastic rounding of the current step."""
        self.intervals = self._lay_out(gradients, factory, by_spans, quantised, rounds)
        """The interval of each bucket that this rank updates."""
        for index, interval in enumerate(self.intervals):
            if interval.has_master:
                self._fill_master(interval, parameters.wide.pop(index, None), known)
        self.inners: list[InnerOptimizer] = []
        self._inner_of: list[InnerOptimizer] = []
        optimizers = {group.optimizer for group in groups}
        states: dict[optim.Optimizer, Mapping[Any, Any]]
        states = {optimizer: dict(held(optimizer)) for optimizer in optimizers}
        self._build(ExistingState(parameters.named, states))

    # -- building -------------------------------------------------------------------------

    def _lay_out(
        self,
        gradients: Sequence[ReducedGradient],
        factory: StorageFactory,
        by_spans: bool,
        quantised: bool,
        rounds: bool,
    ) -> list[BucketUpdate]:
        """Allocate this rank's masters, and any state on a disk or in 8 bits."""
        own = [bucket.own for bucket in gradients]
        numbers = range(len(own))
        lengths = [end - first for first, end in own]
        spans = [spans_of(n) if by_spans else [(0, n)] for n in lengths]
        targets = [in_spans(self._parameters.part(i, own[i]), spans[i]) for i in numbers]
        kept = []
        for i in numbers:
            # Allocate separate storage for a master and, on a disk, for the optimizer's state.
            # Otherwise the inner optimizer allocates its state itself.
            dtype, device = self._parameters.kind(i)
            kind = (torch.float32 if dtype in NARROW else dtype, device)
            # Either the optimizer state or the parameter is in host memory, but not both.
            elsewhere = factory.is_apart(device) != (targets[i].copy_stream is not None)
            rounded = rounds and dtype == torch.bfloat16
            names = [_MASTER] if (dtype in NARROW and not rounded) or elsewhere else []
            names += sorted(self.groups[i].kind.tensor_keys) if factory.on_disk else []
            kept.append(dict.fromkeys(names, kind))
        storages = iter(
            factory.make(
                "optimizer state",
                [lengths[i] for i in numbers for _ in kept[i]],
                [kind for i in numbers for kind in kept[i].values()],
                width=max([1, *map(len, kept)]),  # the update uses all storages of a bucket at once
            )
        )
        states = [{name: in_spans(next(storages), spans[i]) for name in kept[i]} for i in numbers]
        intervals = [
            BucketUpdate(
                self._parameters.buckets[i],
                own[i],
                targets[i],
                states[i].pop(_MASTER, targets[i]),
                states[i],
                spans[i],
                gradients[i],
            )
            for i in numbers
        ]
        for interval in intervals if rounds else ():
            if interval.target.dtype == torch.bfloat16:
                interval.master = RoundedMaster(
                    interval.target, self._noise_pieces(interval), lambda: self.seed
                )
        if quantised:
            for interval, group in zip(intervals, self.groups, strict=True):
                master = interval.master  # the update needs state in its dtype, on its device
                for key in sorted(group.kind.tensor_keys):
                    interval.moments[key] = QuantisedStorage(
                        master.numel,
                        master.dtype,
                        master.device,
                        interval.spans,
                        signed=SIGNED_KEYS[key],
                    )
        return intervals

    def _noise_pieces(self, interval: BucketUpdate) -> list[NoisePiece]:
        pieces = []
        for piece in interval.all_pieces:
            named = self._parameters.named[piece.parameter]
            key = zlib.crc32(named.name.encode())
            start, end = piece.start - interval.own[0], piece.end - interval.own[0]
            pieces.append(NoisePiece(start, end, key, piece.offset, named.shard))
        return pieces

    def _fill_master(
        self, interval: BucketUpdate, wide: Tensor | None, known: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Initialise a separate master from its parameters, or from more precise values."""
        # (numel of the interval,). A wide value has bits that the 16-bit parameter has lost.
        value = (interval.target.loaded() if wide is None else wide).to(interval.master.dtype)
        for piece in interval.bucket.pieces(*interval.own):
            named = self._parameters.named[piece.parameter]
            if named.parameter in known:
                flat = named.flattened(known[named.parameter])[piece.offset :]
                length = piece.end - piece.start
                value[piece.start - interval.own[0] :][:length] = flat[:length]
        interval.master.store(value)

    def _build(self, existing: ExistingState) -> None:
        """Split buckets into segments, create inner optimizers, and assign existing state."""
        for interval, group in zip(self.intervals, self.groups, strict=True):
            interval.segments = existing.segments(interval, group)
        keys = [self._together(index) for index in range(len(self.intervals))]
        members: dict[Hashable, list[int]] = {}
        for index, key in enumerate(keys):
            members.setdefault(key, []).append(index)
        led = {group.optimizer for group in self.groups} if self._is_copy else set()
        inner_by_key: dict[Hashable, InnerOptimizer] = {}
        for key, indices in members.items():
            optimizer = self.groups[indices[0]].optimizer
            inner_by_key[key] = self._make_inner(indices, leads=optimizer not in led)
            led.add(optimizer)
        self.inners = list(inner_by_key.values())
        for inner, following in pairwise(self.inners):
            inner.following = following
        self._inner_of = [inner_by_key[key] for key in keys]
        # The inner optimizers own the state from now on. Remove it from the user's optimizer, where
        # it would be a second copy in memory. An optimizer that updates its own parameters gets it
        # back below.
        taken = {named.parameter for named in self._parameters.named}
        for optimizer in {group.optimizer for group in self.groups if not self._is_copy}:
            resting = held(optimizer)
            for parameter in [p for p in resting if p in taken]:
                del resting[parameter]
        for inner, interval, group in zip(self._inner_of, self.intervals, self.groups, strict=True):
            existing.give(inner, interval, group)

    def _together(self, index: int) -> Hashable:
        """Return a bucket's key. All buckets with the same key are updated in a single call."""
        interval, group = self.intervals[index], self.groups[index]
        if group.together:
            return group.optimizer  # it combines tensors, so it needs all of them in a single call
        # A single call for several buckets saves time. With separate calls, however, the transfer
        # of one bucket (sent, read or copied) can overlap with the update of another.
        is_apart = interval.has_master or interval.master.copy_stream is not None
        stays = interval.master.memory is not None and not interval.moments
        fuses = _fuses(group, interval)
        # Other implementations allocate temporaries as large as all tensors of the call.
        in_place = fuses or bool(group.options.get("fused"))
        if self._one_by_one or is_apart or not stays or not in_place:
            return index
        return group.optimizer, interval.master.dtype, interval.master.device, fuses

    def _make_inner(self, indices: list[int], *, leads: bool) -> InnerOptimizer:
        intervals, groups = [self.intervals[i] for i in indices], [self.groups[i] for i in indices]
        parts = in_memory if all(interval.in_memory for interval in intervals) else by_spans
        if groups[0].stays:
            return UsersOptimizer(indices, intervals, groups, parts, fused=False, leads=leads)
        fused = not groups[0].together and _fuses(groups[0], intervals[0])
        split = self._split if groups[0].whole else None
        inner = InnerOptimizer(
            indices, intervals, groups, parts, fused=fused, leads=leads, split=split
        )
        # Copy for all but the first: each inner optimizer counts its own steps, and a shared
        # counter would advance several times per step.
        common = common_state(held(groups[0].optimizer))
        inner.inner.state.update(common if leads else copy.deepcopy(common))
        return inner

    def restart(self, states: Mapping[nn.Parameter, Mapping[str, Any]], borders: Set[int]) -> None:
        """Replace all state with `states`, whose tensors are `Blank`s for a checkpoint to fill.

        Each of the parameters `borders` starts a new segment.
        """
        self.inners, self._inner_of = [], []
        for parameter, state in states.items():
            if self._split is not None and parameter in self._split.shards:
                blanks = {k: tuple(v.shape) for k, v in state.items() if isinstance(v, Blank)}
                self._split.record_shapes(parameter, blanks)
        by_optimizer = {group.optimizer: states for group in self.groups}
        self._build(ExistingState(self._parameters.named, by_optimizer, borders))

    # -- use ------------------------------------------------------------------------------

    def write_back_options(self) -> None:
        """Write options and attributes that the updates have changed to the user's optimizers.

        Call after all updates of a step. Raises ModelError if two updates set different values.
        """
        copies = [inner for inner in self.inners if not isinstance(inner, UsersOptimizer)]
        write_back_options([inner.options for inner in copies])
        write_back_attributes([inner.attributes for inner in copies])

    def return_common_state(self) -> None:
        """Copy state that belongs to no parameter back to the user's optimizers.

        All copies of an optimizer have identical state of this kind.
        """
        for inner in self.inners:
            if inner.attributes.leads and inner.inner is not inner.attributes.user:
                held(inner.attributes.user).update(common_state(inner.inner.state))

    @property
    def has_masters(self) -> bool:
        """True if any parameter has a separate master."""
        return any(interval.has_master for interval in self.intervals)

    def refresh_masters(self, written: set[int]) -> None:
        """Update the masters of parameters that user code has changed.

        Args:
            written: Indices of these parameters.
        """
        for interval in self.intervals:
            if not interval.has_master:
                continue
            spans = zip(interval.spans, interval.pieces, strict=True)
            for index, ((first, _), pieces) in enumerate(spans):
                start = interval.own[0] + first
                master, target = interval.master.take(index), interval.target.take(index)
                for piece in pieces:
                    if piece.parameter in written:
                        a, b = piece.start - start, piece.end - start
                        master[a:b].copy_(target[a:b])
                interval.master.put(index, changed=True)
                interval.target.put(index, changed=False)

    # -- queries --------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the optimizer state and separate masters that this rank stores now."""
        masters = sum(i.master.nbytes for i in self.intervals if i.has_master)
        stored = sum(
            storage.nbytes
            for index, interval in enumerate(self.intervals)
            if self.state_of(index)
            for storage in interval.moments.values()
        )
        held = sum(
            value.numel() * value.element_size()
            for inner in self.inners
            for state in inner.inner.state.values()
            for value in state.values()
            # Exclude step counts, and placeholders of the state in separate storage.
            if isinstance(value, Tensor) and value.ndim and not has_no_memory(value)
        )
        return masters + stored + held

    def expected_bytes(self, index: int) -> int:
        """Return the size of bucket `index`'s state and master after the first update, in bytes."""
        interval = self.intervals[index]
        nbytes = interval.master.nbytes
        if interval.moments:
            state = sum(storage.nbytes for storage in interval.moments.values())
        else:
            state = nbytes * len(self.groups[index].kind.tensor_keys)
        return state + nbytes * interval.has_master

    def whole(self, index: int, key: str, dtype: torch.dtype) -> Tensor:
        """Return state entry `key` of bucket `index`, joined over this rank's interval.

        Elements without state are zero.
        """
        interval = self.intervals[index]
        joined = torch.zeros(interval.master.numel, dtype=dtype, device=interval.master.device)
        stored = interval.moments[key].loaded() if key in interval.moments else None
        for segment, state in self.state_of(index):
            if key in state:
                place = slice(segment.first - interval.own[0], segment.end - interval.own[0])
                joined[place] = state[key] if stored is None else stored[place]
        return joined

    def is_flat(self, index: int, segment: UpdatedTensor, key: str, value: Any) -> bool:
        """Return whether state entry `key` is flat and split together with its segment."""
        group = self.groups[index]
        return not group.whole and group.kind.has_shape(key, value, segment.tensor.shape)

    def is_split(self, segment: UpdatedTensor, key: str, value: Any) -> bool:
        """Return whether state entry `key` of a full tensor has the parameter's full shape.

        If the parameter is split, such an entry is split like it.
        """
        named = self._parameters.named[segment.pieces[0].parameter]
        if self._split is not None and named.parameter in self._split.shards:
            return self._split.is_split(named.parameter, key, value)
        return bool(named.shape == value.shape)

    def is_tensor(self, index: int, segment: UpdatedTensor, key: str, value: Any) -> bool:
        """Return whether state entry `key` is a tensor, not a number such as a step count."""
        return self.groups[index].kind.is_tensor(key, value, segment.tensor.shape)

    def state_of(self, index: int) -> list[tuple[UpdatedTensor, dict[str, Any]]]:
        """Return the segments of bucket `index` that have state, each together with its state."""
        inner = self._inner_of[index].inner
        return [
            (segment, inner.state[segment.tensor])
            for segment in self.intervals[index].segments
            if inner.state.get(segment.tensor)
        ]


def _fuses(group: ParameterGroup, interval: BucketUpdate) -> bool:
    return may_fuse(group.optimizer, group.options, interval.master.dtype, interval.master.device)
