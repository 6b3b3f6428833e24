"""Accelerate's Accelerator, whose models and optimizers are trained by engines."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator as Stock
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DynamoBackend,
    concatenate,
    extract_model_from_parallel,
    send_to_device,
)
from torch import Tensor, nn, optim

import shardwise as sw
from shardwise.accelerate import checkpoints, deepspeed_json, refusals
from shardwise.accelerate.clipping import Clipping
from shardwise.accelerate.exact_mean import ExactBatches
from shardwise.accelerate.optimizer import ShardedOptimizer
from shardwise.accelerate.pretrained import follow
from shardwise.bridging.joining import SETTINGS, join, joined
from shardwise.bridging.plain_gradients import plain_backward
from shardwise.bridging.trained import TrainedModels
from shardwise.bridging.trained_engine import LossItems
from shardwise.config import OF_THE_ENGINE
from shardwise.deepspeed.written_files import KeptBeside
from shardwise.engine.initial_values import make_alike
from shardwise.errors import UsageError
from shardwise.messages.other_libraries import hint

_PREPARED_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")

_PRECISION = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}


class Accelerator(Clipping, Stock):
    """Accelerate's own, over engines: ZeRO and offload by flags, environment, TOML or keywords.

    Takes what Accelerate's takes, and settings of Shardwise (`zero=3`, `offload_optimizer="cpu"`).
    `prepare` gives models back as they are, not wrapped. Losses are reduced as Accelerate does with
    DistributedDataParallel, and generators are the script's own. docs/from_accelerate.md says what
    differs.

    With `exact_mean=True` losses are means over samples that count once and alike: no division by
    the accumulation steps, no repeated samples, `backward(loss, weight=...)` for means over other
    items.

    Attributes: `world`, and `engines`, one for each set of models and optimizers that have
    parameters in common. Raises UsageError for plugins of other engines.
    """

    _optimizers: list[Any]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._settings = {n: keywords.pop(n) for n in SETTINGS & keywords.keys()}
        is_exact = bool(keywords.pop("exact_mean", False))
        given = _bound(arguments, keywords)
        self._json = deepspeed_json.taken_from(given)
        if self._json is not None:
            self._settings = self._json.settings | self._settings
        refusals.check_arguments(given)
        self._settings = refusals.settings_of(given.get("kwargs_handlers")) | self._settings
        if given.get("cpu") or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
            self._settings.setdefault("device", "cpu")
        self.world = join(self._settings, "shardwise.accelerate.Accelerator")
        if self.world.device.type == "cpu":
            given["cpu"] = True
        if self._json is not None:
            self._json.say(self.world)
        with deepspeed_json.without_switch():
            super().__init__(**given)
        refusals.check_arguments({"mixed_precision": self.mixed_precision})
        refusals.check_compiler(self.state.dynamo_plugin)
        refusals.refuse_local_steps(Accelerator)
        self._check_ranks()
        if self._json is not None:
            self._json.keep()
        self._trained = TrainedModels(self._make_engine)
        self._batches = ExactBatches(self.world, self._is_training) if is_exact else None
        self._more_to_come = 0
        self._are_whole = False
        """Whether parameters are whole now, for the user's hooks."""
        self._leaves_weights = False
        """Whether weights are the engines' to save: nobody needs them whole."""

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: who this one is. Nothing is prepared in a copy."""
        prepared = dict.fromkeys(_PREPARED_LISTS, ())
        is_exact = self._batches is not None
        return vars(self) | prepared | {"world": None, "_trained": None, "_batches": is_exact}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {name: list(state[name]) for name in _PREPARED_LISTS})
        # None in a process that has no rank, such as a DataLoader worker.
        self.world = joined()  # type: ignore[assignment]
        self._trained = TrainedModels(self._make_engine)
        self._batches = ExactBatches(self.world, self._is_training) if state["_batches"] else None

    def _check_ranks(self) -> None:
        if self.num_processes != self.world.size:
            PartialState._reset_state()
            AcceleratorState._reset_state()
            raise UsageError(
                f"Accelerate was set up for {self.num_processes} process(es) before this run of "
                f"{self.world.size} was joined, as by TrainingArguments or PartialState: call "
                "shardwise.accelerate.Accelerator, or shardwise.init(reseed=False), before."
            )

    @property
    def engines(self) -> list[sw.Engine]:
        """The engines, in the order in which their models came to be complete."""
        return [each.engine for each in self._trained]

    def is_trained(self, model: nn.Module) -> bool:
        """Whether an engine trains `model`, of this Accelerator or of another one."""
        return self._trained.of_model(model) is not None

    # -- what is prepared -------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers, as Accelerate does. Models come
        back as they are; an engine is made as soon as the models of an optimizer are there.
        Collective."""
        if self._json is not None:
            args = self._json.replaced(args, self)
        prepared = super().prepare(*args, device_placement=device_placement)
        self._trained.form(self._models, [each.optimizer for each in self._optimizers])
        if self._json is not None:
            self._trained.clip_always(self._json.max_norm)
        if self._trains_by_hand:  # nothing else gives all ranks rank 0's values
            for model in self._models:
                tensors = (t for t in [*model.parameters(), *model.buffers()] if not t.is_meta)
                make_alike(tensors, self.world.collectives)
        return prepared

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Place `model` on the device, in the precision asked for. `prepare` makes its engine."""
        del evaluation_mode  # nothing wraps it in either mode
        if self.is_trained(model):
            device_placement = False  # an engine has placed it, in parts maybe
        plugin = self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        try:
            return super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[no-any-return]
        finally:
            plugin.backend = backend

    def prepare_optimizer(
        self, optimizer: optim.Optimizer, device_placement: bool | None = None
    ) -> optim.Optimizer:
        """Give `optimizer` the face that a script expects. `prepare` makes its engine."""
        del device_placement  # its state is the engine's to place
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = ShardedOptimizer(optimizer, self._trained)
        elif isinstance(optimizer, ShardedOptimizer):
            optimizer.move_to(self._trained)  # where another Accelerator has prepared it
        if not any(optimizer is each for each in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; with `exact_mean` batches to train on have no repeated samples."""
        loader = super().prepare_data_loader(*args, **kwargs)
        return loader if self._batches is None else self._batches.watch(loader)

    def _is_training(self) -> bool:
        """Whether a batch that is given now is to train on."""
        models = (model for each in self._trained for model in each.models)
        return torch.is_grad_enabled() and any(model.training for model in models)

    def _make_engine(self, models: list[nn.Module], optimizers: list[optim.Optimizer]) -> sw.Engine:
        settings: dict[str, Any] = {}
        for model in models:  # the engine has the precision from now on
            extract_model_from_parallel(model, keep_fp32_wrapper=False)
            follow(model)
        if self.native_amp and self.mixed_precision in _PRECISION:
            settings["precision"] = _PRECISION[self.mixed_precision]
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            settings["compile"] = True
        settings |= {n: v for n, v in self._settings.items() if n in OF_THE_ENGINE}
        engine = sw.Engine(models, optimizers, scaler=self.scaler, **settings)
        engine.track(schedules_of_accelerate=KeptBeside())
        return engine

    # -- a step -----------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward of `loss`, divided by the accumulation steps, in every engine that it reaches.

        In a script that prepares no optimizer, gradients of prepared models are averaged instead,
        and are in `p.grad`. Collective then, in the last micro-batch of a step.

        Takes `retain_graph`; with `exact_mean`, where nothing is divided, also `weight`, the number
        of items that the loss is a mean over (default: the samples of the batch), and `same_items`
        as the engine's backward does. Raises UsageError for other arguments of torch's backward.
        """
        retain_graph = bool(kwargs.pop("retain_graph", False))
        weight = self._items_of(kwargs)
        if kwargs:
            raise UsageError(
                f"accelerator.backward(loss, {next(iter(kwargs))}=...): gradients go to all "
                "prepared parameters that the loss reaches, and once. Leave it out."
            )
        if weight is None:
            loss = loss / self.gradient_accumulation_steps
        last = self.sync_gradients and not self._more_to_come
        if self._trains_by_hand and weight is None:
            self.world.say_once(
                "no optimizer is prepared: each accelerator.backward averages the gradients of "
                "prepared models over the workers, as DistributedDataParallel does, and nothing "
                "is sharded"
            )
            loss = loss if self.scaler is None else self.scaler.scale(loss)
            keep = retain_graph
            plain_backward(loss, self._models, self.world, last=last, retain_graph=keep)
            return
        self._trained.backward(loss, last=last, retain_graph=retain_graph, weight=weight)

    def _items_of(self, kwargs: dict[str, Any]) -> LossItems | None:
        """What a loss is a mean over, with `exact_mean`; takes its words out of `kwargs`."""
        number, same = kwargs.pop("weight", None), kwargs.pop("same_items", None)
        if self._batches is None:
            if number is None and same is None:
                return None
            raise UsageError(
                "accelerator.backward(loss, weight=...) counts with Accelerator(exact_mean=True) "
                "alone: without it losses of the workers are averaged, whatever they are means of."
            )
        return self._batches.items(number, same)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Inside the block a backward is not the last one of its step, which saves communication
        and changes no result."""
        del model
        self._more_to_come += 1
        try:
            yield
        finally:
            self._more_to_come -= 1

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Batches are as many on every rank, in training: raises UsageError for other wishes."""
        del joinables
        even = self.even_batches if even_batches is None else even_batches
        if self.use_distributed and not even:
            raise refusals.uneven_batches()
        samplers: list[Any] = [getattr(each, "batch_sampler", None) for each in self._dataloaders]
        found = [(s, s.even_batches) for s in samplers if hasattr(s, "even_batches")]
        try:
            for sampler, _ in found:
                sampler.even_batches = even
            yield
        finally:
            for sampler, before in found:
                sampler.even_batches = before

    # -- whole weights ----------------------------------------------------------------------

    @contextmanager
    def uneven(self, model: nn.Module | None = None) -> Iterator[None]:
        """Inside the block ranks may run other numbers of forwards: `generate`, an evaluation on
        rank 0 alone. All ranks enter and leave.

        It is for the models that are trained here, and for `model`, whoever trains it now.
        """
        engines = self.engines
        if model is not None and (trained := self._trained.of_model(model)) is not None:
            engines = list(dict.fromkeys([*engines, trained.engine]))
        with ExitStack() as blocks:
            for engine in engines:
                blocks.enter_context(engine.uneven())
            yield

    @contextmanager
    def full_parameters(self, model: nn.Module, write: bool = False) -> Iterator[None]:
        """Inside the block the parameters of `model` are whole, to read or to write. Collective."""
        trained = self._trained.of_model(model)
        if trained is None:
            yield
            return
        with trained.engine.full_parameters(model, write=write):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state_dict of a prepared model, a copy: where its parameters are sharded, whole on
        rank 0 and empty on the others. Collective."""
        if self._leaves_weights:
            return {}
        trained = None if self._are_whole else self._trained.of_model(model)
        if trained is None:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        if not trained.engine.placement.is_sharded("parameters"):
            return checkpoints.copied(super().get_state_dict(model, unwrap))
        return trained.engine.model_state_dict(model)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As Accelerate's; with `exact_mean` also of batches to train on, whose last ones have
        other numbers of rows on the ranks."""
        last = None if self._batches is None else self._batches.last
        at_end = self.gradient_state.end_of_dataloader
        if last is None or not at_end or not self.world.any(last.is_cut):
            return super().gather_for_metrics(input_data, use_gather_object)
        mine = send_to_device(input_data, "cpu") if last.samples else None
        found = [each for each in self.world.gather(mine) if each is not None]
        if use_gather_object:
            return [value for each in found for value in each]
        return send_to_device(concatenate(found), self.device)

    # -- checkpoints and the end ------------------------------------------------------------

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Save all that is prepared and registered, as Accelerate does; weights and optimizers in
        the engine's format, which any placement and number of workers loads. Collective.

        Raises UsageError between micro-batches of a step.
        """
        if self.engines and not self.sync_gradients:
            raise UsageError(
                "accelerator.save_state() between micro-batches of a step would lose the gradients "
                "of those before it. Write before it: if accelerator.sync_gradients:"
            )
        if not safe_serialization:
            self.world.say_once("save_state writes safetensors, whatever safe_serialization says.")
        if self.world.settings.trial:
            return output_dir
        with self._hooks_see_whole(self._save_model_state_pre_hook, _drop_weights):
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        checkpoints.save(self.engines, Path(folder), self.world)
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Go on from what `save_state` has written, here or in stock Accelerate. Collective."""
        found: list[str] = []

        def take(models: list[nn.Module], folder: str) -> None:
            models.clear()
            found.append(folder)

        with self._hooks_see_whole(self._load_model_state_pre_hook, take, write=True):
            super().load_state(input_dir, load_kwargs, **kwargs)
        self.load_engines(found[0])

    def load_engines(self, folder: str, *, model_only: bool = False) -> None:
        """Load the weights in `folder`, which `save_state` has written, and unless `model_only` the
        state of the optimizers; nothing else. Collective."""
        checkpoints.load(list(self._trained), Path(folder), self.world, model_only=model_only)

    @contextmanager
    def _hooks_see_whole(self, hooks: Any, last: Any, write: bool = False) -> Iterator[None]:
        """Inside the block the user's `hooks` see whole weights, then `last` is called; optimizers
        are left out, which the engines save."""
        optimizers, self._optimizers = self._optimizers, []
        key = object()
        with ExitStack() as blocks:
            if hooks:
                for each in self._trained:
                    blocks.enter_context(each.engine.full_parameters(write=write))
            self._are_whole, self._leaves_weights = bool(hooks), not hooks
            hooks[key] = last
            try:
                yield
            finally:
                del hooks[key]
                self._are_whole = self._leaves_weights = False
                self._optimizers = optimizers

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader that leaves out the first batches, as Accelerate's.

        A loop over a DataLoader draws a seed as it begins. That is drawn from a copy of torch's
        generator here, so that what a resumed run draws next is what the first one drew.
        """
        loader = super().skip_first_batches(dataloader, num_batches)
        if self._batches is not None:
            self._batches.watch(loader)
        plain = getattr(loader, "base_dataloader", loader)
        if getattr(plain, "generator", None) is None:
            plain.generator = torch.Generator()
            plain.generator.set_state(torch.get_rng_state())
        return loader

    def free_memory(self, *objects: Any) -> Any:
        """Give models and optimizers back as plain ones, and forget them. Collective."""
        self._trained.close()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Finish the trackers. The process group is left when the process ends."""
        for tracker in self.trackers:
            tracker.finish()


def _drop_weights(models: list[nn.Module], weights: list[Any], folder: str) -> None:
    """The last hook before Accelerate writes weights: the engines do."""
    del models, folder
    weights.clear()


def _bound(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Accelerate's constructor by name. Raises TypeError as that does."""
    signature = inspect.signature(Stock.__init__)
    for name in keywords.keys() - signature.parameters.keys():
        if sentence := hint(name):
            raise TypeError(f"Accelerator takes no {name}. {sentence}")
    given = dict(signature.bind(None, *arguments, **keywords).arguments)
    given.pop("self")
    return given
