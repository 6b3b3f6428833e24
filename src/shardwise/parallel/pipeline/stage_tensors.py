"""Implements stage tensors: tensors of a forward pass whose layers are spread over several ranks.

A `StageTensor` represents a tensor that was computed on one stage. Every rank runs the complete
program. The stage's rank executes the operations on its stage tensors, and the other ranks compute
only shapes. An operation on several stages' tensors runs on the last of these stages. The other
stages send their tensors to it, each only once. All other tensors (the batch, and values derived
from it) are identical on all ranks.

    stage 0   x ─ embed ─▶ h0 ═ sent ═▷                        (h1, loss: fake)
    stage 1   x   (h0: fake)          ▷ h0 ─ blocks ─ head ─▶ loss
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils import _pytree as pytree

from shardwise.comm import Handle
from shardwise.errors import UsageError
from shardwise.parallel.pipeline import recomputed_layers
from shardwise.parallel.pipeline.fake_tensors import (
    fake_activation,
    fake_like,
    fake_mode,
    without_saving,
)
from shardwise.parallel.tensor.torch_functions import METADATA


@dataclass(eq=False)
class StageRun:
    """One micro-batch on the stages that this rank runs, with the values sent and received."""

    stages: frozenset[int]
    scheduled: bool = False
    """True if a schedule decides when each stage runs, so that no stage can request values."""
    is_trial: bool = False
    """True if the run computes nothing, and only finds out which values will be sent."""
    sent: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """(source stage, target stage, value) of the sent tensors that require a gradient."""
    received: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """(source stage, target stage, value) of the received tensors, leaves of this rank's graph."""
    in_flight: list[Handle] = field(default_factory=list)
    """Handles of sent tensors whose buffers have not been released yet."""
    outside_uses: list[torch.nn.Parameter] = field(default_factory=list)
    """Parameters of layers that were used outside all layers in a trial run."""
    is_over: bool = False
    """True once a backward pass has consumed the run."""
    number: int = field(default_factory=itertools.count().__next__)
    """The number of this run in the process, in order of creation."""


class StageExchange(Protocol):
    """Interface of the pipeline that stage tensors use to move values between stages."""

    @property
    def run(self) -> StageRun:
        """The current StageRun."""

    def send(self, run: StageRun, source: int, target: int, value: Tensor) -> None:
        """Send a value from `source`, a stage on this rank, to the rank of stage `target`."""

    def receive(self, run: StageRun, source: int, target: int, like: Tensor) -> Tensor:
        """Receive a value from stage `source` for `target`, a stage on this rank."""

    def broadcast(self, source: int, value: Tensor | None, like: Tensor) -> Tensor:
        """Broadcast a value from stage `source` to all ranks. Collective."""

    def open_channels(self, source: int, target: int) -> None:
        """Open the channels between two stages. Collective if they are not open yet."""

    def owner(self, parameter: Tensor) -> int | None:
        """Return the stage that trains a parameter, or None if it is not in the model."""

    def add_user(self, parameter: torch.nn.Parameter, stage: int) -> None:
        """Record that stage `stage` uses another stage's parameter, and send it the parameter."""

    def whole_parameter(self, parameter: torch.nn.Parameter) -> Tensor:
        """Return the full parameter. Collective if tensor parallelism splits it."""

    def fake_parameter(self, parameter: torch.nn.Parameter) -> FakeTensor:
        """Return a fake tensor with the shape of the full parameter."""

    @property
    def within_stage_depth(self) -> int:
        """Number of `within_stage` blocks that are currently open."""

    def within_stage(self) -> AbstractContextManager[None]:
        """Context manager that marks operations as belonging to one stage. Nothing is sent."""


class StageTensor(Tensor):
    """A tensor that was computed on one stage.

    `value` holds the actual tensor, or None if it is on another rank. `like` is a fake tensor with
    the same shape.
    """

    stage: int
    value: Tensor | None
    known_stages: set[int]
    """The stages that have the value."""
    runs: tuple[StageRun, ...]
    """The runs that produced the tensor, in order."""
    _exchange: StageExchange
    _like: FakeTensor | None

    @staticmethod
    def __new__(
        cls,
        exchange: StageExchange,
        stage: int,
        value: Tensor | None,
        like: Tensor,
        runs: tuple[StageRun, ...],
    ) -> StageTensor:
        tensor: StageTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        tensor.stage, tensor.value, tensor.known_stages = stage, value, {stage}
        tensor._exchange = exchange
        tensor._like = like if isinstance(like, FakeTensor) else None
        tensor.runs = runs
        return tensor

    @property
    def like(self) -> FakeTensor:
        """The fake tensor, created on first use."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._like is None:
                assert self.value is not None
                self._like = fake_activation(self.value)
            return self._like

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # `apply` must reach torch's functions, not this one again.
        with torch._C.DisableTorchFunctionSubclass():
            return apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Operations are handled in __torch_function__. Only calls that bypass it get here.
        raise UsageError(
            f"{func} was called on a tensor of a pipeline-parallel model in a way that bypasses "
            "__torch_function__, so it cannot run on the rank that has the tensor. Move the call "
            "out of the model's forward, or start without --pipeline."
        )


_METADATA = METADATA | {getattr(Tensor, name).__get__ for name in ("is_leaf", "requires_grad")}
"""Functions that read only a tensor's metadata, which all ranks know."""

_READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__float__,
    Tensor.__int__, Tensor.__index__, Tensor.__contains__, Tensor.__repr__, Tensor.__format__,
    Tensor.cpu, Tensor.equal, torch.equal, torch.allclose, Tensor.allclose, torch.is_nonzero,
    Tensor.is_nonzero, Tensor.__reduce_ex__, Tensor.__deepcopy__,
}  # fmt: skip
"""Functions that read values. The values are broadcast to all ranks."""

_BACKWARDS = {torch.autograd.grad, Tensor.backward}
"""Functions that traverse the autograd graph. Each rank has only its own stages' part."""

_SHAPED_BY_VALUES = {
    Tensor.__getitem__, Tensor.nonzero, torch.nonzero, Tensor.masked_select, torch.masked_select,
    Tensor.unique, torch.unique, torch.argwhere, Tensor.argwhere, torch.where,
}  # fmt: skip
"""Functions whose output shape may depend on values."""


def apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, which has stage tensors among its arguments, on the last of their stages."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, StageTensor)]
    exchange = tensors[0]._exchange
    if any(tensor._exchange is not exchange for tensor in tensors):
        raise UsageError(
            "An operation combines tensors of two models that are both split into stages "
            "(--pipeline), and the stages do not match. Put the models into one module with one "
            "engine."
        )
    if func in _METADATA:
        return _call(func, [_value_or_fake(leaf) for leaf in leaves], spec)
    if func in _READS:
        values = [
            broadcast_value(leaf) if isinstance(leaf, StageTensor) else leaf for leaf in leaves
        ]
        return _call(func, values, spec)
    if func in _BACKWARDS:
        raise _backward_error(func)
    return run_operation(exchange, func, leaves, spec)


def _backward_error(func: Callable[..., Any]) -> UsageError:
    if func is Tensor.backward:
        return UsageError(
            "loss.backward() does not work if the model's layers are on several workers "
            "(--pipeline). Write engine.backward(loss), or loss = "
            "engine.forward_backward(loss_of, *batch)."
        )
    return UsageError(
        "torch.autograd.grad does not work if the model's layers are on several workers "
        "(--pipeline), because each worker has only a part of the graph. Start without --pipeline "
        "to use gradients inside of a loss, such as a gradient penalty; --zero 3 or --tensor save "
        "memory as well."
    )


def _value_or_fake(leaf: Any) -> Any:
    if not isinstance(leaf, StageTensor):
        return leaf
    return leaf.like if leaf.value is None else leaf.value


def run_operation(
    exchange: StageExchange, func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec
) -> Any:
    """Run `func` on the last of its arguments' stages. Return stage tensors."""
    runs = runs_of(exchange, leaves)
    stages = [stage for leaf in leaves if (stage := _stage_of(exchange, leaf)) is not None]
    # Use the last stage, because values are only sent to later stages: a schedule runs earlier
    # stages first.
    stage = max(stages)
    _check_in_place(exchange, func, leaves, spec)
    if stage in exchange.run.stages:
        if func in _SHAPED_BY_VALUES:
            # The other ranks need the shape, and raise an error if it depends on values. Raise here
            # too.
            _shapes(exchange, func, leaves, spec)
        values = [value_at(exchange, leaf, stage) for leaf in leaves]
        with recomputed_layers.saved_outside_checkpoint():
            result = _call(func, values, spec)
        return pytree.tree_map_only(
            Tensor, lambda v: StageTensor(exchange, stage, v, v, runs), result
        )
    # Send or receive the arguments. Their values are not needed on this rank.
    for leaf in leaves:
        value_at(exchange, leaf, stage)
    result = _shapes(exchange, func, leaves, spec)
    return pytree.tree_map_only(
        Tensor, lambda v: StageTensor(exchange, stage, None, v, runs), result
    )


def runs_of(exchange: StageExchange, leaves: Iterable[Any]) -> tuple[StageRun, ...]:
    """Return the StageRuns that an operation on `leaves` depends on.

    If `leaves` has no stage tensors, this is the current StageRun. Raises UsageError for a tensor
    from another micro-batch, or inside an autograd function.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, StageTensor)]
    if recomputed_layers.in_autograd_function() and any(
        _value_or_fake(tensor).requires_grad for tensor in tensors
    ):
        raise recomputed_layers.autograd_function_error()
    runs = {run for tensor in tensors for run in tensor.runs}
    if any(run.scheduled and run is not exchange.run for run in runs):
        raise UsageError(
            "A tensor of the model was used after engine.forward_backward returned, but each "
            "stage has only parts of the micro-batches. Return only the loss from loss_of, and "
            "compute other values in a forward outside of it."
        )
    # Sort, so that the last run is the same on all ranks.
    return tuple(sorted(runs or {exchange.run}, key=lambda run: run.number))


def _check_in_place(
    exchange: StageExchange, func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec
) -> None:
    """Raise UsageError if `func` writes a stage tensor to a tensor that exists on all ranks."""
    name = getattr(func, "__name__", "")
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    # Methods that write in place end with one underscore, such as add_.
    writes = func is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))
    targets = [kwargs["out"]] if kwargs.get("out") is not None else list(args[:1]) if writes else []
    if any(isinstance(t, Tensor) and _stage_of(exchange, t) is None for t in targets):
        raise UsageError(
            f"{name} writes a value that only one stage has into a tensor that all ranks have, and "
            "the other ranks would not see it. Create a new tensor instead: total = total + hits, "
            "torch.where, torch.cat."
        )


def _shapes(
    exchange: StageExchange, func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec
) -> Any:
    """Compute the output of `func` as fake tensors.

    Raises UsageError if the output's shape depends on values.
    """
    try:
        with fake_mode(), without_saving():
            fakes = []
            for leaf in leaves:
                if isinstance(leaf, StageTensor):
                    fakes.append(leaf.like)
                elif _stage_of(exchange, leaf) is not None:
                    fakes.append(exchange.fake_parameter(leaf))
                else:
                    fakes.append(fake_like(leaf) if isinstance(leaf, Tensor) else leaf)
            return _call(func, fakes, spec)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"The output of {getattr(func, '__name__', func)} on a tensor of the model has a shape "
            "or number that depends on values, which the ranks of other stages do not have. "
            "Use torch.where or ignore_index instead of a mask, or read the values first with "
            ".tolist(), outside of engine.forward_backward."
        ) from error


def _call(func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def _stage_of(exchange: StageExchange, leaf: Any) -> int | None:
    if isinstance(leaf, StageTensor):
        return leaf.stage
    return exchange.owner(leaf) if isinstance(leaf, torch.nn.Parameter) else None


def value_at(exchange: StageExchange, leaf: Any, stage: int) -> Any:
    """Return the value of `leaf` on stage `stage`, after sending it there if necessary.

    If this rank does not run the stage, the caller must not use the result.
    """
    if isinstance(leaf, torch.nn.Parameter) and (owner := exchange.owner(leaf)) is not None:
        if exchange.run.is_trial:
            exchange.run.outside_uses.append(leaf)
        if owner != stage:
            exchange.add_user(leaf, stage)
        return exchange.whole_parameter(leaf) if stage in exchange.run.stages else leaf
    if not isinstance(leaf, StageTensor):
        return leaf
    if stage not in leaf.known_stages:
        leaf.known_stages.add(stage)
        exchange.open_channels(leaf.stage, stage)
        run = leaf.runs[-1]
        # Every rank gets here at the same point of the program. Messages therefore need no names:
        # their order on a channel is the order in the program.
        has_source, has_target = leaf.stage in exchange.run.stages, stage in exchange.run.stages
        if has_source and not has_target:
            assert leaf.value is not None
            exchange.send(run, leaf.stage, stage, leaf.value)
        elif has_target and not has_source:
            leaf.value = exchange.receive(run, leaf.stage, stage, leaf.like)
    return leaf.value


def broadcast_value(tensor: StageTensor) -> Tensor:
    """Return a stage tensor's value, detached from its graph, on all ranks. Collective."""
    exchange = tensor._exchange
    if exchange.run.scheduled:
        raise UsageError(
            "Inside engine.forward_backward only one stage has a tensor of the model, and the "
            "other stages are in other micro-batches, so its values cannot be read (.item(), if, "
            "print). Return the loss, and read the result of engine.forward_backward."
        )
    runs_of(exchange, [tensor])
    has_value = tensor.stage in exchange.run.stages
    return exchange.broadcast(tensor.stage, tensor.value if has_value else None, tensor.like)


def apply_to_parameters(
    exchange: StageExchange, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run an operation that uses parameters outside all layers, on the last of their stages.

    If `func` reads values, the parameters are broadcast to all ranks.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if func in _BACKWARDS:
        raise _backward_error(func)
    with torch._C.DisableTorchFunctionSubclass(), exchange.within_stage():
        if func in _READS:
            return _call(func, [_read(exchange, leaf) for leaf in leaves], spec)
        return run_operation(exchange, func, leaves, spec)


def _read(exchange: StageExchange, leaf: Any) -> Any:
    stage = _stage_of(exchange, leaf)
    if stage is None:
        return leaf
    if not isinstance(leaf, StageTensor):
        value = exchange.whole_parameter(leaf).detach() if stage in exchange.run.stages else None
        leaf = StageTensor(exchange, stage, value, exchange.fake_parameter(leaf), (exchange.run,))
    return broadcast_value(leaf)
