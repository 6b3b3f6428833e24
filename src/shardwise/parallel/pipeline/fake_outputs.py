"""Computes the output shapes of layers that run on another stage, using fake tensors."""

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
"""Maximum number of cached outputs."""


class FakeOutputs:
    """Computes fake outputs of layers, and caches them by the signature of the arguments."""

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
        """Return the outputs of a module that runs on another stage, as fake tensors.

        Args:
            module: The module, whose parameters have no values on this rank.
            original: The module's own `forward`.
            leaves: The flattened arguments of the call.
            spec: The pytree specification of the arguments.
        """
        # Each of these can affect the outputs' shapes, dtypes or `requires_grad`.
        trained = tuple(p.requires_grad for p in module.parameters())
        key = (
            *(module, module.training, trained, torch.is_grad_enabled(), spec),
            torch.is_autocast_enabled(self._pipeline.device.type),
            *(_signature(leaf) for leaf in leaves),
        )
        entry = self._cache.get(key)
        if entry is None:
            entry = self._compute(module, original, leaves, spec)
            if len(self._cache) >= MOST_CACHED:
                self._cache.clear()
            # Cache only if all arguments are tensors or plain values. All objects of any other type
            # have the same signature, although the layer may return different shapes for them.
            if all(isinstance(leaf, (Tensor, *_PLAIN_TYPES)) for leaf in leaves):
                self._cache[key] = entry
        out, forms = entry
        outputs = [fake_activation(form) if isinstance(form, Tensor) else form for form in forms]
        return pytree.tree_unflatten(outputs, out)

    def _compute(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
    ) -> Any:
        # The module has no parameter values on this rank. Running its `forward` on fake tensors
        # yields the shapes that this rank needs to run the user's program around the module.
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        # Detach before entering the mode, because torch 2.9's mode rejects subclasses of Parameter.
        bare = {key: (value.detach(), value.requires_grad) for key, value in tensors.items()}
        # A forward pass with dropout draws random numbers even on fake tensors.
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
                    f"{type(module).__name__} runs on another worker, and the shape of its output "
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
    if isinstance(leaf, slice):  # not hashable
        return slice, leaf.start, leaf.stop, leaf.step
    return leaf if isinstance(leaf, _PLAIN_TYPES) else type(leaf)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Context manager that restores the attributes and buffers of `module` on exit."""
    # A forward pass may fill caches (positions, masks), which must not contain fake tensors
    # afterwards.
    snapshot = [
        (inner, dict(vars(inner)), dict(inner._buffers), set(inner._non_persistent_buffers_set))
        for inner in module.modules()
    ]
    try:
        yield
    finally:
        for inner, attributes, buffers, names in snapshot:
            vars(inner).clear()
            vars(inner).update(attributes)
            inner._buffers.clear()
            inner._buffers.update(buffers)
            inner._non_persistent_buffers_set = names


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Context manager that disables the hooks of `module`, so that they never see fake tensors.

    Hooks with an attribute `runs_on_fakes` stay, because they change the shapes of tensors.
    """
    hooks_by_module = [
        (inner, key, vars(inner)[key]) for inner in module.modules() for key in _HOOKS
    ]
    try:
        for inner, key, hooks in hooks_by_module:
            vars(inner)[key] = OrderedDict(
                (number, hook)
                for number, hook in hooks.items()
                if getattr(hook, "runs_on_fakes", False)
            )
        yield
    finally:
        for inner, key, hooks in hooks_by_module:
            vars(inner)[key] = hooks
