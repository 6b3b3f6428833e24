"""Optimizer state: inner copies of the user's optimizer over what this rank updates.

Schedulers and edits of `param_groups` act on the user's optimizer, whose options are copied before
every update (`optimizer_lr_and_options`). What is updated is, per bucket, the rank's interval in
the master dtype, as one flat tensor for an element-wise optimizer:

    bucket flat   | ........ | own interval ........ | ........ |
    segments                 |  a  |  b   |    c     |

There is one segment to begin with. It is cut at parameter borders where its parameters come to
differ: one had no gradient on any rank, so that its value, its moments and its step count must
stay (`unused_parameters`). An optimizer that needs whole tensors has one segment per tensor from
the start.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.model.optimizer_access import held
from shardwise.model.precision import NARROW
from shardwise.states.optimizer import optimizer_attributes
from shardwise.states.optimizer.existing_optimizer_state import ExistingState
from shardwise.states.optimizer.inner_optimizer import InnerOptimizer
from shardwise.states.optimizer.optimizer_kind import common_state, may_fuse
from shardwise.states.optimizer.optimizer_lr_and_options import ParameterGroup, write_back
from shardwise.states.optimizer.users_optimizer import UsersOptimizer
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.parameters.update_intervals import UpdateInterval, UpdateSegment
from shardwise.states.storage.host_storage import HostCopy
from shardwise.states.storage.storage import MemoryStorage, Span, Storage, in_spans, spans_of
from shardwise.states.storage.storage_factory import StorageFactory, TensorKind

_MASTER = "master"


class OptimizerState:
    """The inner optimizers of all buckets, and the masters where parameters are 16-bit or rest
    elsewhere."""

    def __init__(
        self,
        parameters: Parameters,
        groups: Sequence[ParameterGroup],
        own: Sequence[Span],
        factory: StorageFactory,
        *,
        by_spans: bool,
        sends: bool,
        known: Mapping[nn.Parameter, Tensor],
    ) -> None:
        """`groups` and `own` are by bucket. `by_spans`: some state rests on a disk. `sends`: an
        updated bucket is sent to other ranks. `known` are values in the master dtype, better than
        what the parameters themselves say."""
        self._parameters = parameters
        self._one_by_one = sends or by_spans
        self._host_copies: dict[UpdateInterval, HostCopy] = {}
        self.groups = groups
        self.intervals = self._lay_out(own, factory, by_spans)
        """By bucket, what this rank updates of it."""
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
        self, own: Sequence[Span], factory: StorageFactory, by_spans: bool
    ) -> list[UpdateInterval]:
        """Room for what this rank keeps of each bucket."""
        numbers = range(len(own))
        lengths = [end - first for first, end in own]
        spans = [spans_of(n) if by_spans else [(0, n)] for n in lengths]
        targets = [in_spans(self._parameters.part(i, own[i]), spans[i]) for i in numbers]
        kept = [self._kept(i, factory, targets[i]) for i in numbers]
        rooms = iter(
            factory.make(
                "optimizer state",
                [lengths[i] for i in numbers for _ in kept[i]],
                [kind for i in numbers for kind in kept[i].values()],
                width=max([1, *map(len, kept)]),
            )
        )
        made = [{name: in_spans(next(rooms), spans[i]) for name in kept[i]} for i in numbers]
        return [
            UpdateInterval(
                self._parameters.buckets[i],
                own[i],
                targets[i],
                made[i].pop(_MASTER, targets[i]),
                made[i],
                spans[i],
            )
            for i in numbers
        ]

    def _kept(self, index: int, factory: StorageFactory, target: Storage) -> dict[str, TensorKind]:
        """What needs room of its own: a separate master; on a disk, the optimizer's state too."""
        dtype, device = self._parameters.kind(index)
        kind = (torch.float32 if dtype in NARROW else dtype, device)
        elsewhere = factory.is_apart(device) != (target.copy_stream is not None)
        keys = sorted(self.groups[index].kind.tensor_keys) if factory.on_disk else []
        return dict.fromkeys([_MASTER] * (dtype in NARROW or elsewhere) + keys, kind)

    def _fill_master(
        self, interval: UpdateInterval, wide: Tensor | None, known: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Let a separate master have its parameters' values."""
        value = (interval.target.loaded() if wide is None else wide).to(interval.master.dtype)
        for piece in interval.bucket.pieces(*interval.own):
            named = self._parameters.named[piece.parameter]
            if named.parameter in known:
                flat = named.flattened(known[named.parameter])[piece.offset :]
                length = piece.end - piece.start
                value[piece.start - interval.own[0] :][:length] = flat[:length]
        interval.master.store(value)

    def _build(self, existing: ExistingState) -> None:
        """Cut every bucket into segments, give each an inner optimizer, take over old state."""
        for interval, group in zip(self.intervals, self.groups, strict=True):
            interval.segments = existing.segments(interval, group)
        keys = [self._together(index) for index in range(len(self.intervals))]
        members: dict[Hashable, list[int]] = {}
        for index, key in enumerate(keys):
            members.setdefault(key, []).append(index)
        led = set[optim.Optimizer]()
        made: dict[Hashable, InnerOptimizer] = {}
        for key, indices in members.items():
            optimizer = self.groups[indices[0]].optimizer
            made[key] = self._inner_over(indices, leads=optimizer not in led)
            led.add(optimizer)
        self.inners = list(made.values())
        self._inner_of = [made[key] for key in keys]
        # It is here from now on; the user's optimizer would keep it in memory twice. One that
        # updates by itself is given it again.
        taken = {named.parameter for named in self._parameters.named}
        for optimizer in {group.optimizer for group in self.groups}:
            resting = held(optimizer)
            for parameter in [p for p in resting if p in taken]:
                del resting[parameter]
        for inner, interval, group in zip(self._inner_of, self.intervals, self.groups, strict=True):
            existing.give(inner, interval, group)

    def _together(self, index: int) -> Hashable:
        """Buckets of equal keys are updated in one call: all of an optimizer that looks across;
        else those that lose nothing by it, since nothing of them is sent, fetched or copied
        beside the update of the one before."""
        interval, group = self.intervals[index], self.groups[index]
        if group.together:
            return group.optimizer
        is_apart = interval.has_master or interval.master.copy_stream is not None
        stays = interval.master.memory is not None and not interval.moments
        fuses = _fuses(group, interval)
        in_place = fuses or bool(group.options.get("fused"))  # others make temporaries of its size
        if self._one_by_one or is_apart or not stays or not in_place:
            return index
        return group.optimizer, interval.master.dtype, interval.master.device, fuses

    def _inner_over(self, indices: Sequence[int], *, leads: bool) -> InnerOptimizer:
        intervals, groups = [self.intervals[i] for i in indices], [self.groups[i] for i in indices]
        if groups[0].stays:
            return UsersOptimizer(intervals, groups, fused=False, leads=leads)
        fused = not groups[0].together and _fuses(groups[0], intervals[0])
        inner = InnerOptimizer(intervals, groups, fused=fused, leads=leads)
        common = common_state(held(groups[0].optimizer))
        inner.inner.state.update(common if leads else copy.deepcopy(common))
        return inner

    def restart(self, states: Mapping[nn.Parameter, Mapping[str, Any]], borders: Set[int]) -> None:
        """Forget all state, and have that of `states` by parameter: tensors of it are Blanks, for
        which there is room with anything in it. Segments start at the parameters `borders`."""
        self.inners, self._inner_of = [], []
        by_optimizer = {group.optimizer: states for group in self.groups}
        self._build(ExistingState(self._parameters.named, by_optimizer, borders))

    # -- use ------------------------------------------------------------------------------

    def step(
        self, inner: InnerOptimizer, sums: Sequence[Storage], used: Sequence[bool], factor: float
    ) -> None:
        """Update one inner optimizer's intervals; `sums` are by bucket."""
        # The first span of the next update is read while the last one of this is updated.
        then: Callable[[], None] | None = None
        for following in self.inners[self.inners.index(inner) + 1 :][:1]:
            then = partial(following.read_ahead, 0, self._sums_of(following, sums))
        inner.step(self._sums_of(inner, sums), used, factor, then)

    def write_back_options(self) -> None:
        """Write what the updates changed in their parameter groups and attributes to the user's
        optimizers; after all of a step. Raises ModelError where two updates left different
        values."""
        copies = [inner for inner in self.inners if not isinstance(inner, UsersOptimizer)]
        write_back([inner.options for inner in copies])
        optimizer_attributes.write_back([inner.attributes for inner in copies])

    def return_common_state(self) -> None:
        """Give the user's optimizers the state that belongs to no parameter, where copies keep it.

        Every copy has counted the same there.
        """
        for inner in self.inners:
            if inner.attributes.leads and inner.inner is not inner.attributes.user:
                held(inner.attributes.user).update(common_state(inner.inner.state))

    def _sums_of(self, inner: InnerOptimizer, sums: Sequence[Storage]) -> list[Storage]:
        return [self._sum_of(self.intervals[i], sums[i]) for i in self.buckets_of(inner)]

    def _sum_of(self, interval: UpdateInterval, total: Storage) -> Storage:
        """The reduced gradient as the update of `interval` uses it: near the master, in its
        spans."""
        copy_stream = interval.master.copy_stream
        if copy_stream is None or total.copy_stream is not None:
            return in_spans(total, interval.spans)
        assert isinstance(total, MemoryStorage)
        near = self._host_copies.get(interval)
        if near is None or near.source is not total.tensor:
            # Widened sums are another tensor: the copy of the old one is dropped.
            near = HostCopy(total.tensor, copy_stream, interval.spans)
            self._host_copies[interval] = near
        return near

    def buckets_of(self, inner: InnerOptimizer) -> list[int]:
        """The buckets that `inner` updates."""
        return [i for i, each in enumerate(self._inner_of) if each is inner]

    @property
    def has_masters(self) -> bool:
        """Whether any parameter has a master in another dtype."""
        return any(interval.has_master for interval in self.intervals)

    def refresh_masters(self, written: set[int]) -> None:
        """Take the masters of the parameters `written` by user code from those again."""
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

    # -- what there is --------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state and separate masters that this rank keeps now."""
        total = sum(i.master.nbytes for i in self.intervals if i.has_master)
        for inner in self.inners:
            for state in inner.inner.state.values():
                total += sum(_bytes(v) for v in state.values() if isinstance(v, Tensor) and v.ndim)
        return total

    def expected_bytes(self, index: int) -> int:
        """The same of bucket `index`, once the optimizer has made all of its state."""
        interval = self.intervals[index]
        moments = len(self.groups[index].kind.tensor_keys)
        return interval.master.nbytes * (moments + interval.has_master)

    def whole(self, index: int, key: str, dtype: torch.dtype) -> Tensor:
        """State `key` of all segments of bucket `index`, flat over this rank's interval; zeros
        where there is none."""
        interval = self.intervals[index]
        joined = torch.zeros(interval.master.numel, dtype=dtype, device=interval.master.device)
        stored = interval.moments[key].loaded() if key in interval.moments else None
        for segment, state in self.state_of(index):
            if key in state:
                place = slice(segment.first - interval.own[0], segment.end - interval.own[0])
                joined[place] = state[key] if stored is None else stored[place]
        return joined

    def is_flat(self, index: int, segment: UpdateSegment, key: str, value: Any) -> bool:
        """Whether state `key` of a segment of bucket `index` is flat as that, and cut with it."""
        group = self.groups[index]
        return not group.whole and group.kind.has_shape(key, value, segment.tensor.shape)

    def is_tensor(self, index: int, segment: UpdateSegment, key: str, value: Any) -> bool:
        """Whether `value` is a tensor of its parameter's, rather than a number beside it."""
        return self.groups[index].kind.is_tensor(key, value, segment.tensor.shape)

    def state_of(self, index: int) -> list[tuple[UpdateSegment, dict[str, Any]]]:
        """The segments of bucket `index` with their state, those without any left out."""
        inner = self._inner_of[index].inner
        return [
            (segment, inner.state[segment.tensor])
            for segment in self.intervals[index].segments
            if inner.state.get(segment.tensor)
        ]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _fuses(group: ParameterGroup, interval: UpdateInterval) -> bool:
    return may_fuse(group.optimizer, group.options, interval.master.dtype, interval.master.device)
