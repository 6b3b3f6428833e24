"""Parameters, replicated: views of flat buffers, private to each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwise.collectives import Collectives, Handle
from shardwise.errors import BrokenView
from shardwise.layout import Bucket


@dataclass(eq=False)
class Tracked:
    """A trainable parameter: its name, itself, and every place in the models that holds it."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def alias(self) -> str:
        return self.name or "a parameter outside of the models"


def view_like(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """The elements of `flat` from `start` on in the shape and memory format of `like`."""
    strides = torch.empty_like(like, device="meta").stride()
    return flat.as_strided(like.shape, strides, flat.storage_offset() + start)


class ReplicatedParameters:
    """The trainable parameters as views of one flat buffer per bucket.

    Parameter objects stay the user's own; only what they rest on changes. `flats[b]` is bucket
    b's buffer, of `buckets[b].numel` elements, zero in its padding.
    """

    def __init__(
        self, tracked: Sequence[Tracked], buckets: Sequence[Bucket], group: Collectives
    ) -> None:
        self.tracked = tracked
        self.buckets = buckets
        self._group = group
        self.flats = [self._adopt(bucket) for bucket in buckets]
        self._addresses = [t.parameter.data_ptr() for t in tracked]
        self._dtypes = [t.parameter.dtype for t in tracked]
        self.remember()

    def _adopt(self, bucket: Bucket) -> Tensor:
        """Move a bucket's parameters into a buffer, keeping shape, strides and values."""
        first = self.tracked[bucket.slots[0].parameter].parameter
        flat = self._group.allocate(bucket.numel, first.dtype, first.device)
        for slot in bucket.slots:
            parameter = self.tracked[slot.parameter].parameter
            view = view_like(flat, slot.start, parameter)
            view.copy_(parameter.detach())
            parameter.data = view
        return flat

    def publish(self, index: int) -> Handle:
        """Send each rank's updated interval of bucket `index` to all."""
        return self._group.all_gather(self.flats[index], self.buckets[index].cuts)

    def touch(self) -> None:
        """Tell autograd that the values changed, so that a stale graph is an error, as in torch."""
        torch.autograd.graph.increment_version([t.parameter for t in self.tracked])
        self.remember()

    def remember(self) -> None:
        """Take the present values as those of which `written` tells changes."""
        self._versions = [tracked.parameter._version for tracked in self.tracked]

    def written(self) -> set[int]:
        """The parameters that user code has written since (load_state_dict, clamp_ ...)."""
        pairs = zip(self.tracked, self._versions, strict=True)
        return {
            i for i, (tracked, version) in enumerate(pairs) if tracked.parameter._version != version
        }

    def check(self) -> None:
        """Raise BrokenView if user code replaced a parameter or what it rests on."""
        for tracked, address, dtype in zip(
            self.tracked, self._addresses, self._dtypes, strict=True
        ):
            parameter = tracked.parameter
            if parameter.data_ptr() != address or parameter.dtype != dtype:
                raise BrokenView(
                    f"The storage of {tracked.alias} was replaced after the engine took it over "
                    f"(it is now {parameter.dtype} on {parameter.device}). Casting or moving a "
                    "model (.to, .half, .data = ...) belongs before sw.Engine(...); for lower "
                    "precision use --precision. To write values: "
                    "with engine.full_parameters(write=True)."
                )
            for module, key in tracked.places:
                if module._parameters.get(key) is not parameter:
                    raise _replaced(tracked.alias, module, key)

    def release(self) -> None:
        """Give each parameter memory of its own again, so that another layout can take it."""
        for tracked in self.tracked:
            tracked.parameter.data = tracked.parameter.detach().clone(
                memory_format=torch.preserve_format
            )


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


def locate(models: Iterable[nn.Module], names: Sequence[str]) -> list[Tracked]:
    """Every parameter of `models`, in registration order, each once, with all its places.

    Names are those of the plain model: what torch.compile puts in front is left out. With
    several models each name starts with its model's entry of `names`.
    """
    found: dict[nn.Parameter, Tracked] = {}
    for model, prefix in zip(models, names, strict=True):
        for path, module in model.named_modules(remove_duplicate=True):
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = ".".join(part for part in (prefix, path, key) if part)
                tracked = found.setdefault(
                    parameter, Tracked(name.replace("_orig_mod.", ""), parameter)
                )
                tracked.places.append((module, key))
    return list(found.values())
