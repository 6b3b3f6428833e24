"""Computes the outputs of a layer on another stage as fake tensors: shapes without values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from shardwise.errors import ModelError
from shardwise.parallel.pipeline.fake_tensors import (
    fake_activation,
    fake_like,
    fake_mode,
    without_saving,
)
from shardwise.parallel.pipeline.stages import Stages

MOST_CACHED = 1024
"""The number of outputs that are cached."""


class FakeOutputs:
    """The outputs of layers of `pipeline`, computed once for each signature of their arguments."""

    def __init__(self, pipeline: Stages) -> None:
        self._pipeline = pipeline
        self._cache: dict[Any, Any] = {}

    def outputs_of(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
    ) -> Any:
        """The outputs of the `original` forward of a module on another stage, as fake tensors.

        They are computed once for each signature of the arguments.
        """
        trained = tuple(p.requires_grad for p in module.parameters())
        key = (
            *(module, module.training, trained, torch.is_grad_enabled(), spec),
            torch.is_autocast_enabled(self._pipeline.device.type),
            *(_signature(leaf) for leaf in leaves),
        )
        found = self._cache.get(key)
        if found is None:
            found = self._compute(module, original, leaves, spec)
            if len(self._cache) >= MOST_CACHED:
                self._cache.clear()
            # Not for arguments of other types: the signature of an object does not tell what a
            # layer returns for it.
            if all(isinstance(leaf, (Tensor, *_PLAIN_TYPES)) for leaf in leaves):
                self._cache[key] = found
        out, forms = found
        made = [fake_activation(form) if isinstance(form, Tensor) else form for form in forms]
        return pytree.tree_unflatten(made, out)

    def _compute(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
    ) -> Any:
        # The module of another stage has no values here, but its forward, on fake tensors, gives
        # the shapes that this rank needs to run the program around it.
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        # Detached before the mode is on: that of torch 2.9 takes no subclass of Parameter.
        bare = {key: (value.detach(), value.requires_grad) for key, value in tensors.items()}
        before = torch.get_rng_state()
        with fake_mode(), without_saving():
            fakes = {
                key: fake_like(value).requires_grad_(needs) for key, (value, needs) in bare.items()
            }
            likes = [fake_activation(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(likes, spec)
            try:
                with (
                    self._pipeline.with_own_forwards(),
                    _unchanged(module),
                    _without_hooks(module),
                    _reparametrize_module(module, fakes),
                ):
                    result = original(*args, **kwargs)
            except Exception as error:
                raise ModelError(
                    f"{type(module).__name__} is on another worker, and the form of its output "
                    f"cannot be computed without its data: {type(error).__name__}: {error}"
                ) from error
        torch.set_rng_state(before)
        flat, out = pytree.tree_flatten(result)
        return out, [
            fake_like(leaf.detach()).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in flat
        ]


_PLAIN_TYPES = (bool, int, float, str, bytes, Enum, slice, torch.dtype, torch.device, type(None))


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, slice):  # it cannot be a key itself
        return slice, leaf.start, leaf.stop, leaf.step
    return leaf if isinstance(leaf, _PLAIN_TYPES) else type(leaf)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of `module` after the block."""
    # Its forward may fill caches (positions, masks), which would then hold fake tensors.
    held = [
        (inner, dict(vars(inner)), dict(inner._buffers), set(inner._non_persistent_buffers_set))
        for inner in module.modules()
    ]
    try:
        yield
    finally:
        for inner, attributes, buffers, names in held:
            vars(inner).clear()
            vars(inner).update(attributes)
            inner._buffers.clear()
            inner._buffers.update(buffers)
            inner._non_persistent_buffers_set = names


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Remove the hooks of `module` inside the block."""
    held = [(inner, key, vars(inner)[key]) for inner in module.modules() for key in _HOOKS]
    try:
        for inner, key, _ in held:
            vars(inner)[key] = OrderedDict()
        yield
    finally:
        for inner, key, hooks in held:
            vars(inner)[key] = hooks
