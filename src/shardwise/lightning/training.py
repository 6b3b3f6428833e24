"""Holds the engines of one Trainer or Fabric, and implements the parts of a training step."""

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
from shardwise.bridging.sequence_batches import SequenceBatches
from shardwise.bridging.trained_engine import TrainedEngine, trained_engines
from shardwise.bridging.trained_models import Make, TrainedModels, connected_parts
from shardwise.bridging.written_files import copied_state
from shardwise.config import OF_THE_ENGINE
from shardwise.engine.initial_values import make_alike
from shardwise.errors import UsageError
from shardwise.lightning.empty_modules import give_memory
from shardwise.lightning.sharing import LoadedBatches
from shardwise.messages.other_libraries import hint as hint_at_other_library


class StrategyEngines(TrainedModels):
    """Engines for loops that call `step` and `zero_grad` of plain optimizers."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.only: optim.Optimizer | None = None
        """The optimizer that the script has toggled, if any.

        Only its engine runs backward passes.
        """

    def has_gradients(self, optimizer: optim.Optimizer) -> bool:
        """Return whether a backward pass has reached `optimizer`'s engine since its last step."""
        trained = self.of(optimizer)
        return trained is not None and trained.engine.has_gradients

    def _reached(self, loss: Tensor) -> list[TrainedEngine]:
        reached = super()._reached(loss)
        if self.only is not None:
            only = self.of(self.only)
            reached = [each for each in reached if each is only]
            if not reached:
                raise UsageError(
                    "This loss reaches no parameter of the toggled optimizer. Toggle the optimizer "
                    "that this loss trains, or untoggle before the backward."
                )
        return reached

    def forget_cleared(self) -> None:
        """Clear the engines whose optimizers the script has cleared with a plain `zero_grad`."""
        # The script calls the optimizer's own method, so the engine only learns of it here, from
        # the fact that no parameter has its placeholder gradient any more.
        for each in self:
            groups = (group for o in each.optimizers for group in o.param_groups)
            trained = [p for group in groups for p in group["params"] if p.requires_grad]
            if each.engine.has_gradients and all(p.grad is None for p in trained):
                each.clear()

    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step `optimizer`. Collective.

        A no-op if there are no gradients, as with a plain optimizer. Raises UsageError if
        `optimizer` has no engine.
        """
        self.forget_cleared()
        trained = self.of(optimizer)
        if trained is None:
            self._check_any()
            raise UsageError(
                f"{type(optimizer).__name__}.step() trains nothing: its parameters belong to no "
                "model that was set up. Make it from the parameters of the model that was."
            )
        if closure is not None or trained.engine.has_gradients or trained.waits:
            trained.step(optimizer, closure)

    def forget(self) -> None:
        """Discard the gradients since the last step."""
        for each in self:
            if each.engine.has_gradients:
                each.clear()

    def close(self) -> None:
        """Turn models and optimizers back into plain ones. Collective."""
        self.forget()
        super().close()


class StrategyTraining:
    """The models, optimizers and engines of one Trainer or Fabric, and its run.

    Args:
        settings: Shardwise settings by name.
        library: Name of the library in messages.
        exact_mean: True if each sample counts once, or a function that counts a batch's items.

    Attributes:
        world: The run, once `join` has been called.
        scaler: The precision plugin's loss scaler.
        exact: The batches of the loaders, if means are exact.
        sequences: Splits sequences, with `--context`.
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
                f"{library}'s strategy has no argument {name}: pass settings of Shardwise"
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
        """True while gradients are gathered because the user's hooks are running."""
        self.sequences: SequenceBatches | None = None
        self.exact: LoadedBatches | None = None
        if exact_mean:
            self.exact = self._counted_batches(exact_mean if callable(exact_mean) else None)

    def _counted_batches(self, items_of: ItemsOf | None) -> LoadedBatches:
        def trains() -> bool:
            # A Trainer passes only its training loaders. Fabric passes all of them.
            by_mode = torch.is_grad_enabled() and any(m.training for m in self._modules)
            return by_mode or self._library != "Fabric"

        call = "fabric.backward" if self._library == "Fabric" else "self.manual_backward"
        return LoadedBatches(call, items_of, trains)

    def part_of(self, batch: Any, *, training: bool) -> Any:
        """Return this rank's part of the sequences of a Trainer's `batch`, with `--context`.

        Without an engine, attention does not exchange tokens, so the batch is not split.
        """
        if self.exact is not None and training:
            self.exact.set_current_batch(batch)
        if self.sequences is None or not len(self.engines):
            return batch
        part = self.sequences.split(batch)
        assert self.exact is not None
        samples = self.exact.batch_of_loss().samples if training else part.rows
        shown = self.sequences.show(part, samples, training=training)
        if training:
            self.exact.set_current_batch(shown)
        return shown

    def join(self, accelerator: str) -> None:
        """Join the run on the device of the library's `accelerator` class.

        Raises UsageError if the run computes on a different device.
        """
        wanted = {"CPUAccelerator": "cpu", "CUDAAccelerator": "cuda"}.get(accelerator)
        if wanted is None:
            raise UsageError(
                f"{self._library} on {accelerator} is not supported: the engine trains on CPUs and "
                'CUDA GPUs. Write accelerator="cpu" or "gpu".'
            )
        given = {"device": "cpu"} if wanted == "cpu" else {}
        self.world = join(self._settings | given, self._library, splits_sequences=True)
        if self.world.context_size > 1:
            self.sequences = SequenceBatches(self.world, f"a loader of {self._library}")
            # A mean of means would be wrong, because parts have different numbers of tokens.
            self.exact = self._counted_batches(None) if self.exact is None else self.exact
            self.exact.split(self.sequences, splits_on_read=self._library == "Fabric")
        if self.world.device.type != wanted:
            raise UsageError(
                f"{self._library} computes on {wanted}, but this run computes on "
                f'{self.world.device.type}. Write accelerator="{self.world.device.type}", or '
                f"start the run with --device {wanted}."
            )

    @property
    def shards_parameters(self) -> bool:
        """True if the engines of this run shard parameters."""
        settled = self.world.settle(**self._engine_settings)
        return settled.placement.is_sharded("parameters")

    # -- setup ------------------------------------------------------------------------------

    def prepare(self, module: nn.Module | None, optimizers: Sequence[optim.Optimizer]) -> None:
        """Create engines that train `module` with `optimizers`. Earlier engines remain. Collective.

        Optimizers that do not share parameters get separate engines.
        """
        if module is not None:
            self._modules.append(module)
            self.make_alike(module)
        self._optimizers += [each for each in optimizers if any(each.param_groups)]
        modules = self._modules
        if self.sequences is not None and self._library == "Trainer":
            modules = [_inner(each) for each in modules]
        models = [part for each in modules for part in _models_of(each, self._optimizers)]
        if any(each not in models for each in self._models):
            self.engines.close()  # a second optimizer splits a model that had one engine
        self._models = models
        self.engines.form(models, self._optimizers)

    def make_alike(self, module: nn.Module) -> None:
        """Broadcast rank 0's values to the tensors in `module` that have no engine. Collective."""
        # A failed Trainer may still have an engine for this module, whose parameters are shards and
        # must not be changed.
        models = self._models + [model for each in trained_engines() for model in each.models]
        known = {id(t) for model in models for t in _tensors(model)}
        # Skip meta tensors: the engine broadcasts rank 0's values when it allocates them.
        left = [t for t in _tensors(module) if id(t) not in known and not t.is_meta]
        make_alike(left, self.world.collectives)

    def close(self) -> None:
        """Turn models and optimizers back into plain ones. Collective."""
        self.engines.close()
        self.engines.only = None
        self._modules, self._models, self._optimizers = [], [], []

    def replace_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load `states`, one plain optimizer state per optimizer, in order. Collective."""
        self.engines.forget()
        # Lightning has loaded the loss scale into the scaler, which engines read only when they are
        # created.
        if self.scaler is not None:
            self.engines.close()
            self.engines.form(self._models, self._optimizers)
        for optimizer, state in zip(self._optimizers, states, strict=True):
            self.load_optimizer_state(optimizer, state)

    # -- a step -----------------------------------------------------------------------------

    @contextmanager
    def more_to_come(self) -> Iterator[None]:
        """Declare that more backward passes of this step follow after the block.

        Only the step's last backward pass communicates.
        """
        self._more_to_come += 1
        try:
            yield
        finally:
            self._more_to_come -= 1

    def backward(self, loss: Tensor, *arguments: Any, **keywords: Any) -> None:
        """Run the backward pass of `loss` in every engine that it reaches.

        `keywords` may contain `retain_graph`. With exact means, they may also contain `same_items`,
        as in the engine's `backward`, and `weight`: the number of items over which the loss is
        averaged (default: the samples of the batch).
        """
        retain_graph = bool(keywords.pop("retain_graph", False))
        call, setting = f"{self._library}: backward", "the strategy's exact_mean=True"
        weight = items_of_loss(self.exact, keywords, call, setting)
        if arguments or keywords:
            named = next(iter(keywords), "a gradient")
            raise UsageError(
                f"{self._library}: backward(loss, {named}) is not supported: gradients go to all "
                "trained parameters that the loss reaches, exactly once. Leave it out."
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
        """Gather the full gradients of `optimizer` inside the block, to read or write.

        Collective.
        """
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
        """Clip the gradients of `optimizer` by their norm across all workers. Collective.

        Returns the norm before clipping.
        """
        optimizer = plain(optimizer)
        parameters = _parameters(optimizer)
        if self._are_whole:
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        self.engines.forget_cleared()
        if not self.engines.has_gradients(optimizer):
            return torch.zeros((), device=self.world.device)
        if not max_norm > 0:
            raise UsageError(
                f"Clipping to a norm of {max_norm} would update nothing: pass a norm above 0, or "
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
        """Clip every gradient element to [-clip_value, clip_value]. Collective.

        The full gradients are gathered first.
        """
        if self._are_whole:
            nn.utils.clip_grad_value_(_parameters(optimizer), clip_value)
            return
        with self.full_gradients(optimizer):
            nn.utils.clip_grad_value_(_parameters(optimizer), clip_value)

    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step `optimizer`, which may call `closure` several times. Collective."""
        if self._optimizers:
            self.engines.step(optimizer, closure)

    # -- full tensors -----------------------------------------------------------------------

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return a CPU copy of the full state_dict of `module`. Collective.

        If parameters are sharded, rank 0 gets it and the other ranks get an empty dict.
        """
        sharded = [e for e in self.engines if e.engine.settings.hides_parameters]
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
        """Gather all parameters inside the block, to read or write. Collective."""
        with ExitStack() as blocks:
            for each in self.engines:
                blocks.enter_context(each.engine.full_parameters(write=write))
            yield

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """Return the state_dict that `optimizer` would have in a single process. Collective."""
        trained = self.engines.of(optimizer)
        if trained is None:
            return optimizer.state_dict()
        return trained.engine.optimizer_state_dict(optimizer, for_resume=True)

    def load_optimizer_state(self, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load `state`, the state_dict of a plain optimizer, into `optimizer`. Collective."""
        trained = self.engines.of(optimizer)
        if trained is None:
            # Call the class's method, because FabricStrategy has replaced the object's method with
            # this one.
            type(optimizer).load_state_dict(optimizer, dict(state))
        else:
            trained.engine.load_optimizer_state_dict(state, optimizer)


def _inner(module: nn.Module) -> nn.Module:
    """Return the child that has all parameters of a LightningModule, or `module` itself.

    Tokens are exchanged in the forward pass of a model that returns logits, not in a training step
    that returns a loss.
    """
    held = {id(p) for p in module.parameters()}
    whole = (c for c in module.children() if {id(p) for p in c.parameters()} == held)
    return next(whole, module)


def _models_of(module: nn.Module, optimizers: Sequence[optim.Optimizer]) -> list[nn.Module]:
    """Return the parts of `module` that get separate engines.

    With one optimizer, or if optimizers share parameters, the only part is `module` itself.
    Otherwise the parts are the largest modules in which only one optimizer trains parameters.
    Raises UsageError if two optimizers train parameters of the same innermost module.
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
    """Yield the largest modules in `module` whose trained parameters are all in `part`.

    `part` and each set in `trained` contain one optimizer's parameter ids. `name` is the path of
    `module`, for messages.
    """
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
                "optimizer, but each optimizer steps separately. Put the parameters of each "
                "optimizer into separate modules (self.generator, self.discriminator)."
            )
    for key, child in module.named_children():
        yield from _modules(child, part, trained, f"{name}.{key}")


def plain(optimizer: Any) -> Any:
    """Return the script's own optimizer, which Lightning may have wrapped as `optimizer`."""
    return getattr(optimizer, "_optimizer", optimizer)


def _parameters(optimizer: optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
