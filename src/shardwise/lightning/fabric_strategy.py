"""The strategy of Lightning Fabric: setup, a step, and whole states."""

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
    """The strategy that `Fabric(strategy="shardwise")` has."""

    library = "Fabric"
    _precision: Any
    _precision_keyword = "precision"

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._backward_sync_control = _NotLast(self)

    @property
    def precision(self) -> Any:
        """Fabric's plugin: it casts and autocasts; the loss scale is the engine's."""
        return self._precision if self._precision is not None else self.hooks[0]()

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = plugin
        if plugin is not None:
            refuse_precision(plugin)
            self.training.scaler = getattr(plugin, "scaler", None)

    def _setup_distributed(self) -> None:
        """The process group is there: tell Fabric's printing which rank this is."""
        self._set_world_ranks()  # type: ignore[attr-defined]

    # -- what is trained --------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Build a module inside the block, on the device of this worker, with its own values.

        `empty_init` changes nothing: Fabric needs memory before the optimizer is set up, and
        scripts load or initialise weights in between, which memory must be there for.
        """
        del empty_init
        return super().module_init_context(empty_init=False)  # type: ignore[misc,no-any-return]

    def module_to_device(self, module: nn.Module) -> None:
        """Move `module`; what was built on the meta device gets memory and values first."""
        give_memory(module)
        super().module_to_device(module)  # type: ignore[misc]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[optim.Optimizer], scheduler: Any = None
    ) -> Any:
        """Let engines train `module` with `optimizers`; they come back as they are. Collective."""
        for each in optimizers:
            self._follow(each)
        self.training.prepare(module, optimizers)
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Remember `module`, which is trained once its optimizer is set up. Collective."""
        self.training.prepare(module, [])
        return module

    def setup_optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        """Let an engine train what `optimizer` has parameters of. Collective."""
        self._follow(optimizer)
        self.training.prepare(None, [optimizer])
        return optimizer

    def _follow(self, optimizer: optim.Optimizer) -> None:
        """Let the optimizer's own load_state_dict reach the engine: Fabric calls it."""
        load = partial(self.training.load_optimizer_state, optimizer)
        vars(optimizer)["load_state_dict"] = load

    def process_dataloader(self, dataloader: Any) -> Any:
        """`dataloader`; where means are exact with every sample once, in training."""
        exact = self.training.exact
        return dataloader if exact is None else exact.watch(dataloader)

    # -- a step -----------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Backward of `tensor` in every engine that it reaches; takes `weight` with `exact_mean`.

        That is the number of items that it is a mean over (default: the samples of the batch).
        """
        del module  # the loss says what it reaches
        self.training.backward(tensor, *args, **kwargs)

    def optimizer_step(
        self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Step `optimizer`; returns what `closure` did. Collective."""
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
        """Clip what `optimizer` steps by its norm over all workers; the norm before. Collective."""
        del module
        norm = self.training.clip_norm(optimizer, float(max_norm), float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The gradient's norm is {norm.item()}: a loss has overflowed. Pass "
                "error_if_nonfinite=False to go on."
            )
        return norm

    def clip_gradients_value(
        self, module: nn.Module, optimizer: optim.Optimizer, clip_val: float
    ) -> None:
        """Clip every element of the gradients, which are whole for that moment. Collective."""
        del module
        self.training.clip_value(optimizer, float(clip_val))

    # -- whole states -----------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's state_dict with whole tensors; where parameters are sharded, on rank
        0 alone. Collective."""
        return self.training.state_dict(module)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Let `module` have the weights of `state_dict`. Collective."""
        self.training.load_state_dict(module, state_dict, strict=strict)

    def load_checkpoint(self, path: Any, state: Any = None, **options: Any) -> Any:
        """Restore what `state` has from the file `path`; what the file has beside. Collective.

        Modules come first, whatever their order: where weights are of 16 bits, an optimizer's state
        has what they were rounded from, which weights that are loaded after it would replace.
        """
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, **options)  # type: ignore[misc]
        ordered = dict(sorted(state.items(), key=lambda item: not isinstance(item[1], nn.Module)))
        rest = super().load_checkpoint(path, ordered, **options)  # type: ignore[misc]
        state.update(ordered)
        return rest

    def get_optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """Return the whole state of `optimizer`, as it is in one process. Collective."""
        return self.training.optimizer_state(optimizer)


class _NotLast:
    """What Fabric's `no_backward_sync` asks."""

    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Inside the block more backwards follow in the step, where it is `enabled`."""
        del module
        if not enabled:
            yield
            return
        with self._strategy.training.not_last():
            yield
