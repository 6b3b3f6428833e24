"""Refuses lines of a plain training loop that would be silently wrong, with the line to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakMethod

from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError, UsageError
from shardwise.layout.placement import Placement
from shardwise.model.optimizer_access import StateOfEngine, own_methods
from shardwise.states.optimizer.optimizer_kind import is_known
from shardwise.states.optimizer.optimizer_options import post_hooks, pre_hooks
from shardwise.states.parameters.parameters_at_rest import is_sharded, sharded_copy
from shardwise.world.common_calls import SHARE, apart_in_calls, apart_in_shares, nearly_alike
from shardwise.world.world import World


def stray_backward(name: str) -> UsageError:
    """The error for a `loss.backward()` that reached parameter `name` without the engine."""
    return UsageError(
        f"loss.backward() reached {name} without the engine, so its gradient would never be "
        "averaged over the workers. Write engine.backward(loss) instead; with Accelerate or Fabric "
        "their backward(loss), in a LightningModule self.manual_backward(loss)."
    )


def cleared_gradients() -> UsageError:
    """The error for gradients that were cleared before the step that they were made for."""
    return UsageError(
        "Gradients were cleared between engine.backward and engine.step, by zero_grad() or "
        "param.grad = None, which would not clear what is already on its way. "
        "engine.step() clears by itself: leave zero_grad out, or call it before backward. To "
        "forget this step's gradients: engine.zero_grad()."
    )


def check_unreduced(*, is_reduced: bool) -> None:
    """Raise UsageError for a backward between the sum of a step's gradients and the step."""
    if is_reduced:
        raise UsageError(
            "engine.backward after engine.full_gradients() or engine.reduce() and before "
            "engine.step(): the gradients of this step are summed up. Make all backwards before, "
            "or forget them by engine.zero_grad()."
        )


def check_loss(loss: Any, weight: float | Tensor | None = None) -> Tensor:
    """Return `loss`, a real floating scalar that gradients can flow from; UsageError for others.

    A loss of weight 0 needs no graph: it is replaced by a leaf, so that this rank takes part in
    whatever the others do in their backward.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"engine.backward takes the loss as a tensor, not {type(loss).__name__}: give it as "
            "it was computed, without .item() or float()."
        )
    if loss.numel() != 1:
        raise UsageError(
            f"engine.backward takes a scalar loss, not {tuple(loss.shape)}. Take the mean over the "
            "items of this batch: loss.mean(), or reduction='mean'."
        )
    if not loss.is_floating_point():
        raise UsageError(f"engine.backward takes a real floating loss, not {loss.dtype}.")
    # Reading a weight on a GPU waits for it, but only where there is no graph.
    if not loss.requires_grad and weight is not None and float(weight) == 0:
        return loss.detach().clone().requires_grad_()
    if not loss.requires_grad:
        raise UsageError(
            "This loss does not depend on any parameter (it was computed under no_grad, detached, "
            "or all parameters are frozen): compute it with gradients on. On a worker that has "
            "nothing to train on: engine.backward(loss, weight=0)."
        )
    return loss


def _known(world: World) -> str:
    """What all workers know: the loss of a step is its island's."""
    ours = "" if world.groups_apart > 1 else "engine.step().loss, "
    return f"{ours}sw.Metrics, world.any(flag)"


def check_calls(world: World, *, calls_differ: bool, rows_differ: bool) -> None:
    """Raise UsageError, on all ranks, where they have come to a step by different calls that all
    make alike; say it once where only what they have shared out differs. Collective then."""
    if not calls_differ and not rows_differ:
        return
    told = world.step_group.gather_plain(world.calls.made())
    made = [calls for calls, _ in told]
    if (apart := apart_in_calls(made)) is not None:
        raise UsageError(
            f"Workers have come to this step by different calls: since the last one {apart[1]}. "
            "world.draw and world.alike are called by all workers alike, or what they draw is no "
            "longer the same. Where a worker has left a loop before the others, by a number of "
            f"its own rows, let all decide by one that all know: {_known(world)}."
        )
    if calls_differ:
        world.calls.stop_counting_shares()
        world.say_once(
            "workers have trained on different numbers of batches since the last step: "
            f"{apart_in_shares(made)}. Where one has left a loop before the others, let all "
            f"decide by a number that all know: {_known(world)}."
        )
        return
    world.calls.stop_digesting()
    rank = _other_batch([rows for _, rows in told])
    lines = " and ".join(dict.fromkeys(line for call, line, _ in made[0] if call == SHARE))
    world.say_once(
        f"world.share ({lines}) was given another batch on worker {rank} than on worker 0, and it "
        "gives each its rows of what should be one: some rows are trained on twice, others never. "
        "Draw the batch alike: with world.alike(), or for batch in world.alike(loader). Where "
        "only an augmentation is each worker's own, nothing is amiss."
    )


def mixed_losses(losses: Sequence[Sequence[str]]) -> UsageError:
    """The error for a step whose `losses`, by worker, have no common weight."""
    return UsageError(
        "Losses of this step cannot be weighed by one number, so the result would not be that of "
        f"one process. {told(losses)}. A loss that is a mean over n items: engine.backward(loss, "
        "weight=n), in engine.forward_backward weight=lambda *batch: n. Terms that are means over "
        "different items: divide each by its items of all workers and micro-batches, and write "
        'engine.backward(a * n_a / world.sum(n_a) + b * n_b / world.sum(n_b), reduction="sum"). '
        'A loss that is a sum: reduction="sum". '
        "Sums beside means or penalties: make them means, or sums."
    )


def other_weights(losses: Sequence[Sequence[str]]) -> str:
    """What to say where `weight=` is not what the `losses`, by worker, are means over."""
    return (
        "weight= is not proportional to what these losses are means over, so that the result is "
        f"not that of one process: {told(losses)}. weight= counts as it is given."
    )


def told(losses: Sequence[Sequence[str]]) -> str:
    """Describe the losses of two workers that differ, or of one if all workers have the same."""
    other = next((n for n, each in enumerate(losses) if each != losses[0]), 0)
    chosen = [(n, losses[n]) for n in sorted({0, other})]
    return "; ".join(
        f"worker {number}: {', then '.join(list(dict.fromkeys(words))[:3]) or 'none'}"
        for number, words in chosen
    )


def _other_batch(rows: Sequence[float]) -> int:
    """The first rank with other rows than rank 0; where each is near to that, the furthest."""
    apart = [n for n, row in enumerate(rows) if not nearly_alike([rows[0], row])]
    return apart[0] if apart else max(range(len(rows)), key=lambda n: abs(rows[n] - rows[0]))


def check_embeddings(models: Sequence[nn.Module], placement: Placement, *, workers: int) -> None:
    """Raise ModelError for an embedding that renormalises its own weights in forward where other
    ranks would not see it."""
    if workers == 1 and not placement.is_sharded("parameters"):
        return
    for model in models:
        for name, module in model.named_modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
                continue
            if module.weight.requires_grad:
                shown = f"{name or type(module).__name__} (max_norm={module.max_norm:g})"
                raise ModelError(
                    f"{shown} rewrites in forward the rows that a worker looks up, so that "
                    f"{workers} worker(s) at {placement.name} would drift apart. Leave max_norm "
                    "out and clip the rows after engine.step(), inside "
                    "with engine.full_parameters(write=True); or start one worker at --zero 2 or "
                    "less."
                )


def check_block(*, averaged: bool, uneven: bool, whole: bool = False) -> None:
    """Raise UsageError for a backward inside `engine.ema()` or `engine.uneven()`, or of a split
    model inside `engine.full_parameters()`."""
    if whole:
        raise UsageError(
            "engine.backward inside engine.full_parameters(), where a model that is split over "
            "workers is whole on each of them: leave the block first."
        )
    if averaged:
        raise UsageError(
            "engine.backward inside engine.ema(): what it trains would be undone on leaving. "
            "Leave the block first."
        )
    if uneven:
        raise UsageError(
            "engine.backward inside engine.uneven(), where ranks run different numbers of "
            "forwards: leave the block first."
        )


def check_reachable(loss: Tensor, *, several: bool) -> None:
    """After a backward that brought nothing: raise where reentrant checkpointing hid it.

    With several engines, backward is given which parameters it is for, and torch then does not
    look inside segments of reentrant checkpointing.
    """
    nodes, seen = [loss.grad_fn] if several else [], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise UsageError(
                "No gradient reached this engine: with several engines, reentrant activation "
                "checkpointing hides the parameters inside it. Write "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        nodes.extend(child for child, _ in node.next_functions)


_DISTRIBUTED = {
    "ZeroRedundancyOptimizer": "optim.{inner}(params), and --zero 1 shards its state",
    "PostLocalSGDOptimizer": "optim.{inner}(params), and --islands N --equal-every H averages "
    "parameters every H steps",
    "DistributedOptimizer": "optim.Adam(params), and --pipeline P puts layers on other hosts",
}
"""By wrapper of torch.distributed that communicates by itself, what to write instead."""


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Raise ModelError for a wrapper of torch.distributed, which would exchange a second time what
    the engine exchanges."""
    classes = [c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.distributed.")]
    name = next((c.__name__ for c in classes if c.__name__ in _DISTRIBUTED), None)
    if name is None:
        return
    inner = getattr(optimizer, "_optim_constructor", None)  # of ZeroRedundancyOptimizer
    inner = inner or type(getattr(optimizer, "optim", None))
    shown = inner.__name__ if issubclass(inner, optim.Optimizer) else "AdamW"
    raise ModelError(
        f"{name} exchanges parameters between workers by itself, which the engine does too. Write "
        f"{_DISTRIBUTED[name].format(inner=shown)}."
    )


_HOOKS = "_shardwise_hooks"
_METHOD_HOOKS = "_shardwise_method_hooks"


@dataclass(frozen=True)
class OptimizerCallbacks:
    """What the hooks on a user's optimizer call in its engine: bound methods, held weakly.

    `welcome` gets each parameter group that is added to it. On one worker, `state_dict` makes its
    state_dict, `check` refuses another before anything is changed, and `take` lets the optimizer
    go on from that; on several these are the engine's own calls. `whole` is a block for one of its
    methods, in which it has what the method uses.
    """

    welcome: WeakMethod[Callable[[dict[str, Any]], None]]
    state_dict: WeakMethod[Callable[[optim.Optimizer], dict[str, Any]]]
    check: WeakMethod[Callable[[optim.Optimizer, dict[str, Any]], None]]
    take: WeakMethod[Callable[[optim.Optimizer, dict[str, Any]], None]]
    whole: WeakMethod[Callable[[optim.Optimizer, str], AbstractContextManager[None]]]
    alone: bool


def forbid(optimizer: optim.Optimizer, callbacks: OptimizerCallbacks) -> None:
    """Let `step` of the user's optimizer raise from now on, and its state be the engine's."""
    allow(optimizer)
    add = optimizer.add_param_group

    def add_param_group(param_group: dict[str, Any]) -> None:
        add(param_group)
        if (greet := callbacks.welcome()) is not None:
            greet(optimizer.param_groups[-1])

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    methods = [] if is_known(optimizer) else list(own_methods(optimizer))
    for name in methods:
        setattr(optimizer, name, _with_whole_state(optimizer, name, callbacks))
    setattr(optimizer, _METHOD_HOOKS, methods)
    state = _lent(optimizer, callbacks) if callbacks.alone else _refused(optimizer)
    setattr(optimizer, _HOOKS, [optimizer.register_step_pre_hook(_refuse_step), *state])


def _with_whole_state(
    optimizer: optim.Optimizer, name: str, callbacks: OptimizerCallbacks
) -> Callable[..., Any]:
    method = getattr(optimizer, name)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        block = callbacks.whole()
        with nullcontext() if block is None else block(optimizer, name):
            return method(*args, **kwargs)

    return call


def _refused(optimizer: optim.Optimizer) -> list[RemovableHandle]:
    return [
        optimizer.register_state_dict_pre_hook(_refuse_state_dict),
        optimizer.register_load_state_dict_pre_hook(_refuse_load),
    ]


def _lent(optimizer: optim.Optimizer, callbacks: OptimizerCallbacks) -> list[RemovableHandle]:
    """Let `state_dict` and `load_state_dict` be what they are without an engine."""
    given: list[dict[str, Any]] = []
    reaches: list[Any] = []

    def silence(optimizer: optim.Optimizer) -> None:
        # torch packs what is there without a copy of all state: `complete` adds that.
        state: Any = optimizer.state
        if isinstance(state, StateOfEngine):
            reaches[:] = [state.reach]
            state.reach = None

    def complete(optimizer: optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        while reaches:
            optimizer.state.reach = reaches.pop()  # type: ignore[attr-defined]
        make = callbacks.state_dict()
        return None if make is None else state | make(optimizer)

    def keep(optimizer: optim.Optimizer, state: dict[str, Any]) -> None:
        if (check := callbacks.check()) is not None:
            check(optimizer, state)
        given[:] = [state]

    def take(optimizer: optim.Optimizer) -> None:
        if (taken := callbacks.take()) is not None:
            taken(optimizer, given.pop())

    return [
        optimizer.register_state_dict_pre_hook(silence),
        optimizer.register_state_dict_post_hook(complete),
        optimizer.register_load_state_dict_pre_hook(keep),
        optimizer.register_load_state_dict_post_hook(take),
    ]


def allow(optimizer: optim.Optimizer) -> None:
    """Undo `forbid`."""
    for hook in optimizer.__dict__.pop(_HOOKS, []):
        hook.remove()
        optimizer.__dict__.pop("add_param_group", None)
    for name in optimizer.__dict__.pop(_METHOD_HOOKS, []):
        optimizer.__dict__.pop(name, None)


def call_before_step(optimizers: Sequence[optim.Optimizer]) -> None:
    """Call the step pre-hooks once a step: those of each optimizer, and torch's global ones.

    Raises UsageError for a hook that wants to change the arguments of `step`: there are none.
    """
    for optimizer in optimizers:
        ours = {handle.id for handle in optimizer.__dict__.get(_HOOKS, [])}
        for number, hook in pre_hooks(optimizer):
            if number not in ours and hook(optimizer, (optimizer,), {}) is not None:
                raise UsageError(
                    f"A step pre-hook of {type(optimizer).__name__} returned new arguments for "
                    "step(), which engine.step() calls without any. Let it return None."
                )


def call_after_step(optimizers: Sequence[optim.Optimizer]) -> None:
    """Call the step post-hooks once a step: those of each optimizer, and torch's global ones."""
    for optimizer in optimizers:
        for hook in post_hooks(optimizer):
            hook(optimizer, (optimizer,), {})


def mark_schedulers(optimizers: Sequence[optim.Optimizer]) -> None:
    """Leave the mark by which torch's schedulers know that a step came before their own."""
    for optimizer in optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]


def _refuse_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    raise UsageError(
        f"{type(optimizer).__name__}.step() by hand would update from gradients that are not "
        "averaged over the workers. Write stats = engine.step(max_norm=...) instead, or "
        "engine.step(closure=closure) (a GradScaler goes into sw.Engine(..., scaler=scaler))."
    )


def _refuse_state_dict(optimizer: optim.Optimizer) -> None:
    raise UsageError(
        f"The state of {type(optimizer).__name__} lies with the engine. Write "
        "engine.optimizer_state_dict(optimizer), on all ranks."
    )


def refuse_state(optimizer: optim.Optimizer) -> UsageError:
    """The error for a use of `optimizer.state` on one of several workers."""
    return UsageError(
        f"The state of {type(optimizer).__name__} is with the engine, and optimizer.state has none "
        "of it. To read it: engine.optimizer_state_dict(optimizer), on all ranks. To change it: "
        "engine.load_optimizer_state_dict(state, optimizer)."
    )


def _refuse_load(optimizer: optim.Optimizer, state: Any) -> None:
    raise UsageError(
        f"{type(optimizer).__name__}.load_state_dict after sw.Engine(...) would not reach the "
        "engine. Write engine.load_optimizer_state_dict(state, optimizer), on all ranks; or load "
        "it before the engine is made."
    )


_allows_names: ContextVar[bool] = ContextVar("allows_names", default=False)


@contextmanager
def names_only() -> Iterator[None]:
    """Inside the block `state_dict()` of a sharded module gives its names: for code that is given
    the whole weights and looks up which of them belong to a module. The values raise at any use."""
    token = _allows_names.set(True)
    try:
        yield
    finally:
        _allows_names.reset(token)


def refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A hook on modules whose parameters are sharded: their state_dict would hold NaN."""
    del prefix, keep_vars
    if is_sharded(module) and not _allows_names.get():
        raise sharded_copy(f"A parameter of {type(module).__name__}")


def refuse_load_state_dict(module: nn.Module, state: Any, *_: Any) -> None:
    """A hook on modules whose parameters are sharded: loading would reach nothing."""
    if is_sharded(module):
        raise UsageError(
            f"{type(module).__name__}.load_state_dict after sharding would not reach the parts "
            "that ranks hold. Load before sw.Engine(...), or inside "
            "with engine.full_parameters(write=True)."
        )
