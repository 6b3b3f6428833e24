"""What one Trainer or Fabric trains: its run, its engines, and a step piece by piece."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.amp import GradScaler

import shardwise as sw
from shardwise.bridging.joining import SETTINGS, join
from shardwise.bridging.plain_gradients import plain_backward
from shardwise.bridging.trained import Make, TrainedModels
from shardwise.bridging.trained_engine import LossItems, Trained, in_training
from shardwise.config import OF_THE_ENGINE
from shardwise.engine.initial_values import make_alike
from shardwise.errors import UsageError
from shardwise.lightning.empty_modules import give_memory
from shardwise.lightning.exact_mean import ExactMean, ItemsOf
from shardwise.lightning.parts import models_of
from shardwise.messages.other_libraries import hint as hint_at_other_library


class Engines(TrainedModels):
    """Engines that know what has gradients since its last step, as plain parameters know it."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.only: optim.Optimizer | None = None
        """The optimizer that backwards are for, where the script has toggled one."""
        self._pending: list[Trained] = []

    def has_gradients(self, optimizer: optim.Optimizer) -> bool:
        """Whether a backward has reached what `optimizer` trains since its last step."""
        return any(each is self.of(optimizer) for each in self._pending)

    def _reached(self, loss: Tensor) -> list[Trained]:
        reached = super()._reached(loss)
        if self.only is not None:
            only = self.of(self.only)
            reached = [each for each in reached if each is only]
            if not reached:
                raise UsageError(
                    "This loss reaches nothing that the toggled optimizer trains: toggle the "
                    "optimizer whose loss it is, or untoggle before the backward."
                )
        self._pending += [each for each in reached if each not in self._pending]
        return reached

    def forget_cleared(self) -> None:
        """Forget gradients that the script has cleared by `zero_grad` since they were made."""
        for each in list(self._pending):
            groups = (group for o in each.optimizers for group in o.param_groups)
            trained = [p for group in groups for p in group["params"] if p.requires_grad]
            if all(parameter.grad is None for parameter in trained):
                each.clear()
                self._pending.remove(each)

    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step `optimizer`. Without gradients it does nothing, as plain optimizers do. Collective.

        Raises UsageError where no engine trains with it.
        """
        self.forget_cleared()
        trained = self.of(optimizer)
        if trained is None:
            self._check_any()
            raise UsageError(
                f"{type(optimizer).__name__}.step() trains nothing: its parameters belong to no "
                "model that was set up. Make it of the parameters of the model that was."
            )
        if closure is None and trained not in self._pending and not trained.waits:
            return
        trained.step(optimizer, closure)
        if not trained.waits and trained in self._pending:
            self._pending.remove(trained)

    def forget(self) -> None:
        """Forget the gradients since the last step."""
        for each in self._pending:
            each.clear()
        self._pending.clear()

    def close(self) -> None:
        """Give models and optimizers back as plain ones. Collective."""
        self.forget()
        super().close()

    def _end(self, trained: Trained) -> None:
        # Another Trainer may take the model in the middle of a step: a closed engine clears no
        # gradients.
        self._pending = [each for each in self._pending if each is not trained]
        super()._end(trained)


class Training:
    """The engines of one Trainer or Fabric, and the run that they are in.

    `settings` are keywords of Shardwise, `library` is what messages call the caller. `world` is
    there after `join`. `scaler` is the loss scale of the precision plugin. `exact` is there where
    means are exact: over samples, or what a given function counts.
    """

    world: sw.World

    def __init__(
        self, settings: Mapping[str, Any], library: str, exact_mean: bool | ItemsOf = False
    ) -> None:
        for name in settings.keys() - SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1)
            such = f", such as {near[0]}." if near else "."
            hint = hint_at_other_library(name)
            raise UsageError(
                f"{library}'s strategy takes no {name}: it takes settings of Shardwise"
                + (f". {hint}" if hint else such)
            )
        self._settings = dict(settings)
        self._library = library
        self.scaler: GradScaler | None = None
        self.engines = Engines(self._make_engine)
        self._modules: list[nn.Module] = []
        self._models: list[nn.Module] = []
        self._optimizers: list[optim.Optimizer] = []
        self._more_to_come = 0
        self._are_whole = False
        """Whether gradients are whole now, for the user's hooks."""
        self.exact: ExactMean | None = None
        if exact_mean:
            items_of = exact_mean if callable(exact_mean) else None
            if library == "Fabric":  # which does not know what a loader is for
                self.exact = ExactMean("fabric.backward", items_of, self._is_training)
            else:
                self.exact = ExactMean("self.manual_backward", items_of, lambda: True)

    def _is_training(self) -> bool:
        """Whether a loader that begins now is to train on."""
        return torch.is_grad_enabled() and any(module.training for module in self._modules)

    def join(self, accelerator: str) -> None:
        """Join the run, on the device that the `accelerator` class of the library stands for.

        Raises UsageError where the run computes on another one.
        """
        wanted = {"CPUAccelerator": "cpu", "CUDAAccelerator": "cuda"}.get(accelerator)
        if wanted is None:
            raise UsageError(
                f"{self._library} on {accelerator}: this engine trains on CPUs and CUDA GPUs. "
                'Write accelerator="cpu" or "gpu".'
            )
        given = {"device": "cpu"} if wanted == "cpu" else {}
        self.world = join(self._settings | given, self._library)
        if self.world.device.type != wanted:
            raise UsageError(
                f"{self._library} takes {wanted} and this run computes on "
                f'{self.world.device.type}: write accelerator="{self.world.device.type}", or '
                f"start it with --device {wanted}."
            )

    @property
    def shards_parameters(self) -> bool:
        """Whether the engines of this run shard parameters."""
        settings = {n: v for n, v in self._settings.items() if n in OF_THE_ENGINE}
        return self.world.settle(**settings).placement.is_sharded("parameters")

    def _make_engine(self, models: list[nn.Module], optimizers: list[optim.Optimizer]) -> sw.Engine:
        settings = {n: v for n, v in self._settings.items() if n in OF_THE_ENGINE}
        return sw.Engine(models, optimizers, scaler=self.scaler, **settings)

    # -- what is trained --------------------------------------------------------------------

    def prepare(self, module: nn.Module | None, optimizers: Sequence[optim.Optimizer]) -> None:
        """Train `module` with `optimizers` beside what is trained already. Collective.

        Of several optimizers with nothing in common each has an engine of its own.
        """
        if module is not None:
            self._modules.append(module)
            self.make_alike(module)
        self._optimizers += [each for each in optimizers if any(each.param_groups)]
        models = [part for each in self._modules for part in models_of(each, self._optimizers)]
        if any(each not in models for each in self._models):
            self.engines.close()  # a second optimizer has divided what was one
        self._models = models
        self.engines.form(models, self._optimizers)

    def make_alike(self, module: nn.Module) -> None:
        """Give every rank rank 0's values of what no engine has of `module`. Collective."""
        # A Trainer that has failed may still train it: its shards are no values to send.
        models = self._models + [model for each in in_training() for model in each.models]
        known = {id(t) for model in models for t in _tensors(model)}
        # Without memory there is no value yet: the engine sends rank 0's as it makes them.
        left = [t for t in _tensors(module) if id(t) not in known and not t.is_meta]
        make_alike(left, self.world.collectives)

    def close(self) -> None:
        """Give models and optimizers back as plain ones. Collective."""
        self.engines.close()
        self.engines.only = None
        self._modules, self._models, self._optimizers = [], [], []

    def replace_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Let the optimizers go on from plain `states`, one of each, in order. Collective.

        The engines are made anew where there is a loss scale, which they read as they are made.
        """
        self.engines.forget()
        if self.scaler is not None:
            self.engines.close()
            self.engines.form(self._models, self._optimizers)
        for optimizer, state in zip(self._optimizers, states, strict=True):
            self.load_optimizer_state(optimizer, state)

    # -- a step -----------------------------------------------------------------------------

    @contextmanager
    def not_last(self) -> Iterator[None]:
        """Inside the block more backwards follow in the step, which saves communication."""
        self._more_to_come += 1
        try:
            yield
        finally:
            self._more_to_come -= 1

    def backward(self, loss: Tensor, *arguments: Any, **keywords: Any) -> None:
        """Backward of `loss` in every engine that it reaches.

        Takes `retain_graph`; where means are exact also `weight`, the number of items that the loss
        is a mean over (default: the samples of the batch), and `same_items` as the engine's does.
        """
        retain_graph = bool(keywords.pop("retain_graph", False))
        weight = self._items_of(keywords)
        if arguments or keywords:
            named = next(iter(keywords), "a gradient")
            raise UsageError(
                f"{self._library}: backward(loss, {named}) asks for what the engine decides: "
                "gradients go to all trained parameters that the loss reaches, and once. Leave "
                "it out."
            )
        if not self._optimizers:
            last = not self._more_to_come
            plain_backward(loss, self._modules, self.world, last=last, retain_graph=retain_graph)
            return
        self.engines.forget_cleared()
        last = not self._more_to_come
        self.engines.backward(loss, last=last, retain_graph=retain_graph, weight=weight)

    def _items_of(self, keywords: dict[str, Any]) -> LossItems | None:
        """What a loss is a mean over, where means are exact; takes its words out of `keywords`."""
        number, same = keywords.pop("weight", None), keywords.pop("same_items", None)
        if self.exact is not None:
            return self.exact.items(number, same)
        if number is None and same is None:
            return None
        raise UsageError(
            f"{self._library}: backward(loss, weight=...) counts with the strategy's "
            "exact_mean=True alone: without it losses of the workers are averaged, whatever they "
            "are means of."
        )

    @contextmanager
    def full_gradients(self, optimizer: optim.Optimizer) -> Iterator[None]:
        """Inside the block `p.grad` is the whole gradient of what `optimizer` trains, to read or
        to write. Collective."""
        optimizer = plain(optimizer)
        self.engines.forget_cleared()
        if not self.engines.has_gradients(optimizer):
            yield
            return
        with self.engines.full_gradients(_parameters(optimizer)):
            self._are_whole = True
            try:
                yield
            finally:
                self._are_whole = False

    def clip_norm(
        self, optimizer: optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip what `optimizer` steps by its norm over all workers; the norm before. Collective."""
        optimizer = plain(optimizer)
        parameters = _parameters(optimizer)
        if not self._are_whole:
            self.engines.forget_cleared()
            if not self.engines.has_gradients(optimizer):
                return torch.zeros((), device=self.world.device)
            if not max_norm > 0:
                raise UsageError(
                    f"Clipping to a norm of {max_norm} would update nothing: give one above 0, or "
                    "leave the call out."
                )
            norm = self.engines.clip(parameters, float(max_norm)) if norm_type == 2 else None
            if norm is not None:
                dtype = torch.promote_types(parameters[0].dtype, torch.float32)
                return torch.tensor(norm, device=self.world.device, dtype=dtype)
            with self.full_gradients(optimizer):
                return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_value(self, optimizer: optim.Optimizer, clip_value: float) -> None:
        """Clip every element of the gradients, which are whole for that moment. Collective."""
        if self._are_whole:
            nn.utils.clip_grad_value_(_parameters(optimizer), clip_value)
            return
        with self.full_gradients(optimizer):
            nn.utils.clip_grad_value_(_parameters(optimizer), clip_value)

    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step `optimizer`; with a `closure`, as often as it wants. Collective."""
        if self._optimizers:
            self.engines.step(optimizer, closure)

    # -- whole tensors ----------------------------------------------------------------------

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The state_dict of `module`, a copy on the CPU: whole on every rank; where parameters are
        sharded, on rank 0, and empty on the others. Collective."""
        sharded = [e for e in self.engines if e.engine.placement.is_sharded("parameters")]
        if not sharded:
            return _copied(module.state_dict())
        if len(sharded) == 1 and sharded[0].models == [module]:
            return sharded[0].engine.model_state_dict(module)
        with self.full_parameters():
            return _copied(module.state_dict()) if self.world.is_main else {}

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Let `module` have the values of `state`, masters included. Collective."""
        give_memory(module)
        with self.full_parameters(write=True):
            return module.load_state_dict(dict(state), strict=strict)

    @contextmanager
    def full_parameters(self, *, write: bool = False) -> Iterator[None]:
        """Inside the block all parameters are whole, to read or to write. Collective."""
        with ExitStack() as blocks:
            for each in self.engines:
                blocks.enter_context(each.engine.full_parameters(write=write))
            yield

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """The state_dict that `optimizer` would have in one process, on every rank. Collective."""
        trained = self.engines.of(optimizer)
        if trained is None:
            return optimizer.state_dict()
        return trained.engine.optimizer_state_dict(optimizer, for_resume=True)

    def load_optimizer_state(self, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Let `optimizer` go on from `state`, that of a plain one. Collective."""
        trained = self.engines.of(optimizer)
        if trained is None:
            # The class's own: Fabric has put this method in the place of the optimizer's.
            type(optimizer).load_state_dict(optimizer, dict(state))
        else:
            trained.engine.load_optimizer_state_dict(state, optimizer)


def plain(optimizer: Any) -> Any:
    """The script's optimizer, out of the wrapper that Lightning has given it."""
    return getattr(optimizer, "_optimizer", optimizer)


def _parameters(optimizer: optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with memory of its own, on the CPU, in which tied weights are one tensor.

    Parameters are views of one buffer, and torch.save would write all of it.
    """
    copies: dict[Any, Tensor] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            place = value.data_ptr(), value.shape, value.stride()
            key = place if value.numel() else name
            if key not in copies:
                copies[key] = value.detach().cpu().clone()
            value = copies[key]
        found[name] = value
    return found
