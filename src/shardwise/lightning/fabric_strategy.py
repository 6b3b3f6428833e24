"""Strategy for Lightning Fabric: setup, training step and full states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.lightning.empty_modules import give_memory
from shardwise.lightning.trainer_strategy import OverEngines, refuse_precision


class FabricStrategy(OverEngines):
    """The strategy of `Fabric(strategy="shardwise")`.

    For its arguments, see `OverEngines`.

    Example:
        ```python
        fabric = Fabric(strategy=ShardwiseFabricStrategy(zero=3))
        model, optimizer = fabric.setup(model, optimizer)
        ```
    """

    library = "Fabric"
    _precision: Any
    _precision_keyword = "precision"

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._backward_sync_control = _BackwardSyncControl(self)

    @property
    def precision(self) -> Any:
        """Fabric's precision plugin. It casts and autocasts; the engine scales the loss."""
        return self._precision if self._precision is not None else self.hooks[0]()

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = plugin
        if plugin is not None:
            refuse_precision(plugin)
            self.training.scaler = getattr(plugin, "scaler", None)

    def _setup_distributed(self) -> None:
        """Set the rank for Fabric's printing. The process group already exists."""
        self._set_world_ranks()  # type: ignore[attr-defined]

    # -- setup ------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return a context manager that creates and allocates modules on this rank's device.

        `empty_init` is ignored.
        """
        # Scripts load or initialise weights before they set up the optimizer, which requires
        # memory.
        del empty_init
        return super().module_init_context(empty_init=False)  # type: ignore[misc,no-any-return]

    def module_to_device(self, module: nn.Module) -> None:
        """Allocate the meta-device parameters of `module`, and move it to the device."""
        give_memory(module)
        super().module_to_device(module)  # type: ignore[misc]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[optim.Optimizer], scheduler: Any = None
    ) -> Any:
        """Create engines for `module` and `optimizers`, and return the arguments unchanged.

        Collective.
        """
        for each in optimizers:
            self._follow(each)
        self.training.prepare(module, optimizers)
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Register `module`. `setup_optimizer` later creates its engine. Collective."""
        self.training.prepare(module, [])
        return module

    def setup_optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        """Create an engine for the modules of `optimizer`. Collective."""
        self._follow(optimizer)
        self.training.prepare(None, [optimizer])
        return optimizer

    def _follow(self, optimizer: optim.Optimizer) -> None:
        """Redirect `load_state_dict` of `optimizer`, which Fabric calls, to the engine."""
        load = partial(self.training.load_optimizer_state, optimizer)
        vars(optimizer)["load_state_dict"] = load

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader for `dataloader`.

        If means are exact, its training batches contain no repeated samples.
        """
        exact = self.training.exact
        return dataloader if exact is None else exact.watch(dataloader)

    # -- a step -----------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of `tensor` in every engine that it reaches.

        With `exact_mean`, `weight` may be passed: the number of items over which `tensor` is
        averaged (default: the samples of the batch).
        """
        del module  # the graph of the loss determines the engines
        self.training.backward(tensor, *args, **kwargs)

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce `tensor` across all ranks, as Fabric does. Collective."""
        if self.training.sequences is not None and str(reduce_op).lower() in ("mean", "avg"):
            self.training.world.say_once(
                'fabric.all_reduce(..., reduce_op="mean") averages over workers, whose parts of '
                "the same sequences have different numbers of labels (--context). For a mean loss, "
                "add up torch.where(n > 0, loss * n, 0) and the number of labels n with "
                'reduce_op="sum", and divide.'
            )
        return super().all_reduce(tensor, group, reduce_op)  # type: ignore[misc,no-any-return]

    def optimizer_step(
        self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Step `optimizer`, and return the result of `closure`. Collective."""
        if closure is not None and isinstance(optimizer, optim.LBFGS):
            self.training.step(optimizer, closure)
            return None
        result = closure() if closure is not None else None
        self.training.step(optimizer)
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of `optimizer` by their norm across all ranks. Collective.

        Returns the norm before clipping. Raises RuntimeError if `error_if_nonfinite` is true and
        the norm is not finite.
        """
        del module
        norm = self.training.clip_norm(optimizer, float(max_norm), float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The norm of the gradient is {norm.item()}, because a loss has overflowed. To "
                "continue anyway, pass error_if_nonfinite=False."
            )
        return norm

    def clip_gradients_value(
        self, module: nn.Module, optimizer: optim.Optimizer, clip_val: float
    ) -> None:
        """Clip every gradient element to [-clip_val, clip_val]. Collective.

        The full gradients are gathered first.
        """
        del module
        self.training.clip_value(optimizer, float(clip_val))

    # -- full states ------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's full state_dict. Collective.

        If parameters are sharded, rank 0 gets it and the other ranks get an empty dict.
        """
        return self.training.state_dict(module)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load `state_dict` into `module`. Collective."""
        self.training.load_state_dict(module, state_dict, strict=strict)

    def load_checkpoint(self, path: Any, state: Any = None, **options: Any) -> Any:
        """Restore the objects in `state` from the file `path`. Collective.

        Returns the other entries of the file.
        """
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, **options)  # type: ignore[misc]
        # Load modules first. With 16-bit weights, the optimizer's state contains the fp32 masters,
        # and loading the weights after it would replace the masters with rounded values.
        ordered = dict(sorted(state.items(), key=lambda item: not isinstance(item[1], nn.Module)))
        rest = super().load_checkpoint(path, ordered, **options)  # type: ignore[misc]
        state.update(ordered)
        return rest

    def get_optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """Return the full state of `optimizer`, as a single process would have it. Collective."""
        return self.training.optimizer_state(optimizer)


class _BackwardSyncControl:
    """Implements Fabric's `no_backward_sync`."""

    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """If `enabled` is true, declare that more backward passes of this step follow the block."""
        del module
        if not enabled:
            yield
            return
        with self._strategy.training.more_to_come():
            yield
