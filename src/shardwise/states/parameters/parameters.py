"""Defines the base class of parameters in buckets, and implements replicated parameters.

Replicated parameters are views of flat buffers, of which each rank has its own copy. For sharded
parameters, see `sharded_parameters.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from operator import attrgetter, is_, methodcaller

import torch
from torch import Tensor, nn

from shardwise.comm import Handle, share_again
from shardwise.errors import BrokenView
from shardwise.layout.bucket_layout import Bucket, Slot, Span
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.shard_groups import ShardGroups
from shardwise.states.storage.storage import MemoryStorage, Storage
from shardwise.timeline import recorder


class Parameters(ABC):
    """Base class of the trainable parameters, which are packed into buckets.

    The parameter objects remain the user's own. Only the storage behind their values changes.
    """

    def __init__(self, named: Sequence[NamedParameter], buckets: Sequence[Bucket]) -> None:
        self.named = named
        self.buckets = buckets
        self.changes = 0
        """Number of times that the engine has changed values, or taken over writes of users."""
        self.wide: dict[int, Tensor] = {}
        """Bucket index -> initial values of this rank's interval in a wider dtype, for master
        weights."""
        self.second_copies: list[Tensor] = []
        """The previous rank's interval of each bucket, also of frozen ones. Empty unless parameters
        are sharded with `--survive`."""
        self.wide_copies: dict[int, Tensor] = {}
        """The counterpart of `wide` for `second_copies`."""

    @property
    def frozen(self) -> Sequence[ShardedBucket]:
        """The buckets of frozen parameters. Empty if frozen parameters are not in buckets."""
        return ()

    def kind(self, index: int) -> tuple[torch.dtype, torch.device]:
        """Return the dtype of bucket `index`, and the device that computes with it."""
        first = self.named[self.buckets[index].slots[0].parameter]
        return first.dtype, first.device

    @abstractmethod
    def part(self, index: int, own: Span) -> Storage:
        """Return the elements `own` of bucket `index`, which this rank stores between steps."""

    @abstractmethod
    def kept(self) -> list[tuple[list[NamedParameter], Sequence[Slot], Span, Storage]]:
        """Return all elements that this rank stores between steps, bucket by bucket.

        Each entry holds the parameter of each slot, the slots, the stored span, and its storage.
        """

    @abstractmethod
    def publish(self, index: int, held: int | None = None) -> Handle:
        """Start sending this rank's updated elements of bucket `index` to all other ranks.

        If `held` is given, this rank has also updated the elements of rank `held`, identically.
        """

    def begin_update(self) -> None:  # noqa: B027 (only published parameters are read by others)
        """Begin a step's update: no rank reads parameters until they are published."""

    def meet(self) -> None:  # noqa: B027 (private memory needs no wait)
        """Wait until no rank reads the old values. Call before storing new ones."""

    def forget_writes(self) -> None:  # noqa: B027 (only sharded parameters report lost writes)
        """Discard any lost writes that were found so far, so that `check` does not report them."""

    def settle(self) -> None:
        """Finish an update, after all buckets were published. Collective."""
        # User code may use a single autocast block for several steps. Its cache would keep casts of
        # the old values.
        torch.clear_autocast_cache()
        # The update wrote through other tensors, which autograd cannot see. With new versions, a
        # graph that saved the old values raises in its backward pass instead of using the new ones.
        torch.autograd.graph.increment_version([t.parameter for t in self.named])
        self.remember()

    def remember(self) -> None:
        """Record the parameters' current versions, with which `written` compares later ones."""
        self.changes += 1
        self._versions = [named.parameter._version for named in self.named]

    def written(self) -> set[int]:
        """Return the indices of parameters that user code has written to since `remember`."""
        pairs = zip(self.named, self._versions, strict=True)
        return {
            i for i, (named, version) in enumerate(pairs) if named.parameter._version != version
        }

    @abstractmethod
    def check(self) -> None:
        """Raise BrokenView if user code replaced a parameter or wrote values that will be lost."""

    @abstractmethod
    def check_places(self) -> None:
        """Raise BrokenView if user code replaced a parameter or its memory. Writes are allowed."""

    @abstractmethod
    def release(self, values: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Move each parameter back to separate memory, so that another layout can use it.

        Collective if parameters are sharded, unless `values` provides their full values.
        """

    @abstractmethod
    def held_bytes(self, index: int) -> int:
        """Return the number of bytes of bucket `index` that this rank stores between steps."""

    def frozen_bytes(self) -> list[tuple[Sequence[NamedParameter], int]]:
        """Return each frozen bucket's parameters, with the number of bytes stored on this rank.

        Empty if frozen parameters are not in buckets.
        """
        return []

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the parameters that this rank stores between steps."""
        trained = sum(self.held_bytes(index) for index in range(len(self.buckets)))
        return trained + sum(nbytes for _, nbytes in self.frozen_bytes())


class ReplicatedParameters(Parameters):
    """Replicated parameters, which are permanent views of their buckets' flat buffers.

    If `published` is true, every step sends updated elements to the other ranks of `groups`.
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        buckets: Sequence[Bucket],
        groups: ShardGroups,
        *,
        published: bool,
    ) -> None:
        super().__init__(named, buckets)
        self._groups = groups
        self._published = published
        self._flats = [self._adopt(index) for index in range(len(buckets))]
        self._places = ParameterPlaces(named)
        self._addresses = [t.parameter.data_ptr() for t in named]
        self.remember()

    def _adopt(self, index: int) -> Tensor:
        """Move a bucket's parameters into a flat buffer, preserving shapes, strides and values."""
        bucket = self.buckets[index]
        dtype, device = self.kind(index)
        if self._published:
            # The transport sends this memory without a copy, and user code sees it.
            group = self._groups.of(bucket)
            flat = group.allocate(bucket.numel, dtype, device, forkable=True)
        else:
            flat = torch.zeros(bucket.numel, dtype=dtype, device=device)
        # Each assignment frees a parameter's old memory, so only one bucket at a time is in memory
        # twice.
        for slot in bucket.slots:
            named = self.named[slot.parameter]
            view = named.view(flat, slot.start)
            view.copy_(named.parameter.detach())
            named.parameter.data = view
        return flat

    def part(self, index: int, own: Span) -> Storage:
        """Return a part of the flat buffer of bucket `index`."""
        return MemoryStorage(self._flats[index][own[0] : own[1]])

    def kept(self) -> list[tuple[list[NamedParameter], Sequence[Slot], Span, Storage]]:
        return [
            (
                [self.named[slot.parameter] for slot in bucket.slots],
                bucket.slots,
                (0, bucket.numel),
                MemoryStorage(flat),
            )
            for bucket, flat in zip(self.buckets, self._flats, strict=True)
        ]

    def begin_update(self) -> None:
        if self._published:
            share_again()

    def publish(self, index: int, held: int | None = None) -> Handle:
        """Start the all-gather of bucket `index`. Each rank has updated its own interval."""
        flat = self._flats[index]
        launched = recorder.launched("all-gather", flat, index)
        bucket = self.buckets[index]
        group = self._groups.of(bucket)
        if held is None:
            return group.all_gather(flat, bucket.cuts).noted(launched)
        return group.all_gather_others(flat, bucket.cuts, held).noted(launched)

    def held_bytes(self, index: int) -> int:
        """Return the size of the full bucket in bytes."""
        return self._flats[index].nbytes

    def check(self) -> None:
        self.check_places()

    def check_places(self) -> None:
        if not self._places.are_kept(self._addresses):
            for named, address in zip(self.named, self._addresses, strict=True):
                check_place(named, address)

    def release(self, values: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        for named in self.named:
            value = (values or {}).get(named.parameter)
            if value is None:
                value = named.parameter.detach().clone(memory_format=torch.preserve_format)
            named.parameter.data = value.to(named.dtype)


# `map` with these needs about half the time of comprehensions.
_ADDRESS, _DTYPE = methodcaller("data_ptr"), attrgetter("dtype")
_REGISTRY = attrgetter("_parameters")


class ParameterPlaces:
    """Checks the addresses and registrations of several parameters at once.

    It is cheap enough to run in every step.
    """

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self._parameters = [each.parameter for each in named]
        self._dtypes = [each.dtype for each in named]
        places = [(*place, each.parameter) for each in named for place in each.places]
        self._modules = [module for module, _, _ in places]
        self._keys = [key for _, key, _ in places]
        self._registered = [parameter for _, _, parameter in places]

    def are_kept(self, addresses: Sequence[int]) -> bool:
        """Return whether `check_place` would accept all parameters at `addresses`."""
        return (
            list(map(_ADDRESS, self._parameters)) == addresses
            and list(map(_DTYPE, self._parameters)) == self._dtypes
            and all(
                map(is_, map(dict.get, map(_REGISTRY, self._modules), self._keys), self._registered)
            )
        )


def check_place(named: NamedParameter, address: int) -> None:
    """Raise BrokenView unless the parameter is at `address` and still registered in its modules."""
    parameter = named.parameter
    if parameter.data_ptr() != address or parameter.dtype != named.dtype:
        raise BrokenView(
            f"The storage of {named.alias} was replaced after the engine took it over "
            f"(it is now {parameter.dtype} on {parameter.device}). Cast or move the model "
            "(.to, .half, .data = ...) before sw.Engine(...); for lower precision use "
            "--precision. To write values: with engine.full_parameters(write=True)."
        )
    for module, key in named.places:
        if module._parameters.get(key) is not parameter:
            raise _replaced(named.alias, module, key)


def _replaced(name: str, module: nn.Module, key: str) -> BrokenView:
    if key in getattr(module, "parametrizations", {}) or hasattr(module, f"{key}_g"):
        return BrokenView(
            f"{name} got a parametrization after the engine took it over. "
            "Call weight_norm, spectral_norm or register_parametrization before sw.Engine(...)."
        )
    return BrokenView(
        f"{name} is no longer the parameter that the engine trains: it was replaced, as "
        "load_state_dict(assign=True) does. Load before sw.Engine(...), or without assign=True."
    )
