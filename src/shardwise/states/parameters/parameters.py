"""Replicated parameters, and what they have in common with sharded ones: buckets, checks.

Replicated, they are views of flat buffers, private to each rank. `sharded_parameters` has the
others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives, Handle, share_again
from shardwise.errors import BrokenView
from shardwise.layout.bucket_layout import Bucket
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.storage.storage import MemoryStorage, Storage
from shardwise.timeline import recorder


class Parameters(ABC):
    """The trainable parameters, laid into buckets.

    Parameter objects stay the user's own; only what they rest on changes.
    """

    def __init__(self, named: Sequence[NamedParameter], buckets: Sequence[Bucket]) -> None:
        self.named = named
        self.buckets = buckets
        self.wide: dict[int, Tensor] = {}
        """By bucket, starting values of this rank's interval in a wider dtype, to be taken."""

    @property
    def frozen(self) -> Sequence[ShardedBucket]:
        """The buckets of frozen parameters, where those are laid out too."""
        return ()

    def kind(self, index: int) -> tuple[torch.dtype, torch.device]:
        """The dtype of bucket `index`, and the device that computes with it."""
        first = self.named[self.buckets[index].slots[0].parameter]
        return first.dtype, first.device

    @abstractmethod
    def part(self, index: int, own: tuple[int, int]) -> Storage:
        """The elements `own` of bucket `index`, which this rank holds between steps."""

    @abstractmethod
    def publish(self, index: int) -> Handle:
        """Let all ranks have what this rank has updated of bucket `index`."""

    def begin_update(self) -> None:  # noqa: B027 (only published parameters are read by others)
        """The update of a step begins: nobody reads parameters until they are published."""

    def meet(self) -> None:  # noqa: B027 (nothing to wait for where memory is private)
        """Before user code's values are stored: return when no rank reads the old ones."""

    def settle(self) -> None:
        """Every bucket was published: return when parameters may be used. Collective."""
        # A user's autocast around several steps would go on with casts of the values before.
        torch.clear_autocast_cache()
        torch.autograd.graph.increment_version([t.parameter for t in self.named])
        self.remember()

    def remember(self) -> None:
        """Take the present values as those that `written` compares with."""
        self._versions = [named.parameter._version for named in self.named]

    def written(self) -> set[int]:
        """The parameters that user code has written since (load_state_dict, clamp_ ...)."""
        pairs = zip(self.named, self._versions, strict=True)
        return {
            i for i, (named, version) in enumerate(pairs) if named.parameter._version != version
        }

    @abstractmethod
    def check(self) -> None:
        """Raise BrokenView if user code replaced a parameter or what it rests on, or wrote what
        reaches nothing."""

    @abstractmethod
    def check_places(self) -> None:
        """The same, where writing is meant."""

    @abstractmethod
    def release(self) -> None:
        """Give each parameter memory of its own again, so that another layout can take it.

        Collective.
        """

    @abstractmethod
    def held_bytes(self, index: int) -> int:
        """Bytes of bucket `index` that this rank holds between steps."""

    def frozen_bytes(self) -> list[tuple[Sequence[NamedParameter], int]]:
        """The buckets of frozen parameters, where those are laid out too: what is in them, and
        the bytes that this rank holds of them between steps."""
        return []

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters that this rank holds between steps."""
        trained = sum(self.held_bytes(index) for index in range(len(self.buckets)))
        return trained + sum(nbytes for _, nbytes in self.frozen_bytes())


class ReplicatedParameters(Parameters):
    """Replicated parameters: each a view of its bucket's flat buffer, for good."""

    def __init__(
        self,
        named: Sequence[NamedParameter],
        buckets: Sequence[Bucket],
        group: Collectives,
        *,
        published: bool,
    ) -> None:
        """`published`: every step sends them to the other ranks of `group`."""
        super().__init__(named, buckets)
        self._group = group
        self._published = published
        self._flats = [self._adopt(index) for index in range(len(buckets))]
        self._places = ParameterPlaces(named)
        self._addresses = [t.parameter.data_ptr() for t in named]
        self.remember()

    def _adopt(self, index: int) -> Tensor:
        """Move a bucket's parameters into a buffer, keeping shape, strides and values."""
        bucket = self.buckets[index]
        dtype, device = self.kind(index)
        if self._published:
            flat = self._group.allocate(bucket.numel, dtype, device, forkable=True)
        else:
            flat = torch.zeros(bucket.numel, dtype=dtype, device=device)
        for slot in bucket.slots:
            named = self.named[slot.parameter]
            view = named.view(flat, slot.start)
            view.copy_(named.parameter.detach())
            named.parameter.data = view
        return flat

    def part(self, index: int, own: tuple[int, int]) -> Storage:
        """A part of the flat buffer of bucket `index`."""
        return MemoryStorage(self._flats[index][own[0] : own[1]])

    def begin_update(self) -> None:
        if self._published:
            share_again()

    def publish(self, index: int) -> Handle:
        """Send each rank's updated interval of bucket `index` to all."""
        flat = self._flats[index]
        launched = recorder.launched("all-gather", flat, index)
        return self._group.all_gather(flat, self.buckets[index].cuts).noted(launched)

    def held_bytes(self, index: int) -> int:
        """The whole bucket."""
        return self._flats[index].nbytes

    def check(self) -> None:
        self.check_places()

    def check_places(self) -> None:
        if not self._places.are_kept(self._addresses):
            for named, address in zip(self.named, self._addresses, strict=True):
                check_place(named, address)

    def release(self) -> None:
        """Give each parameter memory of its own again, so that another layout can take it."""
        for named in self.named:
            named.parameter.data = named.parameter.detach().clone(
                memory_format=torch.preserve_format
            )


class ParameterPlaces:
    """Checks where parameters lie and are registered, all at once, so that it can be done often."""

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self._parameters = [each.parameter for each in named]
        self._dtypes = [each.dtype for each in named]
        self._places = [(*place, each.parameter) for each in named for place in each.places]

    def are_kept(self, addresses: Sequence[int]) -> bool:
        """Whether `check_place` finds nothing wrong with any."""
        return (
            [parameter.data_ptr() for parameter in self._parameters] == addresses
            and [parameter.dtype for parameter in self._parameters] == self._dtypes
            and all(module._parameters.get(key) is p for module, key, p in self._places)
        )


def check_place(named: NamedParameter, address: int) -> None:
    """Raise BrokenView unless the parameter lies at `address` and is where it was registered."""
    parameter = named.parameter
    if parameter.data_ptr() != address or parameter.dtype != named.dtype:
        raise BrokenView(
            f"The storage of {named.alias} was replaced after the engine took it over "
            f"(it is now {parameter.dtype} on {parameter.device}). Casting or moving a "
            "model (.to, .half, .data = ...) belongs before sw.Engine(...); for lower "
            "precision use --precision. To write values: "
            "with engine.full_parameters(write=True)."
        )
    for module, key in named.places:
        if module._parameters.get(key) is not parameter:
            raise _replaced(named.alias, module, key)


def _replaced(name: str, module: nn.Module, key: str) -> BrokenView:
    if key in getattr(module, "parametrizations", {}) or hasattr(module, f"{key}_g"):
        return BrokenView(
            f"{name} was given a parametrization after the engine took it over. "
            "Call weight_norm, spectral_norm or register_parametrization before sw.Engine(...)."
        )
    return BrokenView(
        f"{name} is no longer the parameter that the engine trains: it was replaced, as "
        "load_state_dict(assign=True) does. Load before sw.Engine(...), or without assign=True."
    )
