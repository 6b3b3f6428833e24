"""Implements Accelerate's Accelerator with engines that train its models and optimizers."""

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
    recursively_apply,
    send_to_device,
)
from torch import Tensor, nn, optim
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.accelerate import checkpoints, deepspeed_plugin, refusals, sequence_parts
from shardwise.accelerate.clipping import Clipping
from shardwise.accelerate.optimizer import ShardedOptimizer
from shardwise.accelerate.pretrained import follow
from shardwise.accelerate.repeated_samples import PreparedBatches
from shardwise.bridging.deepspeed_json import settings_of
from shardwise.bridging.exact_mean import items_of_loss
from shardwise.bridging.joining import SETTINGS, join, joined
from shardwise.bridging.plain_gradients import plain_backward
from shardwise.bridging.sequence_batches import SequenceBatches
from shardwise.bridging.trained_engine import LossItems
from shardwise.bridging.trained_models import TrainedModels
from shardwise.bridging.written_files import SchedulesFile, copied_state
from shardwise.config import OF_THE_ENGINE
from shardwise.engine.initial_values import make_alike
from shardwise.errors import UsageError
from shardwise.messages.other_libraries import hint

_PREPARED_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")

_PRECISION = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}


class Accelerator(Clipping, Stock):
    """Accelerate's Accelerator on Shardwise engines.

    ZeRO and offload are set by flags, environment variables or keyword arguments. `prepare` returns
    models unwrapped. Losses are averaged as in Accelerate with DistributedDataParallel, and the
    script seeds its own generators. docs/from_accelerate.md lists the differences.

    Args:
        *arguments: Arguments of Accelerate's Accelerator, by position or by keyword.
        exact_mean: Count each sample of a step once (default: False). Repeated samples are dropped,
            losses are not divided by the number of accumulation steps, and `backward(loss,
            weight=...)` accepts means over other items.
        **keywords: Shardwise settings, such as `zero=3` or `offload_optimizer="cpu"`.

    Attributes:
        world: The run that this process has joined.
        engines: One engine for each set of models and optimizers that share parameters.
        sequences: Splits sequences, with `--context`.

    Raises:
        UsageError: If a plugin selects another engine.

    Example:
        ```python
        from shardwise.accelerate import Accelerator

        accelerator = Accelerator(zero=3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            accelerator.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        ```
    """

    _optimizers: list[Any]
    _splits_on_read = True
    """True to split sequences in prepared loaders. A Trainer splits them later."""
    _shares_samples = False
    """True while a loader is prepared whose samples a context group shares."""
    _counts_once = False
    """True while rows are gathered that are equal on the ranks of a context group."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._settings = {n: keywords.pop(n) for n in SETTINGS & keywords.keys()}
        is_exact = bool(keywords.pop("exact_mean", False))
        stock_arguments = _bind_arguments(arguments, keywords)
        self._json = deepspeed_plugin.pop_json(stock_arguments)
        if self._json is not None:
            self._settings = settings_of(self._json.job) | self._settings
        refusals.check_arguments(stock_arguments)
        self._settings = (
            refusals.settings_of(stock_arguments.get("kwargs_handlers")) | self._settings
        )
        if stock_arguments.get("cpu") or os.environ.get("ACCELERATE_USE_CPU", "").lower() in (
            "1",
            "true",
        ):
            self._settings.setdefault("device", "cpu")
        self.world = join(self._settings, "shardwise.accelerate.Accelerator", splits_sequences=True)
        if self.world.device.type == "cpu":
            stock_arguments["cpu"] = True
        if self._json is not None:
            self._json.say(self.world)
        with deepspeed_plugin.without_deepspeed_variable():
            super().__init__(**stock_arguments)
        # Check again, because Accelerate may have read the precision from an environment variable.
        refusals.check_arguments({"mixed_precision": self.mixed_precision})
        refusals.check_compiler(self.state.dynamo_plugin)
        refusals.refuse_local_steps(Accelerator)
        self._check_ranks()
        if self._json is not None:
            self._json.keep()
        self._trained = TrainedModels(self._make_engine)
        self.sequences = self._split_sequences()
        self._batches = self._counted_batches(is_exact)
        self._more_to_come = 0
        self._are_whole = False
        """True while parameters are gathered because the user's hooks are running."""
        self._leaves_weights = False
        """True while the engines save the weights, so that no state_dict needs to contain them."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle, without the prepared objects."""
        prepared = dict.fromkeys(_PREPARED_LISTS, ())
        is_exact = self._batches is not None
        return (
            vars(self)
            | prepared
            | {"world": None, "_trained": None, "sequences": None, "_batches": is_exact}
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {name: list(state[name]) for name in _PREPARED_LISTS})
        # None in a process without a rank, such as a DataLoader worker.
        self.world = joined()  # type: ignore[assignment]
        self._trained = TrainedModels(self._make_engine)
        self.sequences = self._split_sequences()
        self._batches = self._counted_batches(state["_batches"])

    def _split_sequences(self) -> SequenceBatches | None:
        """Return what splits batches with `--context`, or None."""
        is_split = self.world is not None and self.world.context_size > 1
        return SequenceBatches(self.world, "the prepared loader") if is_split else None

    def _counted_batches(self, is_exact: bool) -> PreparedBatches | None:
        # A mean of means would be wrong, because parts have different numbers of tokens.
        sequences = self.sequences if self._splits_on_read else None
        if not is_exact and sequences is None:
            return None
        return PreparedBatches(self.world, self._is_training, sequences)

    def _check_ranks(self) -> None:
        if self.num_processes != self.world.size:
            # Reset them, so that a second attempt, for example in a notebook, starts from a clean
            # state.
            PartialState._reset_state()
            AcceleratorState._reset_state()
            raise UsageError(
                f"Accelerate was set up for {self.num_processes} process(es) before this process "
                f"joined its run of {self.world.size}, for example by TrainingArguments or "
                "PartialState. Call shardwise.accelerate.Accelerator or "
                "shardwise.init(reseed=False) first."
            )

    @property
    def engines(self) -> list[sw.Engine]:
        """The engines, oldest first."""
        return [each.engine for each in self._trained]

    @property
    def num_processes(self) -> int:
        """Number of ranks or, for a loader with `--context`, of groups with other samples."""
        # Scripts scale losses with the number of ranks.
        if self._shares_samples:
            return self.world.data_size
        return int(super().num_processes)

    @property
    def process_index(self) -> int:
        """The rank or, for a loader with `--context`, the index of its group."""
        return self.world.data_rank if self._shares_samples else int(super().process_index)

    def is_trained(self, model: nn.Module) -> bool:
        """Return whether an engine of this or another Accelerator trains `model`."""
        return self._trained.of_model(model) is not None

    # -- preparation --------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers, as Accelerate does. Collective.

        Models are not wrapped. An optimizer's engine is created once all of its models are
        prepared.

        Args:
            *args: The objects, in any order.
            device_placement: Whether to move each object to the device, one entry per object.

        Returns:
            The prepared objects, in the same order. A single object is returned without a tuple.
        """
        if self._json is not None:
            args = self._json.replace_dummies(args, self)
        prepared = super().prepare(*args, device_placement=device_placement)
        self._trained.form(self._models, [each.optimizer for each in self._optimizers])
        if self._json is not None:
            self._trained.clip_always(self._json.job.clipping)
        if self._trains_by_hand:  # nothing else copies rank 0's values to all ranks
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
        """Move `model` to the device.

        `prepare` later creates its engine, which sets the precision.
        """
        del evaluation_mode  # a model is not wrapped in either mode
        if self.is_trained(model):
            device_placement = False  # its engine has already placed it, perhaps sharded
        # Set no backend here. Otherwise Accelerate would compile the full model, but engines
        # compile their units.
        plugin = self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        try:
            return super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[no-any-return]
        finally:
            plugin.backend = backend

    def prepare_optimizer(
        self, optimizer: optim.Optimizer, device_placement: bool | None = None
    ) -> optim.Optimizer:
        """Wrap `optimizer` for the script. `prepare` later creates its engine."""
        del device_placement  # the engine places its state
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = ShardedOptimizer(optimizer, self._trained)
        elif isinstance(optimizer, ShardedOptimizer):
            optimizer.move_to(self._trained)  # another Accelerator may have prepared it
        if not any(optimizer is each for each in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader. With `exact_mean`, its training batches contain no repeated samples.

        With `--context`, the ranks of a context group read the same samples.
        """
        if self.sequences is None:
            loader = super().prepare_data_loader(*args, **kwargs)
        else:
            given = args[0] if args else kwargs["data_loader"]
            sequence_parts.check_loader(given, self.dispatch_batches, self.world)
            self._shares_samples = True
            try:
                loader = super().prepare_data_loader(*args, **kwargs)
            finally:
                self._shares_samples = False
            sequence_parts.synchronise_order(loader, self.world)
        return loader if self._batches is None else self._batches.watch(loader)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler. With `--context`, it advances once per context group."""
        prepared = super().prepare_scheduler(scheduler)
        if self.sequences is not None:
            prepared.__class__ = sequence_parts.GroupScheduler
            prepared.groups = self.world.data_size
            sequence_parts.say_length(prepared, self.world)
        return prepared

    def _is_training(self) -> bool:
        """Return whether the next batch is a training batch rather than an evaluation batch."""
        models = (model for each in self._trained for model in each.models)
        return torch.is_grad_enabled() and any(model.training for model in models)

    def _make_engine(self, models: list[nn.Module], optimizers: list[optim.Optimizer]) -> sw.Engine:
        settings: dict[str, Any] = {}
        for model in models:  # the engine casts and autocasts in place of Accelerate
            extract_model_from_parallel(model, keep_fp32_wrapper=False)
            follow(model)
        if self.native_amp and self.mixed_precision in _PRECISION:
            settings["precision"] = _PRECISION[self.mixed_precision]
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            settings["compile"] = True
        settings |= {n: v for n, v in self._settings.items() if n in OF_THE_ENGINE}
        engine = sw.Engine(models, optimizers, scaler=self.scaler, **settings)
        engine.track(schedules_of_accelerate=SchedulesFile())
        return engine

    # -- a step -----------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass of `loss` in all engines that it reaches.

        The loss is divided by the number of accumulation steps. Without a prepared optimizer, the
        gradients of prepared models are averaged into `p.grad` instead. The call is then collective
        in the last micro-batch of a step.

        Args:
            loss: Scalar tensor: the mean over this rank's micro-batch.
            retain_graph: As in `torch.Tensor.backward`.
            weight: With `exact_mean`, the number of items over which the loss is averaged (default:
                the samples of the batch). The loss is then not divided by the accumulation steps.
            same_items: With `exact_mean`, as in the engine's `backward`.

        Raises:
            UsageError: For other arguments of torch's backward.
        """
        retain_graph = bool(kwargs.pop("retain_graph", False))
        weight = self._items_of(kwargs)
        if kwargs:
            raise UsageError(
                f"accelerator.backward(loss, {next(iter(kwargs))}=...) is not supported: every "
                "prepared parameter that the loss reaches gets its gradient exactly once. Leave "
                "the argument out."
            )
        if weight is None:
            loss = loss / self.gradient_accumulation_steps
        last = self.sync_gradients and not self._more_to_come
        if self._trains_by_hand and weight is None:
            self.world.say_once(
                "no optimizer is prepared, so nothing is sharded: each accelerator.backward "
                "averages the gradients of prepared models over the workers, as "
                "DistributedDataParallel does"
            )
            loss = loss if self.scaler is None else self.scaler.scale(loss)
            keep = retain_graph
            plain_backward(loss, self._models, self.world, last=last, retain_graph=keep)
            return
        self._trained.backward(loss, last=last, retain_graph=retain_graph, weight=weight)

    def _items_of(self, kwargs: dict[str, Any]) -> LossItems | None:
        """Pop `weight` and `same_items` from `kwargs`, and return the items of the loss.

        Returns None without `exact_mean`.
        """
        setting = "Accelerator(exact_mean=True)"
        return items_of_loss(self._batches, kwargs, "accelerator.backward", setting)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Declare that more backward passes of this step follow after the block.

        Only the step's last backward pass communicates.
        """
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
        """Set `even_batches` inside the block. Raises UsageError if batches would be uneven."""
        del joinables
        even = self.even_batches if even_batches is None else even_batches
        if self.use_distributed and not even:
            raise UsageError(
                "join_uneven_inputs with even_batches=False is not supported: a worker without a "
                "batch could not take part in the backward passes of the others. Leave "
                "even_batches on, which repeats samples; or use a shardwise.Loader, which gives "
                "such a worker a sample of weight 0."
            )
        samplers: list[Any] = [getattr(each, "batch_sampler", None) for each in self._dataloaders]
        found = [(s, s.even_batches) for s in samplers if hasattr(s, "even_batches")]
        try:
            for sampler, _ in found:
                sampler.even_batches = even
            yield
        finally:
            for sampler, before in found:
                sampler.even_batches = before

    # -- full weights -----------------------------------------------------------------------

    @contextmanager
    def uneven(self, model: nn.Module | None = None) -> Iterator[None]:
        """Allow ranks to run different numbers of forward passes inside the block. Collective.

        Use it for `generate`, or to evaluate only on rank 0. All ranks must enter and exit the
        block. It applies to all models of this Accelerator and to `model`.
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
        """Gather the full parameters of `model` inside the block, to read or write. Collective."""
        trained = self._trained.of_model(model)
        if trained is None:
            yield
            return
        with trained.engine.full_parameters(model, write=write):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a copy of the full state_dict of a prepared model. Collective.

        If parameters are sharded, rank 0 gets the state_dict and the other ranks get an empty dict.
        """
        if self._leaves_weights:
            return {}
        trained = None if self._are_whole else self._trained.of_model(model)
        if trained is None:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        if not trained.engine.settings.hides_parameters:
            return copied_state(super().get_state_dict(model, unwrap))
        return trained.engine.model_state_dict(model)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather values from all ranks without repeated samples, as Accelerate does. Collective.

        With `exact_mean`, it also accepts values from training batches. Ranks may have different
        numbers of rows in the last batch.

        With `--context`, values per token (rows, length, ...) are joined to full sequences. Other
        values must be equal on all ranks of a context group, and are counted once.
        """
        if self.sequences is not None:
            return self._gather_parts(input_data, use_gather_object)
        return self._gather_rows(input_data, use_gather_object)

    def _gather_rows(self, input_data: Any, use_gather_object: bool) -> Any:
        last = None if self._batches is None else self._batches.last
        at_end = self.gradient_state.end_of_dataloader
        if last is None or not at_end or not self.world.any(last.is_cut):
            return super().gather_for_metrics(input_data, use_gather_object)
        mine = send_to_device(input_data, "cpu") if last.samples else None
        all_ranks = self.world.gather(mine)
        ranks = all_ranks[:: self.world.context_size] if self._counts_once else all_ranks
        found = [each for each in ranks if each is not None]
        if use_gather_object:
            return [value for each in found for value in each]
        return send_to_device(concatenate(found), self.device)

    def _gather_parts(self, values: Any, use_gather_object: bool) -> Any:
        leaves = pytree.tree_leaves(values)
        # For other leaves, Accelerate would gather objects, of every worker of a group.
        if use_gather_object or not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise UsageError(
                f"gather_for_metrics of objects is not supported with --context "
                f"{self.world.context_size}, because objects cannot be joined. Pass tensors."
            )
        assert self.sequences is not None
        values = self.sequences.whole(values, "gather_for_metrics")
        self.sequences.check_equal(values, "gather_for_metrics")
        self._counts_once = True
        try:
            return self._gather_rows(values, use_gather_object=False)
        finally:
            self._counts_once = False

    def gather(self, tensor: Any) -> Any:
        """Gather a tensor of all ranks, as Accelerate does. Collective."""
        found = super().gather(tensor)
        if not self._counts_once:
            self._say_unweighted("accelerator.gather returns the values of every worker")
            return found
        world = self.world
        return recursively_apply(lambda rows: sequence_parts.counted_once(rows, world), found)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors across all ranks, as Accelerate does. Collective."""
        if reduction == "mean":
            self._say_unweighted('accelerator.reduce(..., "mean") averages over workers')
        return super().reduce(tensor, reduction, scale)

    def _say_unweighted(self, what: str) -> None:
        """Say that a mean of the workers' losses is not the mean over labels (`--context`)."""
        if self.sequences is not None and self._splits_on_read:
            self.world.say_once(
                f"{what}, whose parts of the same sequences have different numbers of labels "
                f"(--context {self.world.context_size}). For a mean loss, add up torch.where(n > "
                '0, loss * n, 0) and the number of labels n with accelerator.reduce(..., "sum"), '
                "and divide."
            )

    def pad_across_processes(self, tensor: Any, dim: int = 0, **options: Any) -> Any:
        """Pad tensors to the same size, as Accelerate does. Collective.

        With `--context` and `dim` 1, parts of sequences are first joined to full sequences.
        """
        if dim == 1 and self.sequences is not None and self._splits_on_read:
            tensor = self.sequences.whole(tensor, "pad_across_processes")
        return super().pad_across_processes(tensor, dim=dim, **options)

    # -- checkpoints and shutdown -----------------------------------------------------------

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Save all prepared and registered objects, as Accelerate does. Collective.

        Weights and optimizer states are saved in the engine's format, which can be loaded at any
        placement and world size.

        Returns:
            The folder of the save.

        Raises:
            UsageError: If called between micro-batches of a step.
        """
        if self.engines and not self.sync_gradients:
            raise UsageError(
                "accelerator.save_state() between micro-batches of a step would lose the "
                "gradients of the earlier ones. Call it only if accelerator.sync_gradients."
            )
        if not safe_serialization:
            self.world.say_once(
                "save_state always writes safetensors: safe_serialization=False is ignored."
            )
        if self.world.settings.trial:
            return output_dir

        def drop(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            weights.clear()  # the engines write them

        with self._hooks_see_whole(self._save_model_state_pre_hook, drop):
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        checkpoints.save(self.engines, Path(folder), self.world)
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load a `save_state` folder of this class or of stock Accelerate. Collective."""
        found: list[str] = []

        def take(models: list[nn.Module], folder: str) -> None:
            models.clear()
            found.append(folder)

        with self._hooks_see_whole(self._load_model_state_pre_hook, take, write=True):
            super().load_state(input_dir, load_kwargs, **kwargs)
        self.load_engines(found[0])

    def load_engines(self, folder: str, *, model_only: bool = False) -> None:
        """Load weights and optimizer states from a `save_state` folder. Collective.

        If `model_only` is true, only the weights are loaded.
        """
        checkpoints.load(list(self._trained), Path(folder), self.world, model_only=model_only)

    @contextmanager
    def _hooks_see_whole(self, hooks: Any, last: Any, write: bool = False) -> Iterator[None]:
        """Gather full weights inside the block if there are `hooks`, and append the hook `last`."""
        # Hide the optimizers. Otherwise Accelerate would save them too, although the engines save
        # them.
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
        """Return a loader that skips the first batches, as Accelerate does."""
        loader = super().skip_first_batches(dataloader, num_batches)
        if self._batches is not None:
            self._batches.watch(loader)
        # A loop over a DataLoader draws a seed when it begins, and the run that saved has already
        # drawn it. So draw it from a copy of torch's generator, which leaves the generator itself
        # in the same state as in that run.
        plain = getattr(loader, "base_dataloader", loader)
        if getattr(plain, "generator", None) is None:
            plain.generator = torch.Generator()
            plain.generator.set_state(torch.get_rng_state())
        return loader

    def free_memory(self, *objects: Any) -> Any:
        """Turn models and optimizers back into plain ones, and drop all references to them.

        Collective.
        """
        self._trained.close()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Finish the trackers. The process group stays open until the process exits."""
        for tracker in self.trackers:
            tracker.finish()


def _bind_arguments(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Bind the arguments as Accelerate's constructor does, and return them by name."""
    signature = inspect.signature(Stock.__init__)
    for name in keywords.keys() - signature.parameters.keys():
        if sentence := hint(name):
            raise TypeError(f"Accelerator takes no {name}. {sentence}")
    stock_arguments = dict(signature.bind(None, *arguments, **keywords).arguments)
    stock_arguments.pop("self")
    return stock_arguments
