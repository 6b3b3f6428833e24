"""What the forward of a layer that is elsewhere returns: its form, without the values."""

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
from shardwise.parallel.pipeline.stage_tensors import fakes, stand_in, unsaved
from shardwise.parallel.pipeline.stages import Stages

KEPT = 1024
"""Forms that are remembered."""


class Forms:
    """The forms that layers of a `line` return, worked out once for each of their arguments."""

    def __init__(self, line: Stages) -> None:
        self._line = line
        self._forms: dict[Any, Any] = {}

    def of(
        self,
        module: nn.Module,
        plain: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
    ) -> Any:
        """What the `plain` forward of a module that is elsewhere returns: stand-ins for tensors.

        Worked out once for each form of the arguments.
        """
        trained = tuple(p.requires_grad for p in module.parameters())
        key = (
            *(module, module.training, trained, torch.is_grad_enabled(), spec),
            torch.is_autocast_enabled(self._line.device.type),
            *(_form(leaf) for leaf in leaves),
        )
        found = self._forms.get(key)
        if found is None:
            found = self._work_out(module, plain, leaves, spec)
            if len(self._forms) >= KEPT:
                self._forms.clear()
            if all(map(_is_known, leaves)):
                self._forms[key] = found
        out, forms = found
        made = [stand_in(form) if isinstance(form, Tensor) else form for form in forms]
        return pytree.tree_unflatten(made, out)

    def _work_out(
        self,
        module: nn.Module,
        plain: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
    ) -> Any:
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        # Detached before the mode is on: that of torch 2.9 takes no subclass of Parameter.
        bare = {key: (value.detach(), value.requires_grad) for key, value in tensors.items()}
        before = torch.get_rng_state()
        with fakes(), unsaved():
            stands = {
                key: stand_in(value).requires_grad_(needs) for key, (value, needs) in bare.items()
            }
            likes = [stand_in(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(likes, spec)
            try:
                with (
                    self._line.plainly(),
                    _unchanged(module),
                    _without_hooks(module),
                    _reparametrize_module(module, stands),
                ):
                    result = plain(*args, **kwargs)
            except Exception as error:
                raise ModelError(
                    f"{type(module).__name__} is on another worker, and its output cannot be told "
                    f"without its data: {type(error).__name__}: {error}"
                ) from error
        torch.set_rng_state(before)
        flat, out = pytree.tree_flatten(result)
        return out, [
            stand_in(leaf.detach()).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in flat
        ]


_PLAIN = (bool, int, float, str, bytes, Enum, slice, torch.dtype, torch.device, type(None))


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, slice):  # it cannot be a key itself
        return slice, leaf.start, leaf.stop, leaf.step
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _is_known(leaf: Any) -> bool:
    """Whether what a layer returns can be told from the form of `leaf`: not of an object."""
    return isinstance(leaf, (Tensor, *_PLAIN))


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """After the block what hangs on `module` is what it was: caches that its forward fills would
    else hold stand-ins."""
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
    """Inside the block nobody hears of the forwards of `module`."""
    held = [(inner, key, vars(inner)[key]) for inner in module.modules() for key in _HOOKS]
    try:
        for inner, key, _ in held:
            vars(inner)[key] = OrderedDict()
        yield
    finally:
        for inner, key, hooks in held:
            vars(inner)[key] = hooks
