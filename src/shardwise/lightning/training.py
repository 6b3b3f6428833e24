"""The engines of one Trainer or Fabric: their run, and a step piece by piece."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.amp import GradScaler

import shardwise as sw
from shardwise.bridging.exact_mean import ItemsOf, items_of_loss
from shardwise.bridging.joining import SETTINGS, join
from shardwise.bridging.plain_gradients import plain_backward
from shardwise.bridging.trained_engine import TrainedEngine, in_training
from shardwise.bridging.trained_models import Make, TrainedModels, connected_parts
from shardwise.bridging.written_files import copied_state
from shardwise.config import OF_THE_ENGINE
from shardwise.engine.initial_values import make_alike
from shardwise.errors import UsageError
from shardwise.lightning.empty_modules import give_memory
from shardwise.lightning.sharing import LoadedBatches
from shardwise.messages.other_libraries import hint as hint_at_other_library


class StrategyEngines(TrainedModels):
    """Engines that a loop of plain optimizers steps and clears."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.only: optim.Optimizer | None = None
        """The only optimizer that backwards are for, if the script has toggled one."""

    def has_gradients(self, optimizer: optim.Optimizer) -> bool:
        """Return whether a backward has reached what `optimizer` trains since its last step."""
        trained = self.of(optimizer)
        return trained is not None and trained.engine.has_gradients

    def _reached(self, loss: Tensor) -> list[TrainedEngine]:
        reached = super()._reached(loss)
        if self.only is not None:
            only = self.of(self.only)
            reached = [each for each in reached if each is only]
            if not reached:
                raise UsageError(
                    "This loss reaches nothing that the toggled optimizer trains: toggle the "
                    "optimizer whose loss it is, or untoggle before the backward."
                )
        return reached

    def forget_cleared(self) -> None:
        """Clear the engines whose gradients the script has cleared by a plain `zero_grad`."""
        for each in self:
            groups = (group for o in each.optimizers for group in o.param_groups)
            trained = [p for group in groups for p in group["params"] if p.requires_grad]
            if each.engine.has_gradients and all(p.grad is None for p in trained):
                each.clear()

    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step `optimizer`. Without gradients it does nothing, as a plain optimizer. Collective.

        Raises UsageError if no engine trains with it.
        """
        self.forget_cleared()
        trained = self.of(optimizer)
        if trained is None:
            self._check_any()
            raise UsageError(
                f"{type(optimizer).__name__}.step() trains nothing: its parameters belong to no "
                "model that was set up. Make it of the parameters of the model that was."
            )
        if closure is not None or trained.engine.has_gradients or trained.waits:
            trained.step(optimizer, closure)

    def forget(self) -> None:
        """Clear the gradients since the last step."""
        for each in self:
            if each.engine.has_gradients:
                each.clear()

    def close(self) -> None:
        """Turn models and optimizers back into plain ones. Collective."""
        self.forget()
        super().close()


class StrategyTraining:
    """What one Trainer or Fabric trains, and the run that it is in.

    Args:
        settings: keywords of Shardwise
        library: what messages call the caller
        exact_mean: whether each sample counts once, or a function that counts a batch's items

    Attributes:
        world: the run, after `join`
        scaler: the loss scale of the precision plugin
        exact: the batches of the loaders, if means are exact
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

        def make(models: list[nn.Module], optimizers: list[optim.Optimizer]) -> sw.Engine:
            return sw.Engine(models, optimizers, scaler=self.scaler, **self._engine_settings)

        self._engine_settings = {n: v for n, v in settings.items() if n in OF_THE_ENGINE}
        self.engines = StrategyEngines(make)
        self._modules: list[nn.Module] = []
        self._models: list[nn.Module] = []
        self._optimizers: list[optim.Optimizer] = []
        self._more_to_come = 0
        self._are_whole = False
        """Whether gradients are whole now, for the user's hooks."""
        self.exact: LoadedBatches | None = None
        if exact_mean:
            items_of = exact_mean if callable(exact_mean) else None

            def trains() -> bool:
                # A Trainer watches only loaders to train on. Fabric does not know what one is for.
                by_mode = torch.is_grad_enabled() and any(m.training for m in self._modules)
                return by_mode or library != "Fabric"

            call = "fabric.backward" if library == "Fabric" else "self.manual_backward"
            self.exact = LoadedBatches(call, items_of, trains)

    def join(self, accelerator: str) -> None:
        """Join the run on the device of the library's `accelerator` class. Raises UsageError if the
        run computes on another device."""
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
        settled = self.world.settle(**self._engine_settings)
        return settled.placement.is_sharded("parameters")

    # -- setup ------------------------------------------------------------------------------

    def prepare(self, module: nn.Module | None, optimizers: Sequence[optim.Optimizer]) -> None:
        """Train `module` with `optimizers`, in addition to earlier ones. Collective.

        Optimizers without common parameters get separate engines.
        """
        if module is not None:
            self._modules.append(module)
            self.make_alike(module)
        self._optimizers += [each for each in optimizers if any(each.param_groups)]
        models = [part for each in self._modules for part in _models_of(each, self._optimizers)]
        if any(each not in models for each in self._models):
            self.engines.close()  # a second optimizer divides a model that had one engine
        self._models = models
        self.engines.form(models, self._optimizers)

    def make_alike(self, module: nn.Module) -> None:
        """Give all ranks rank 0's values of the parts of `module` without an engine. Collective."""
        # A failed Trainer may still have an engine over it, whose parameters are shards.
        models = self._models + [model for each in in_training() for model in each.models]
        known = {id(t) for model in models for t in _tensors(model)}
        # Not of meta tensors: the engine sends rank 0's values when it gives them memory.
        left = [t for t in _tensors(module) if id(t) not in known and not t.is_meta]
        make_alike(left, self.world.collectives)

    def close(self) -> None:
        """Turn models and optimizers back into plain ones. Collective."""
        self.engines.close()
        self.engines.only = None
        self._modules, self._models, self._optimizers = [], [], []

    def replace_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load plain `states`, one for each optimizer in order. Collective."""
        self.engines.forget()
        if self.scaler is not None:  # Lightning has loaded the loss scale: engines read it once
            self.engines.close()
            self.engines.form(self._models, self._optimizers)
        for optimizer, state in zip(self._optimizers, states, strict=True):
            self.load_optimizer_state(optimizer, state)

    # -- a step -----------------------------------------------------------------------------

    @contextmanager
    def not_last(self) -> Iterator[None]:
        """Declare that more backwards of this step follow the block, to communicate only once."""
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
        call, setting = f"{self._library}: backward", "the strategy's exact_mean=True"
        weight = items_of_loss(self.exact, keywords, call, setting)
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

    @contextmanager
    def full_gradients(self, optimizer: optim.Optimizer) -> Iterator[None]:
        """Make `p.grad` the whole gradient of all that `optimizer` trains inside the block, to read
        or write. Collective."""
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
        """Clip what `optimizer` steps by its norm over all workers. Returns the norm before it.
        Collective."""
        optimizer = plain(optimizer)
        parameters = _parameters(optimizer)
        if self._are_whole:
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        self.engines.forget_cleared()
        if not self.engines.has_gradients(optimizer):
            return torch.zeros((), device=self.world.device)
        if not max_norm > 0:
            raise UsageError(
                f"Clipping to a norm of {max_norm} would update nothing: give one above 0, or "
                "leave the call out."
            )
        # The 2-norm of all parameters of an engine takes one small collective.
        norm = self.engines.clip(parameters, float(max_norm)) if norm_type == 2 else None
        if norm is None:
            with self.full_gradients(optimizer):
                return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        return torch.tensor(norm, device=self.world.device, dtype=dtype)

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
        """Return a copy on the CPU of the whole state_dict of `module`. If parameters are sharded,
        only rank 0 gets it and the others an empty one. Collective."""
        sharded = [e for e in self.engines if e.engine.placement.is_sharded("parameters")]
        if not sharded:
            return copied_state(module.state_dict(), "cpu")
        if len(sharded) == 1 and sharded[0].models == [module]:
            return sharded[0].engine.model_state_dict(module)
        with self.full_parameters():
            return copied_state(module.state_dict(), "cpu") if self.world.is_main else {}

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Load `state` into `module`, and into its fp32 masters. Collective."""
        give_memory(module)
        with self.full_parameters(write=True):
            return module.load_state_dict(dict(state), strict=strict)

    @contextmanager
    def full_parameters(self, *, write: bool = False) -> Iterator[None]:
        """Make all parameters whole inside the block, to read or write. Collective."""
        with ExitStack() as blocks:
            for each in self.engines:
                blocks.enter_context(each.engine.full_parameters(write=write))
            yield

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """Return the state_dict that `optimizer` would have in one process. Collective."""
        trained = self.engines.of(optimizer)
        if trained is None:
            return optimizer.state_dict()
        return trained.engine.optimizer_state_dict(optimizer, for_resume=True)

    def load_optimizer_state(self, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load `state`, of a plain optimizer, into `optimizer`. Collective."""
        trained = self.engines.of(optimizer)
        if trained is None:
            # The class's own: Fabric has put this method in the place of the optimizer's.
            type(optimizer).load_state_dict(optimizer, dict(state))
        else:
            trained.engine.load_optimizer_state_dict(state, optimizer)


def _models_of(module: nn.Module, optimizers: Sequence[optim.Optimizer]) -> list[nn.Module]:
    """Return the parts of `module` that get separate engines.

    With one optimizer, or optimizers with common parameters, that is `module` itself. Otherwise it
    is the largest modules whose parameters only one optimizer trains. Raises UsageError if two
    optimizers train parameters of the same innermost module.
    """
    inside = {id(p) for p in module.parameters()}
    connected = [part.parameters for part in connected_parts([], optimizers)]
    trained = [part for part in connected if part & inside]
    if len(trained) < 2:
        return [module]
    return [model for part in trained for model in _modules(module, part, trained)]


def _modules(
    module: nn.Module, part: set[int], trained: Sequence[set[int]], name: str = ""
) -> Iterator[nn.Module]:
    """The largest modules in `module`, called `name`, with parameters of `part` and of no other of
    `trained`."""
    held = {id(p) for p in module.parameters()}
    if not held & part:
        return
    if not any(other & held for other in trained if other is not part):
        yield module
        return
    for key, parameter in module.named_parameters(recurse=False):
        if id(parameter) in part:
            path = f"{name}.{key}".lstrip(".")
            raise UsageError(
                f"{path} is in {type(module).__name__} together with parameters of another "
                "optimizer, and each optimizer steps alone: put the parameters of each optimizer "
                "into separate modules (self.generator, self.discriminator)."
            )
    for key, child in module.named_children():
        yield from _modules(child, part, trained, f"{name}.{key}")


def plain(optimizer: Any) -> Any:
    """Return the script's own optimizer from Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


def _parameters(optimizer: optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
