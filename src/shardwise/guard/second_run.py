"""Runs training forward and backward passes twice, and compares the results bit by bit.

A correct device returns the same bits for the same operations on the same values. The second run
therefore reveals a device that occasionally computes wrong results, without help from other ranks.
It does not reveal an error that repeats exactly.

    forward       the model runs     ── again, with the same inputs, buffers and random state
                  compared: the inputs and outputs of each layer. The model's outputs alone do not
                  show every error, because autograd also saves layers' values for the backward pass
    backward      gradients, dropped ── again, by the training itself

Together, the two runs have the same side effects as one: buffers, attributes and random generators
are restored. User hooks that return nothing are not called a second time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError
from shardwise.guard.findings import GRADIENT, OUTPUT, Finding
from shardwise.guard.memory import flat_view
from shardwise.layout.fingerprints import can_be_taken, hash_of
from shardwise.model import recomputation, unit_attributes
from shardwise.model.buffers import version_of
from shardwise.model.compilation import is_compiled
from shardwise.model.module_hooks import Hooked, attach
from shardwise.world.generator_states import GeneratorStates

_OBSERVING = (
    "shardwise.guard.",
    "shardwise.model.module_records",
    "shardwise.model.forward_events",
    "shardwise.parallel.pipeline.layer_times",
    "shardwise.world.",
)
"""Modules whose hooks only observe a forward pass, so the second run must not call them."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

NamedTensors = Sequence[tuple[str, Tensor]]


def bits(value: Tensor) -> Tensor | None:
    """Return a hash of a tensor's bits as a 0-dim int64, or None for a sparse tensor."""
    if not can_be_taken(value) or not value.numel():
        return None
    return hash_of(flat_view(value))


@dataclass(eq=False)
class _Observed:
    """Wraps a user's hook during the first run, and records whether the hook changes anything."""

    hook: Callable[..., Any]
    alters: bool = False

    def __call__(self, *arguments: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        before = [version_of(tensor) for tensor in tensors]
        result = self.hook(*arguments)
        changed = [version_of(tensor) for tensor in tensors] != before
        self.alters = self.alters or changed or result is not None
        return result


@dataclass(eq=False)
class _Before:
    """The state of a model before a training forward pass."""

    generators: GeneratorStates
    buffers: list[tuple[nn.Module, str, Tensor]]
    attributes: Any
    versions: list[int]
    recording: RemovableHandle
    """Handle of the hook that records layers."""
    layers: list[tuple[str, Tensor]] = field(default_factory=list)
    """Name of each layer that has run, and hashes of its inputs and outputs."""
    observed: list[tuple[OrderedDict[int, Any], int, _Observed]] = field(default_factory=list)

    def close(self) -> None:
        self.recording.remove()
        for hooks, key, observed in self.observed:
            # A hook may have removed itself, or have been replaced.
            if hooks.get(key) is observed:
                hooks[key] = observed.hook


class SecondRun:
    """Runs the models' forward and backward passes twice between `arm` and `findings`.

    Args:
        models: The models, each with the name to report.
        device: Device of this rank.
        apart: Returns a context manager for a forward pass without a backward pass.
        begin: Seeds the generators at the first training forward pass. Later calls do nothing.
        impossible: The reason why passes cannot be computed twice, or None if they can.
    """

    def __init__(
        self,
        models: Sequence[tuple[str, nn.Module]],
        device: torch.device,
        apart: Callable[[], AbstractContextManager[None]] = nullcontext,
        begin: Callable[[], None] = lambda: None,
        *,
        impossible: str | None = None,
    ) -> None:
        self._models = models
        self._begin = begin
        self._device = device
        self._apart = apart
        self._hooks: list[Hooked] = []
        self._layers: dict[nn.Module, str] = {}
        """Modules without children, with their names."""
        self._before: _Before | None = None
        self._is_second = False
        self._is_armed = False
        self._pairs: list[tuple[str, str, Tensor, Tensor]] = []
        """Kind and name of each result, and its hashes in the two runs."""
        self._swapped: list[tuple[Tensor, Any]] = []
        self._first: dict[str, list[Tensor]] = {}
        self._second: dict[str, list[Tensor]] = {}
        self.is_possible = impossible is None
        self.reason = impossible
        """Why a pass could not be compared, or None."""

    # -- the step that is computed twice ------------------------------------------------------

    def arm(self) -> None:
        """Run the passes of the next step twice, if possible."""
        if not self.is_possible:
            return
        self._is_armed = True
        self._layers = {
            module: path or name
            for name, model in self._models
            for path, module in model.named_modules()
            if not any(module.children())
        }
        for _, model in self._models:
            if any(map(is_compiled, model.modules())):
                self.reason = "torch.compile has compiled the model"
                continue
            before, after = model.register_forward_pre_hook, model.register_forward_hook
            self._hooks += [
                attach(before, self._enter, with_kwargs=True, prepend=True),
                attach(after, self._leave, with_kwargs=True),
            ]

    def findings(self, step: int, rank: int) -> list[Finding]:
        """Return the differences between the two runs. Waits for the device just once."""
        self.disarm()
        pairs, self._pairs = self._pairs, []
        bad: dict[str, list[str]] = {}
        if pairs:
            # Comparing all hashes at once takes one kernel and one copy to the host.
            one = torch.stack([one.to(self._device) for _, _, one, _ in pairs])
            two = torch.stack([two.to(self._device) for _, _, _, two in pairs])
            for (kind, name, *_), is_bad in zip(pairs, (one != two).tolist(), strict=True):
                if is_bad and name not in bad.setdefault(kind, []):
                    bad[kind].append(name)
        evidence = "the same computation gave other bits when it was repeated"
        found = [(kind, tuple(names)) for kind, names in bad.items() if names]
        return [Finding(step, kind, names, rank, evidence) for kind, names in found]

    def disarm(self) -> None:
        self._is_armed = False
        if self._before is not None:  # a forward pass has raised
            self._before.close()
            self._before = None
        while self._hooks:
            self._hooks.pop().remove()

    def _compare(self, kind: str, name: str, one: Tensor | None, two: Tensor | None) -> None:
        if one is not None and two is not None:
            self._pairs.append((kind, name, one, two))

    # -- forward ------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A forward pass inside a backward pass is a recomputation.
        again = torch._C._current_graph_task_id() != -1
        if self._is_second or self._before is not None or again or not torch.is_grad_enabled():
            return
        # Before the generators are read: the hook that begins training runs after this one.
        self._begin()
        layers: list[tuple[str, Tensor]] = []
        self._before = _Before(
            GeneratorStates.now(self._device),
            [
                (each, key, buffer.detach().clone())
                for each in module.modules()
                for key, buffer in each._buffers.items()
                if buffer is not None
            ],
            unit_attributes.look(module),
            _versions((args, kwargs)),
            self._record(layers),
            layers,
        )
        for each in module.modules():
            for name in _HOOKS:
                hooks = getattr(each, name)
                for key, hook in hooks.items():
                    if _is_users(hook):
                        observed = _Observed(hook)
                        hooks[key] = observed
                        self._before.observed.append((hooks, key, observed))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        before = self._before
        if self._is_second or before is None:
            return
        self._before = None
        before.close()
        if _versions((args, kwargs)) != before.versions:
            self.reason = f"{type(module).__name__} changes its input in place"
            return
        try:
            attributes = unit_attributes.changed(before.attributes)
        except ModelError:
            self.reason = f"{type(module).__name__} changes a tensor attribute in place"
            return
        first, layers = [bits(each) for each in _tensors(output)], list[tuple[str, Tensor]]()
        now = GeneratorStates.now(self._device)
        with ExitStack() as stack:
            stack.callback(now.restore, self._device)
            stack.enter_context(self._apart())
            stack.enter_context(recomputation.stand_ins(before.buffers))
            stack.enter_context(unit_attributes.stand_ins(attributes))
            stack.enter_context(_without_observers(module, before.observed))
            # Autograd records as in the first run, so that torch chooses the same kernels, but it
            # keeps nothing: this graph has no backward pass.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_drop, _refuse))
            stack.callback(self._record(layers).remove)
            before.generators.restore(self._device)
            self._is_second = True
            try:
                second = [bits(each) for each in _tensors(module(*args, **kwargs))]
            finally:
                self._is_second = False
        name = next((name for name, model in self._models if model is module), "")
        # In the order of execution, so that the first layer with an error is named first.
        for (layer, old), (_, new) in zip(before.layers, layers, strict=False):
            self._compare(OUTPUT, layer, old, new)
        for one, two in zip(first, second, strict=True):
            self._compare(OUTPUT, name or type(module).__name__, one, two)

    def _record(self, into: list[tuple[str, Tensor]]) -> RemovableHandle:
        """Install a hook that appends hashes of each layer's inputs and outputs to `into`.

        torch calls this hook for every module, so the layers' own hooks are not modified.
        """

        def record(module: nn.Module, args: Any, output: Any) -> None:
            if (name := self._layers.get(module)) is not None:
                into.extend(
                    (name, found)
                    for each in _tensors((args, output))
                    if (found := bits(each)) is not None
                )

        return register_module_forward_hook(record)

    # -- backward -----------------------------------------------------------------------------

    def before_backward(
        self,
        loss: Tensor,
        seed: Tensor | None,
        named: NamedTensors,
        passes: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Compute all gradients of `loss` and drop them, before training computes them.

        Args:
            loss: The loss, with one element.
            seed: Gradient of the loss, in the loss's shape. None stands for 1.
            named: The parameters, each with its name.
            passes: Returns a context manager for a backward pass.
        """
        if not self._is_armed:
            return
        for _, model in self._models:
            for each in model.modules():
                if is_compiled(each):
                    # A compiled backward pass may overwrite what it reads.
                    self.reason = "torch.compile has compiled the model"
                    return
                if each._backward_hooks or each._backward_pre_hooks:
                    self.reason = f"{type(each).__name__} has a backward hook"
                    return
        wanted = [(name, tensor) for name, tensor in named if tensor.requires_grad]
        self._first, self._second = {}, {}
        now = GeneratorStates.now(self._device)
        self._listen(wanted, self._first, drops=True)
        try:
            with passes():
                torch.autograd.grad(
                    loss,
                    [tensor for _, tensor in wanted],
                    seed,
                    retain_graph=True,
                    allow_unused=True,
                )
        except RuntimeError as error:
            if "Checkpointing is not compatible" not in str(error):
                raise
            self.reason = "torch.utils.checkpoint with use_reentrant=True runs only once"
            self._first = {}
        finally:
            self._stop_listening()
            now.restore(self._device)
        self._listen(wanted, self._second, drops=False)

    def after_backward(self) -> None:
        """Compare the gradients from training with those that `before_backward` computed."""
        self._stop_listening()
        first, self._first = self._first, {}
        for name, sums in first.items():
            for one, two in zip(sums, self._second.get(name, []), strict=False):
                self._compare(GRADIENT, name, one, two)

    def _listen(self, named: NamedTensors, into: dict[str, list[Tensor]], *, drops: bool) -> None:
        """Append a hash of each parameter's gradient to `into`, before user hooks see the gradient.

        If `drops` is true, user hooks are not called, and gradients are not stored.
        """
        for name, tensor in named:
            hooks = tensor._backward_hooks
            self._swapped.append((tensor, hooks))

            def listen(grad: Tensor, name: str = name) -> Tensor | None:
                found = bits(grad)
                if found is not None:
                    into.setdefault(name, []).append(found)
                return grad.new_zeros(()).expand(grad.shape) if drops else None

            # Autograd calls a tensor's hooks in the order of this dict.
            kept = {} if drops or hooks is None else hooks
            tensor._backward_hooks = OrderedDict({-1: listen, **kept})

    def _stop_listening(self) -> None:
        while self._swapped:
            tensor, hooks = self._swapped.pop()
            tensor._backward_hooks = hooks


def _versions(values: Any) -> list[int]:
    return [version_of(each) for each in _tensors(values)]


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _is_users(hook: Any) -> bool:
    """Return whether `hook` is a user's: registered neither by Shardwise nor by torch."""
    home = _home_of(hook)
    return not home.startswith(("torch.", "shardwise."))


def _home_of(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__module__", None) or type(hook).__module__)


@contextmanager
def _without_observers(
    module: nn.Module, observed: Sequence[tuple[OrderedDict[int, Any], int, _Observed]]
) -> Iterator[None]:
    """Context manager that disables hooks that only observe."""
    silent = [(hooks, key, each.hook) for hooks, key, each in observed if not each.alters]
    for each in module.modules():
        for name in _HOOKS:
            hooks = getattr(each, name)
            silent += [
                (hooks, key, hook)
                for key, hook in hooks.items()
                if _home_of(hook).startswith(_OBSERVING)
            ]
    for hooks, key, _ in silent:
        if key in hooks:
            hooks[key] = _ignore
    try:
        yield
    finally:
        for hooks, key, hook in silent:
            if hooks.get(key) is _ignore:
                hooks[key] = hook


def _ignore(*_: Any) -> None:
    """Do nothing. Stands in for observing hooks."""


def _drop(tensor: Tensor) -> None:
    del tensor


def _refuse(saved: None) -> Tensor:
    raise AssertionError("the graph of a second run has no backward pass")
