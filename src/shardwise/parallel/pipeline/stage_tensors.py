"""Stage tensors: the tensors of a forward whose layers are on several ranks.

A `StageTensor` stands for a tensor that one stage has computed. Every rank runs the whole program:
on the rank of its stage, operations on a stage tensor are computed; elsewhere only their shapes. An
operation on tensors of several stages runs on the last of them, and the others are sent there,
once. Other tensors (the batch, and what is made of it) are equal on all ranks.

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
from shardwise.parallel.tensor.torch_functions import FORM


@dataclass(eq=False)
class StageRun:
    """A run: one micro-batch on the stages that this rank runs now, with what was sent and
    received."""

    stages: frozenset[int]
    scheduled: bool = False
    """Whether a schedule says when each stage runs it, so that other stages cannot be asked for
    values."""
    is_trial: bool = False
    """Whether nothing is computed: the run only finds out what would be sent."""
    sent: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """Sent tensors that carry gradients, with source and target stage; in order."""
    received: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """Received ones: the leaves of this rank's graph."""
    in_flight: list[Handle] = field(default_factory=list)
    """Handles of sent tensors, whose buffers are not released yet."""
    outside_uses: list[torch.nn.Parameter] = field(default_factory=list)
    """The parameters of layers that a trial has seen used outside of all layers."""
    is_over: bool = False
    """Whether a backward has used the run up."""
    number: int = field(default_factory=itertools.count().__next__)
    """Its number among the runs of this process."""


class StageExchange(Protocol):
    """What stage tensors need of the pipeline: moves values between stages."""

    @property
    def run(self) -> StageRun:
        """The present run."""

    def send(self, run: StageRun, source: int, target: int, value: Tensor) -> None:
        """Send a value of `source`, here, to the rank of `target`."""

    def receive(self, run: StageRun, source: int, target: int, like: Tensor) -> Tensor:
        """Receive on `target`, here, what `source` has sent."""

    def broadcast(self, source: int, value: Tensor | None, like: Tensor) -> Tensor:
        """Broadcast a value of `source` to all ranks. Collective."""

    def open_channels(self, source: int, target: int) -> None:
        """Open the channels between two stages, if there are none. Collective then."""

    def owner(self, parameter: Tensor) -> int | None:
        """The stage that trains a parameter."""

    def add_user(self, parameter: torch.nn.Parameter, stage: int) -> None:
        """Let `stage` use a parameter that another one trains."""

    def whole_parameter(self, parameter: torch.nn.Parameter) -> Tensor:
        """The whole of a parameter on this rank. Collective where layers are split further."""

    def fake_parameter(self, parameter: torch.nn.Parameter) -> FakeTensor:
        """A fake tensor with the shape of the whole parameter."""

    @property
    def within_stage_depth(self) -> int:
        """The number of open blocks of `within_stage`."""

    def within_stage(self) -> AbstractContextManager[None]:
        """Mark operations inside the block as those of one stage."""


class StageTensor(Tensor):
    """A tensor of one `stage`: `value` where this rank knows it, `like` a fake one with its
    shape."""

    stage: int
    value: Tensor | None
    known_stages: set[int]
    """The stages that have the value."""
    runs: tuple[StageRun, ...]
    """The runs in which it was made, in their order."""
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
        made: StageTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.stage, made.value, made.known_stages, made._exchange = stage, value, {stage}, exchange
        made._like = like if isinstance(like, FakeTensor) else None
        made.runs = runs
        return made

    @property
    def like(self) -> FakeTensor:
        """The fake tensor."""
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
        with torch._C.DisableTorchFunctionSubclass():
            return apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise UsageError(
            f"{func} was called on a tensor of a pipeline-parallel model in a way that cannot be "
            "followed to the rank that has it. Take what it needs out of the model's forward, or "
            "start without --pipeline."
        )


_METADATA = FORM | {getattr(Tensor, name).__get__ for name in ("is_leaf", "requires_grad")}
"""Functions of a tensor's form, which all ranks know."""

_READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__float__,
    Tensor.__int__, Tensor.__index__, Tensor.__contains__, Tensor.__repr__, Tensor.__format__,
    Tensor.cpu, Tensor.equal, torch.equal, torch.allclose, Tensor.allclose, torch.is_nonzero,
    Tensor.is_nonzero, Tensor.__reduce_ex__, Tensor.__deepcopy__,
}  # fmt: skip
"""Functions that read values: all ranks get them."""

_BACKWARDS = {torch.autograd.grad, Tensor.backward}
"""Functions that traverse the graph, of which each rank has the part of its own stages."""

_SHAPED_BY_VALUES = {
    Tensor.__getitem__, Tensor.nonzero, torch.nonzero, Tensor.masked_select, torch.masked_select,
    Tensor.unique, torch.unique, torch.argwhere, Tensor.argwhere, torch.where,
}  # fmt: skip
"""Functions whose output shape may depend on values."""


def apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func`, with stage tensors among its arguments, on the right stage."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, StageTensor)]
    exchange = tensors[0]._exchange
    if any(tensor._exchange is not exchange for tensor in tensors):
        raise UsageError(
            "Tensors of two models meet, of which each has its layers on several workers "
            "(--pipeline), and the stages of one are not those of the other. Put them into one "
            "module, with one engine."
        )
    if func in _METADATA:
        return _call(func, [_value_or_fake(leaf) for leaf in leaves], spec)
    if func in _READS:
        found = [
            broadcast_value(leaf) if isinstance(leaf, StageTensor) else leaf for leaf in leaves
        ]
        return _call(func, found, spec)
    if func in _BACKWARDS:
        raise _backward_error(func)
    return run_operation(exchange, func, leaves, spec)


def _backward_error(func: Callable[..., Any]) -> UsageError:
    if func is Tensor.backward:
        return UsageError(
            "loss.backward() of a model whose layers are on several workers (--pipeline): write "
            "engine.backward(loss), or loss = engine.forward_backward(loss_of, *batch)."
        )
    return UsageError(
        "torch.autograd.grad of what layers on several workers (--pipeline) have made: each worker "
        "has a part of the graph only, so gradients inside of a loss (a gradient penalty) cannot "
        "be had with --pipeline. Start without it: --zero 3 or --tensor make room as well."
    )


def _value_or_fake(leaf: Any) -> Any:
    """The value of `leaf` if it is here, else a fake one."""
    if not isinstance(leaf, StageTensor):
        return leaf
    return leaf.like if leaf.value is None else leaf.value


def run_operation(
    exchange: StageExchange, func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec
) -> Any:
    """Run `func` on the last stage that has one of its arguments; returns stage tensors."""
    runs = runs_of(exchange, leaves)
    stages = [stage for leaf in leaves if (stage := _stage_of(exchange, leaf)) is not None]
    stage = max(stages)
    _check_in_place(exchange, func, leaves, spec)
    if stage in exchange.run.stages:
        if func in _SHAPED_BY_VALUES:
            _shapes(exchange, func, leaves, spec)  # the error that the others have
        given = [value_at(exchange, leaf, stage) for leaf in leaves]
        with recomputed_layers.saved_outside_checkpoint():
            found = _call(func, given, spec)
        return pytree.tree_map_only(
            Tensor, lambda v: StageTensor(exchange, stage, v, v, runs), found
        )
    for leaf in leaves:
        value_at(exchange, leaf, stage)
    found = _shapes(exchange, func, leaves, spec)
    return pytree.tree_map_only(
        Tensor, lambda v: StageTensor(exchange, stage, None, v, runs), found
    )


def runs_of(exchange: StageExchange, leaves: Iterable[Any]) -> tuple[StageRun, ...]:
    """The runs of a result of `leaves`: theirs, or the present one. Raises UsageError for a tensor
    of another micro-batch."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, StageTensor)]
    if recomputed_layers.in_autograd_function() and any(
        _value_or_fake(tensor).requires_grad for tensor in tensors
    ):
        raise recomputed_layers.autograd_function_error()
    found = {run for tensor in tensors for run in tensor.runs}
    if any(run.scheduled and run is not exchange.run for run in found):
        raise UsageError(
            "A tensor of the model was kept from inside engine.forward_backward, where each stage "
            "has a part of each micro-batch: it cannot be used outside. Let loss_of return the "
            "loss alone, and compute what else is wanted in a forward of its own."
        )
    return tuple(sorted(found or {exchange.run}, key=lambda run: run.number))


def _check_in_place(
    exchange: StageExchange, func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec
) -> None:
    """Raise UsageError where a tensor that all ranks have is written to with one stage's."""
    name = getattr(func, "__name__", "")
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    writes = func is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))
    targets = [kwargs["out"]] if kwargs.get("out") is not None else list(args[:1]) if writes else []
    if any(isinstance(t, Tensor) and _stage_of(exchange, t) is None for t in targets):
        raise UsageError(
            f"{name}: a tensor that all ranks have is written to with what one stage has made, "
            "which the others would not see. Make a new tensor of it: total = total + hits, "
            "torch.where, torch.cat."
        )


def _shapes(
    exchange: StageExchange, func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec
) -> Any:
    """The output of `func` as fake tensors. Raises UsageError where its shape depends on values."""
    try:
        with fake_mode(), without_saving():
            return _call(func, [_shape_of(exchange, leaf) for leaf in leaves], spec)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"{getattr(func, '__name__', func)} of a tensor of the model gives a shape, or a "
            "number, that depends on its values, which the ranks of other stages do not have. "
            "Write it without: torch.where or ignore_index in place of a mask; or read the values "
            "first: .tolist() outside of engine.forward_backward."
        ) from error


def _call(func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def _stage_of(exchange: StageExchange, leaf: Any) -> int | None:
    if isinstance(leaf, StageTensor):
        return leaf.stage
    return exchange.owner(leaf) if isinstance(leaf, torch.nn.Parameter) else None


def _shape_of(exchange: StageExchange, leaf: Any) -> Any:
    if isinstance(leaf, StageTensor):
        return leaf.like
    if _stage_of(exchange, leaf) is not None:
        return exchange.fake_parameter(leaf)
    return fake_like(leaf) if isinstance(leaf, Tensor) else leaf


def value_at(exchange: StageExchange, leaf: Any, stage: int) -> Any:
    """The value of `leaf` for `stage`, sent there if that stage does not have it yet.

    Where this rank does not run `stage`, the result must not be used.
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
        # Every rank comes here at the same place of the program: sender and receiver need no name
        # for the message, and its order on the channel is the order of the program.
        here, there = leaf.stage in exchange.run.stages, stage in exchange.run.stages
        if here and not there:
            assert leaf.value is not None
            exchange.send(run, leaf.stage, stage, leaf.value)
        elif there and not here:
            leaf.value = exchange.receive(run, leaf.stage, stage, leaf.like)
    return leaf.value


def broadcast_value(tensor: StageTensor) -> Tensor:
    """The value of a stage tensor, without its graph, on all ranks. Collective."""
    exchange = tensor._exchange
    if exchange.run.scheduled:
        raise UsageError(
            "Inside engine.forward_backward a tensor of the model is on one stage, and the others "
            "are in other micro-batches: its values cannot be read (.item(), if, print). Return "
            "the loss, and read what comes back from engine.forward_backward."
        )
    runs_of(exchange, [tensor])
    here = tensor.stage in exchange.run.stages
    return exchange.broadcast(tensor.stage, tensor.value if here else None, tensor.like)


def apply_to_parameters(
    exchange: StageExchange, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run an operation of the user's on parameters, outside of all layers, on the last stage among
    them.

    What it reads is broadcast to all ranks.
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
