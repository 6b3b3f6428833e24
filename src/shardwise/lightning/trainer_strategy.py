"""Strategy for Lightning's Trainer: setup, training step, full states and teardown."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn, optim

import shardwise as sw
from shardwise.bridging.exact_mean import ItemsOf
from shardwise.errors import UsageError
from shardwise.lightning.empty_modules import casting, give_memory
from shardwise.lightning.environment import Environment, check_devices
from shardwise.lightning.sharing import LightningShare, count_once, share_in_order
from shardwise.lightning.training import StrategyTraining, plain

_ELSEWHERE = ("DeepSpeed", "FSDP", "XLA", "TransformerEngine", "Bitsandbytes")
"""Name prefixes of precision plugins that convert a model for another engine."""

_WITH_GRADIENTS = ("on_before_optimizer_step", "configure_gradient_clipping")
"""Hooks that may read or change gradients. They get full gradients."""

MODEL_PARALLEL = ("ModelParallel", "model_parallel")
"""Name prefixes of strategies that assign a device mesh to a module."""


class OverEngines:
    """Mixin that precedes Lightning's DDPStrategy and makes it train with engines.

    The result is the same as with DistributedDataParallel. docs/from_lightning.md lists the
    differences.

    Args:
        accelerator, checkpoint_io, precision_plugin: As in Lightning's other strategies.
        exact_mean: If True, every sample of a step counts once, as if a single process had the full
            batch. It may also be a function that returns the number of items in a batch. Default:
            False.
        **settings: Shardwise settings, such as `zero=3` or `offload_optimizer="cpu"`.

    Raises:
        UsageError: If an argument is not a Shardwise setting.
    """

    library = "Trainer"
    hooks: Any
    """The Precision, LightningModule and Callback classes of the strategy's class tree."""

    _accelerator: Any
    _launcher: Any
    _layer_sync: Any
    _num_nodes: int
    _precision_plugin: Any
    lightning_module: Any
    model: Any
    optimizers: list[optim.Optimizer]

    def __init__(
        self,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        exact_mean: bool | ItemsOf = False,
        **settings: Any,
    ) -> None:
        self.training = StrategyTraining(settings, self.library, exact_mean)
        self._devices: list[torch.device] | None = None
        self._failed = False
        super().__init__(  # type: ignore[call-arg]
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            **{self._precision_keyword: precision_plugin},
        )

    _precision_keyword = "precision_plugin"
    replaces = ""
    """Name of the script's strategy, with --adopt."""
    states_on_rank_0 = False
    """True if the script's strategy, such as FSDPStrategy, returns full states on rank 0 only."""

    # -- rank and device --------------------------------------------------------------------

    @property
    def accelerator(self) -> Any:
        """Lightning's accelerator. Setting it joins the run on its device."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.training.join(type(accelerator).__name__)
        self.cluster_environment = Environment(self.training.world)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices that the script requests or, after the launch, the device of this rank."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = devices

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self.training.world.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """The arguments for Lightning's samplers, or None if there is only one rank."""
        world = self.training.world
        if world.size == 1:
            return None
        return {"num_replicas": LightningShare(world.data_size), "rank": world.data_rank}

    @property
    def device_mesh(self) -> Any:
        """Raises NoDeviceMesh, because only ModelParallelStrategy has a mesh."""
        refuse_mesh("strategy.device_mesh")

    def _configure_launcher(self) -> None:
        """Leave the launcher unset, because the ranks are already running."""
        self._launcher = None
        asked = len(self._devices or ()) or 1
        check_devices(self.training.world, asked, self._num_nodes, self.library)
        self._devices = [self.root_device]

    def setup_distributed(self) -> None:
        """Set the rank for Lightning's printing and warnings. The process group already exists."""
        self.set_world_ranks()  # type: ignore[attr-defined]


class TrainerStrategy(OverEngines):
    """The strategy of `Trainer(strategy="shardwise")`.

    For its arguments, see `OverEngines`.

    Example:
        ```python
        import lightning as L
        from shardwise.lightning import ShardwiseStrategy

        trainer = L.Trainer(strategy=ShardwiseStrategy(zero=3), max_epochs=2)
        trainer.fit(module, loader)
        ```
    """

    @property
    def precision_plugin(self) -> Any:
        """Lightning's plugin, which casts and autocasts.

        The engine, not the plugin, clips gradients and scales the loss.
        """
        return self._precision_plugin if self._precision_plugin is not None else self.hooks[0]()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = plugin
        if plugin is None:
            return
        refuse_precision(plugin)
        self.training.scaler = getattr(plugin, "scaler", None)
        plugin.clip_grad_by_norm = self.training.clip_norm
        plugin.clip_grad_by_value = self.training.clip_value

    # -- setup and teardown -----------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create models inside the block on this rank's device.

        With `empty_init`, parameters that will be sharded are allocated later. They then get the
        same values as in a plain build, and are never left uninitialised.
        """
        with super().tensor_init_context(empty_init=False):  # type: ignore[misc]
            if empty_init and self.training.shards_parameters:
                with sw.on_meta():
                    yield
            else:
                yield

    def setup_environment(self) -> None:
        """Prepare the loaders' samplers, before the script's `setup` hooks run."""
        super().setup_environment()  # type: ignore[misc]
        if self.replaces.startswith(MODEL_PARALLEL):
            self.lightning_module._device_mesh = RefusedMesh()
        share_in_order(self.lightning_module.trainer._data_connector, self.training.world.size)

    def setup(self, trainer: Any) -> None:
        """Move the model to the device, and create optimizers and their engines. Collective."""
        # After a failure, `teardown` could not close the engines, because closing is collective.
        if self._failed:
            self.training.close()
        self._failed = False
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        if not fitting:  # when fitting, the engine allocates the model part by part
            give_memory(self.model)
        with casting(self.model):
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()  # type: ignore[attr-defined]
        if not fitting:
            self.setup_precision_plugin()  # type: ignore[attr-defined]
            self.training.make_alike(self.model)
            return
        self.setup_optimizers(trainer)  # type: ignore[attr-defined]
        self.setup_precision_plugin()  # type: ignore[attr-defined]
        self.training.prepare(self.model, self.optimizers)
        if len(self.optimizers) > 1:
            # Lightning's own toggle clears requires_grad on all other parameters, which would
            # change the layout of the states each time. Instead, an engine ignores the loss.
            engines = self.training.engines
            own = vars(self.lightning_module)
            own["toggle_optimizer"] = lambda optimizer: setattr(engines, "only", plain(optimizer))
            own["untoggle_optimizer"] = lambda optimizer: setattr(engines, "only", None)
        if self.training.sequences is not None:
            vars(self.lightning_module)["log"] = log_per_token(self.lightning_module)

    def teardown(self) -> None:
        """Turn the model and its optimizers back into plain ones, on the CPU.

        Collective, unless this rank has failed: a failed rank does not wait for the others.
        """
        if self.lightning_module is not None:
            for name in ("toggle_optimizer", "untoggle_optimizer", "log"):
                vars(self.lightning_module).pop(name, None)
        if self._failed and self.training.world.size > 1:
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            return
        self.training.close()
        super().teardown()  # type: ignore[misc]

    def on_exception(self, exception: BaseException) -> None:
        """Record that this rank has failed, so that `teardown` does not wait for others."""
        del exception
        self._failed = True

    # -- a step -----------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Declare that more backward passes of this step follow after the block."""
        with self.training.more_to_come():
            yield

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass in the engines, between Lightning's hooks."""
        plugin, module = self.precision_plugin, self.lightning_module
        if self.training.exact is not None and module.automatic_optimization:
            # Undo Lightning's division of the loss, because the weights divide by the items of the
            # step.
            closure_loss = closure_loss * module.trainer.accumulate_grad_batches
        # Call the methods of the base class Precision, because the mixed-precision plugin would
        # scale the loss, which the engine already does.
        loss: Any = self.hooks[0].pre_backward(plugin, closure_loss, module)
        # LightningModule.backward, or a method that overrides it, calls this.
        loss.backward = lambda *a, **k: self.training.backward(loss, *a, **k)
        try:
            plugin_backward = self.hooks[0].backward
            plugin_backward(plugin, loss, module, optimizer, *args, **kwargs)
        finally:
            del loss.backward
        return plugin.post_backward(loss, module)  # type: ignore[no-any-return]

    def optimizer_step(
        self,
        optimizer: optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run `closure`, call the hooks, clip gradients, and step `optimizer`. Collective."""
        if kwargs:
            raise UsageError(
                f"{type(optimizer).__name__}.step({next(iter(kwargs))}=...) is not supported: the "
                "engine calls step without other arguments. Leave it out."
            )
        module = model or self.lightning_module
        if isinstance(optimizer, optim.LBFGS):
            return self._step_by_closure(optimizer, closure, module)
        result = closure()
        with self._gradients_for_hooks(optimizer, module):
            self.hooks[0]._after_closure(self.precision_plugin, module, optimizer)
        self.training.step(optimizer)
        return result

    def _step_by_closure(
        self, optimizer: optim.Optimizer, closure: Callable[[], Any], module: Any
    ) -> Any:
        """Step an optimizer that calls `closure` several times. Return the first loss."""
        if module.trainer.gradient_clip_val:
            raise UsageError(
                "gradient_clip_val cannot be combined with LBFGS, which computes gradients several "
                "times per step: leave it out."
            )
        results: list[Any] = []

        def computed() -> Any:
            results.append(closure())
            return results[-1]

        self.training.step(optimizer, computed)
        return results[0] if results else None

    def _gradients_for_hooks(
        self, optimizer: optim.Optimizer, module: Any
    ) -> AbstractContextManager[None]:
        """Return a context manager that gathers full gradients if hooks may read them."""
        _, base, callback = self.hooks
        for name in _WITH_GRADIENTS:
            if name in vars(module) or getattr(type(module), name) is not getattr(base, name):
                return self.training.full_gradients(optimizer)
        stock = callback.on_before_optimizer_step
        for each in module.trainer.callbacks:
            if type(each).on_before_optimizer_step is not stock:
                return self.training.full_gradients(optimizer)
        return nullcontext()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step` as its forward method."""
        return self._inside("train", "training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step` as its forward method."""
        return self._inside("val", "validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step` as its forward method."""
        return self._inside("test", "test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step` as its forward method."""
        return self._inside("predict", "predict_step", *args, **kwargs)

    def _inside(self, kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
        module: nn.Module = self.lightning_module
        method = getattr(module, name)
        trained = self.training.engines.of_model(module)
        training = kind == "train"
        if args:
            args = (self.training.part_of(args[0], training=training), *args[1:])
        elif kwargs:
            first = next(iter(kwargs))
            kwargs[first] = self.training.part_of(kwargs[first], training=training)
        with getattr(self.precision_plugin, f"{kind}_step_context")():
            # With manual optimization, training_step itself calls backward and step, which must not
            # happen inside a forward pass. With --context, tokens are exchanged in the forward pass
            # of a model that returns logits, not in a step that returns a loss.
            by_hand = training and not self.lightning_module.automatic_optimization
            by_hand = by_hand or self.training.sequences is not None
            if by_hand or trained is None or module not in trained.models:
                return method(*args, **kwargs)
            return _inside_forward(module, method, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return `tensor` reduced across all ranks. Collective."""
        # Lightning divides by the mean number of samples per rank, which may be fractional. Over
        # Gloo, Lightning's mean of integers would be truncated, so take the mean of doubles.
        stock = super().reduce  # type: ignore[misc]
        means = str(reduce_op).lower() in ("mean", "avg")
        if not means or not isinstance(tensor, Tensor) or tensor.is_floating_point():
            return stock(tensor, group, reduce_op)
        return stock(tensor.double(), group, reduce_op).to(torch.get_default_dtype())

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader for `dataloader`.

        Evaluation batches contain no repeated samples. If means are exact, neither do training
        batches.
        """
        trainer = self.lightning_module.trainer
        stage = str(getattr(trainer.state.stage, "value", ""))
        if stage == "train" and self.training.exact is not None:
            return self.training.exact.watch(dataloader)
        return count_once(dataloader) if stage in _EVALUATIONS else dataloader

    # -- full states ------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's full state_dict. Collective.

        If parameters are sharded, rank 0 gets it and the other ranks get an empty dict.
        """
        return self._on_its_ranks(self.training.state_dict(self.lightning_module))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights from `checkpoint` into the module. Collective."""
        self.training.load_state_dict(
            self.lightning_module, checkpoint["state_dict"], strict=strict
        )

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the full state of `optimizer`, as a single process would have it. Collective.

        If the script's strategy is FSDPStrategy, ranks other than 0 get an empty dict, as from it.
        """
        return self._on_its_ranks(self.training.optimizer_state(plain(optimizer)))

    def _on_its_ranks(self, state: dict[str, Any]) -> dict[str, Any]:
        return {} if self.states_on_rank_0 and not self.training.world.is_main else state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states in `checkpoint`, saved at any world size. Collective."""
        self.training.replace_optimizer_states(checkpoint["optimizer_states"])


_EVALUATIONS = ("validate", "sanity_check", "test")


def log_per_token(module: Any) -> Callable[..., None]:
    """Return `module.log` that weights means by the number of tokens.

    It raises UsageError if this number is unknown.
    """
    log = module.log
    signature = inspect.signature(log)

    def weighted(value: Tensor, items: Any, group: Any, *, at_once: bool) -> Tensor:
        """Return `value`, or 0 without items. If `at_once`, return the mean over the workers."""
        # A part without labels has a loss of NaN, which would make the mean over the epoch NaN.
        value = value.detach() if value.is_floating_point() else value.float()
        count = torch.as_tensor(items, dtype=torch.float64, device=value.device).expand_as(value)
        part = torch.where(count > 0, value.double(), 0.0)
        if not at_once:
            return part.to(value.dtype)
        # Lightning's mean over the workers of a step ignores batch_size.
        sums = module.trainer.strategy.reduce(torch.stack([part * count, count]), group, "sum")
        mean: Tensor = sums[0] / sums[1].clamp(min=1)
        return mean.to(value.dtype)

    @wraps(log)
    def checked(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(name, value, *args, **kwargs).arguments
        items, on_step = given.get("batch_size"), given.get("on_step")
        is_mean = given.get("reduce_fx", "mean") in ("mean", "avg", torch.mean)
        if on_step is None:  # Lightning's default
            hook = module._current_fx_name or ""
            outside = hook == "on_train_start" or hook.startswith("on_train_epoch")
            on_step = module.trainer.training and not outside
        if given.get("sync_dist") and is_mean and items is not None:
            at_once = bool(on_step) and not given.get("rank_zero_only")
            if not isinstance(value, Tensor) and isinstance(value, int | float):
                value = torch.tensor(float(value), device=module.device)
            if isinstance(value, Tensor):
                value = weighted(value, items, given.get("sync_dist_group"), at_once=at_once)
        if given.get("sync_dist") and is_mean and items is None:
            raise UsageError(
                f"self.log({name!r}, ..., sync_dist=True) with --context would average over "
                "workers, whose parts of the sequences have different numbers of tokens. Pass this "
                "worker's number of labels: batch_size=int((labels != -100).sum())."
            )
        log(name, value, *args, **kwargs)

    return checked


def refuse_precision(plugin: Any) -> None:
    """Raise UsageError if the precision `plugin` belongs to another engine."""
    name = type(plugin).__name__
    if name.startswith(_ELSEWHERE):
        raise UsageError(
            f'{name} converts a model for another engine. Write precision="bf16-mixed", '
            '"16-mixed", "bf16-true", "32-true" or "64-true".'
        )


def _inside_forward(
    module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call `module(*args, **kwargs)` with `method` as its forward method.

    The engine's hooks on the module then run around the entire `training_step`, like the wrappers
    of Lightning's own strategies. Inside `method`, `module(...)` calls its original forward method.
    """
    own = vars(module)
    before = {"forward": own["forward"]} if "forward" in own else {}

    def put_back() -> None:
        own.pop("forward", None)
        own.update(before)

    def forward(*args: Any, **kwargs: Any) -> Any:
        put_back()
        return method(*args, **kwargs)

    own["forward"] = forward
    try:
        return module(*args, **kwargs)
    finally:
        put_back()


class NoDeviceMesh(UsageError, AttributeError):
    """Raised if a mesh is read. An AttributeError, so that `hasattr` returns False."""


def refuse_mesh(asked: str) -> NoReturn:
    """Raise NoDeviceMesh. `asked` is the attribute that the script has read."""
    raise NoDeviceMesh(
        f"{asked} belongs to ModelParallelStrategy, but this run trains by shardwise, which splits "
        "the model itself. Leave fully_shard(...) out and start with --zero 3. Instead of "
        "parallelize_module(...), write the loop with sw.Engine and start with --tensor."
    )


class RefusedMesh:
    """Replaces a LightningModule's mesh, and raises NoDeviceMesh on every use."""

    def __getattr__(self, name: str) -> Any:
        refuse_mesh("self.device_mesh")

    def __getitem__(self, key: Any) -> Any:
        refuse_mesh(f"self.device_mesh[{key!r}]")
