"""Raises errors for calls that would silently give wrong results, saying what to write instead."""

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

from shardwise.engine.loss_terms import FURTHER, graph_nodes
from shardwise.errors import ModelError, UsageError
from shardwise.layout.placement import Placement
from shardwise.model.optimizer_access import StateOfEngine, own_methods
from shardwise.states.optimizer.optimizer_kind import is_known
from shardwise.states.optimizer.optimizer_options import post_hooks, pre_hooks
from shardwise.states.parameters.parameters_at_rest import is_sharded, sharded_copy, why_at_rest
from shardwise.world.common_calls import (
    SHARE,
    describe_share_difference,
    find_call_difference,
    nearly_alike,
)
from shardwise.world.world import World


def stray_backward(name: str) -> UsageError:
    """Return the error for a plain `loss.backward()` that reached the parameter called `name`."""
    return UsageError(
        f"loss.backward() reached {name} without the engine, so its gradient would never be "
        "averaged over the workers. Write engine.backward(loss) instead; with Accelerate or Fabric "
        "their backward(loss), in a LightningModule self.manual_backward(loss)."
    )


def cleared_gradients() -> UsageError:
    """Return the error for gradients that were cleared between backward and step."""
    return UsageError(
        "Gradients were cleared between engine.backward and engine.step, by zero_grad() or "
        "param.grad = None. That does not clear the gradients that are already being reduced. "
        "engine.step() clears all of them: remove zero_grad(), or call it before backward. To "
        "discard this step's gradients, call engine.zero_grad()."
    )


def check_unreduced(*, is_reduced: bool) -> None:
    """Raise UsageError if a backward pass follows the reduction of the step's gradients."""
    if is_reduced:
        raise UsageError(
            "engine.backward after engine.full_gradients() or engine.reduce() and before "
            "engine.step(): the gradients of this step are already summed over the workers. Call "
            "engine.backward before that, or discard the gradients with engine.zero_grad()."
        )


def check_loss(loss: Any, weight: float | Tensor | None = None) -> Tensor:
    """Return `loss`. Raises UsageError unless it is a floating-point scalar with a graph.

    A loss with weight 0 needs no graph. A leaf then takes its place, so that this rank still
    participates in the collectives of other ranks' backward passes.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"engine.backward takes the loss as a tensor, not {type(loss).__name__}: pass it as "
            "it was computed, without .item() or float()."
        )
    if loss.numel() != 1:
        raise UsageError(
            f"engine.backward takes a scalar loss, not a tensor of shape {tuple(loss.shape)}. "
            "Take the mean over the items of this batch: loss.mean(), or reduction='mean'."
        )
    if not loss.is_floating_point():
        raise UsageError(f"engine.backward takes a real floating loss, not {loss.dtype}.")
    # Read the weight only if the loss has no graph: float(weight) synchronises with the GPU.
    if not loss.requires_grad and weight is not None and float(weight) == 0:
        return loss.detach().clone().requires_grad_()
    if not loss.requires_grad:
        raise UsageError(
            "This loss does not depend on any parameter (it was computed under no_grad, detached, "
            "or all parameters are frozen): compute it with gradients on. On a worker that has "
            "nothing to train on: engine.backward(loss, weight=0)."
        )
    return loss


def _shared_values(world: World) -> str:
    """Return examples, for error messages, of values that are the same on all workers."""
    # With islands, losses differ between islands.
    loss = "" if world.groups_apart > 1 else "engine.step().loss, "
    return f"{loss}sw.Metrics, world.any(flag)"


def check_calls(world: World, *, calls_differ: bool, rows_differ: bool) -> None:
    """Raise UsageError on all ranks if their calls to `draw` or `alike` differ.

    If only the batches passed to `share` differ, warn once instead, because that may be intended.
    Collective if either flag is true. Both flags must be the same on all ranks.
    """
    if not calls_differ and not rows_differ:
        return
    gathered = world.step_group.gather_plain(world.calls.report())
    calls_of_ranks = [calls for calls, _ in gathered]
    if (difference := find_call_difference(calls_of_ranks)) is not None:
        raise UsageError(
            f"Workers made different calls before this step: since the last one {difference[1]}. "
            "Every worker must call world.draw and world.alike the same number of times, or they "
            "draw different numbers. If a worker left a loop early because of its own rows, "
            f"decide with a value that all workers share: {_shared_values(world)}."
        )
    # Each warning is printed once: afterwards its check is off, on all ranks from the same step on.
    if calls_differ:
        world.calls.stop_counting_shares()
        world.say_once(
            "workers have trained on different numbers of batches since the last step: "
            f"{describe_share_difference(calls_of_ranks)}. If one of them left a loop early, let "
            f"all workers decide by a value that they share: {_shared_values(world)}."
        )
        return
    world.calls.stop_digesting()
    # Name the first rank whose rows differ from rank 0's. If all ranks are within the tolerance of
    # rank 0, two other ranks differ from each other; then name the rank furthest from rank 0.
    digests = [rows for _, rows in gathered]
    apart = [n for n, each in enumerate(digests) if not nearly_alike([digests[0], each])]
    furthest = max(range(len(digests)), key=lambda n: abs(digests[n] - digests[0]))
    rank = apart[0] if apart else furthest
    lines = " and ".join(
        dict.fromkeys(line for call, line, _ in calls_of_ranks[0] if call == SHARE)
    )
    world.say_once(
        f"world.share ({lines}) got another batch on worker {rank} than on worker 0, but each "
        "worker takes only its own rows of it: some rows are trained on twice, others never. Draw "
        "the same batch on all workers: with world.alike(), or for batch in world.alike(loader). "
        "Ignore this if only the augmentation differs between workers."
    )


def mixed_losses(losses: Sequence[Sequence[str]]) -> UsageError:
    """Return the error for a step whose losses cannot each be weighted by a single number.

    `losses` contains descriptions of each worker's losses.
    """
    words = "Losses of this step cannot be weighted by one number, so the result would differ from "
    words += f"a single process. {describe_losses(losses)}."
    counts = {description.count(FURTHER) for each in losses for description in each}
    if len(counts) > 1:
        return UsageError(
            f"{words} Some batches of the step have a further loss and others do not, so it is "
            "unclear whether it is a mean over the items of these batches or of the whole step. "
            "For a mean over the whole step, pass the n items of each batch: "
            "engine.backward(loss, weight=n), then engine.backward(further, weight=n, "
            "same_items=True). For a mean over these batches only, count the N items of each loss "
            "on all workers and micro-batches, and write "
            'engine.backward(loss * n / N, reduction="sum") for every loss of the step.'
        )
    return UsageError(
        f"{words} For a loss that is a mean over n items, write "
        "engine.backward(loss, weight=n), or in engine.forward_backward weight=lambda *batch: n. "
        "If its terms are means over different items, divide each by the number of its items on "
        "all workers and micro-batches: engine.backward(a * n_a / world.sum(n_a) + b * n_b / "
        'world.sum(n_b), reduction="sum"). For a loss that is a sum: reduction="sum". If sums are '
        "mixed with means or penalties, make all of them means, or all of them sums."
    )


def other_weights(losses: Sequence[Sequence[str]]) -> str:
    """Return the warning for a `weight=` that differs from the number of items in a loss's graph.

    `losses` contains descriptions of each worker's losses.
    """
    return (
        "weight= is not proportional to the number of items that these losses are means over, so "
        f"the result differs from a single process: {describe_losses(losses)}. The step uses "
        "weight= as passed."
    )


def describe_losses(losses: Sequence[Sequence[str]]) -> str:
    """Describe two workers' losses if they differ, or one worker's if all workers' are the same."""
    known = [n for n, each in enumerate(losses) if each] or [0]  # of a pipeline, the last stages
    other = next((n for n in known if losses[n] != losses[known[0]]), known[0])
    chosen = [(n, losses[n]) for n in sorted({known[0], other})]

    def shown(descriptions: Sequence[str]) -> list[str]:
        unique = list(dict.fromkeys(descriptions))
        # A further loss is the reason for the error, so show one even if it is in a late batch.
        further = [each for each in unique if FURTHER in each]
        return list(dict.fromkeys([*unique[:2], *further[:1], *unique[2:]]))[:3]

    return "; ".join(
        f"worker {number}: {', then '.join(shown(words)) or 'none'}" for number, words in chosen
    )


def check_embeddings(models: Sequence[nn.Module], placement: Placement, *, workers: int) -> None:
    """Raise ModelError for embeddings with `max_norm`, which rescale weights in the forward pass.

    Does nothing for a single worker with unsharded parameters.
    """
    # A single worker with unsharded parameters updates the only copy, as in plain PyTorch.
    if workers == 1 and not placement.is_sharded("parameters"):
        return
    for model in models:
        for name, module in model.named_modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
                continue
            if module.weight.requires_grad:
                shown = f"{name or type(module).__name__} (max_norm={module.max_norm:g})"
                why = (
                    f"so {workers} workers would drift apart"
                    if workers > 1
                    else f"but {placement.name} gives it a temporary copy of them"
                )
                raise ModelError(
                    f"{shown} rescales in forward the rows that a worker looks up, {why}. Remove "
                    "max_norm and clip the rows after engine.step(), inside with "
                    "engine.full_parameters(write=True); or start one worker at --zero 2 or less."
                )


def check_block(*, averaged: bool, uneven: bool, whole: bool = False) -> None:
    """Raise UsageError if a backward pass runs inside a block that does not allow it.

    Args:
        averaged: True inside a block that swaps in averages or the anchor.
        uneven: True inside `engine.uneven()`.
        whole: True inside `engine.full_parameters()` of a split model.
    """
    if whole:
        raise UsageError(
            "engine.backward inside engine.full_parameters(): the block gathers a split model, "
            "and gradients of the full layers cannot be added to its parts. Leave the block "
            "first."
        )
    if averaged:
        raise UsageError(
            "engine.backward inside engine.ema(): leaving the block would undo the training. "
            "Leave the block first."
        )
    if uneven:
        raise UsageError(
            "engine.backward inside engine.uneven(): ranks run different numbers of forwards "
            "there, and a backward needs all of them. Leave the block first."
        )


def check_reachable(loss: Tensor, *, several: bool) -> None:
    """Raise UsageError if reentrant checkpointing hid the parameters from a backward pass.

    Call this if a backward pass has computed no gradients. With several engines,
    `torch.autograd.backward` is called with `inputs=`, and torch then does not look inside
    reentrant checkpoints.
    """
    # Walk the graph only after a backward pass without gradients: a large graph takes milliseconds.
    for node in graph_nodes(loss) if several else ():
        if node.name() == "CheckpointFunctionBackward":
            raise UsageError(
                "No gradient reached this engine: with several engines, reentrant activation "
                "checkpointing hides the parameters inside it. Write "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )


_DISTRIBUTED = {
    "ZeroRedundancyOptimizer": "optim.{inner}(params), and --zero 1 shards its state",
    "PostLocalSGDOptimizer": "optim.{inner}(params), and --islands N --equal-every H averages "
    "parameters every H steps",
    "DistributedOptimizer": "optim.Adam(params), and --pipeline P puts layers on other hosts",
}
"""Maps torch.distributed's communicating optimizer wrappers to the suggested replacement."""


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Raise ModelError if `optimizer` is a torch.distributed wrapper that itself communicates."""
    classes = [c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.distributed.")]
    name = next((c.__name__ for c in classes if c.__name__ in _DISTRIBUTED), None)
    if name is None:
        return
    inner = getattr(optimizer, "_optim_constructor", None)  # of ZeroRedundancyOptimizer
    inner = inner or type(getattr(optimizer, "optim", None))
    shown = inner.__name__ if issubclass(inner, optim.Optimizer) else "AdamW"
    raise ModelError(
        f"{name} exchanges parameters between workers, which the engine already does. Write "
        f"{_DISTRIBUTED[name].format(inner=shown)}."
    )


_HOOKS = "_shardwise_hooks"
_METHOD_HOOKS = "_shardwise_method_hooks"


@dataclass(frozen=True)
class OptimizerCallbacks:
    """The engine's methods that hooks on a user's optimizer call, as weak references.

    `welcome`     prepares a parameter group that was added
    `state_dict`  builds the optimizer's state_dict (one worker only)
    `check`       raises if a state_dict does not fit, before anything changes (one worker only)
    `take`        loads a state_dict (one worker only)
    `whole`       context manager that gives the optimizer its full state while a method runs
    `alone`       True with one worker; several workers must call the engine's methods instead
    """

    welcome: WeakMethod[Callable[[dict[str, Any]], None]]
    state_dict: WeakMethod[Callable[[optim.Optimizer], dict[str, Any]]]
    check: WeakMethod[Callable[[optim.Optimizer, dict[str, Any]], None]]
    take: WeakMethod[Callable[[optim.Optimizer, dict[str, Any]], None]]
    whole: WeakMethod[Callable[[optim.Optimizer, str], AbstractContextManager[None]]]
    alone: bool


def forbid(optimizer: optim.Optimizer, callbacks: OptimizerCallbacks) -> None:
    """Make `optimizer.step` raise, and redirect the optimizer's other methods to the engine."""
    allow(optimizer)  # remove the hooks of an earlier engine
    add = optimizer.add_param_group

    def add_param_group(param_group: dict[str, Any]) -> None:
        add(param_group)
        if (greet := callbacks.welcome()) is not None:
            greet(optimizer.param_groups[-1])

    # torch has no hook for add_param_group, so replace the method on this object.
    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    # torch's own optimizers have no further methods that read state.
    methods = [] if is_known(optimizer) else list(own_methods(optimizer))
    for name in methods:
        setattr(optimizer, name, _with_whole_state(optimizer, name, callbacks))
    # `allow` deletes these attributes, which uncovers the class's own methods.
    setattr(optimizer, _METHOD_HOOKS, methods)
    if callbacks.alone:
        state = _serve_state_dict(optimizer, callbacks)
    else:
        state = [
            optimizer.register_state_dict_pre_hook(_refuse_state_dict),
            optimizer.register_load_state_dict_pre_hook(_refuse_load),
        ]
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


def _serve_state_dict(
    optimizer: optim.Optimizer, callbacks: OptimizerCallbacks
) -> list[RemovableHandle]:
    """Make the optimizer's `state_dict` and `load_state_dict` work as they do without an engine."""
    loading: list[dict[str, Any]] = []
    reaches: list[Any] = []

    def silence(optimizer: optim.Optimizer) -> None:
        # torch reads optimizer.state, which would copy all state out of the engine. Disable that
        # until `complete`, which builds the state_dict itself.
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
        loading[:] = [state]  # torch does not pass it to the post hook

    def take(optimizer: optim.Optimizer) -> None:
        if (load := callbacks.take()) is not None:
            load(optimizer, loading.pop())

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


def has_pre_hooks(optimizers: Sequence[optim.Optimizer]) -> bool:
    """Return whether there are step pre-hooks of users, of an optimizer or of all of them."""
    return any(_users_pre_hooks(optimizer) for optimizer in optimizers)


def _users_pre_hooks(optimizer: optim.Optimizer) -> list[Any]:
    # Without our own pre-hook, which raises if the user calls step().
    ours = {handle.id for handle in optimizer.__dict__.get(_HOOKS, [])}
    return [hook for number, hook in pre_hooks(optimizer) if number not in ours]


def call_before_step(optimizers: Sequence[optim.Optimizer]) -> None:
    """Call the step pre-hooks of each optimizer, and torch's global ones.

    Raises UsageError if a hook returns new arguments for `step`, because `engine.step` passes none.
    """
    for optimizer in optimizers:
        for hook in _users_pre_hooks(optimizer):
            if hook(optimizer, (optimizer,), {}) is not None:
                raise UsageError(
                    f"A step pre-hook of {type(optimizer).__name__} returned new arguments for "
                    "step(), which engine.step() calls without arguments. Return None from it."
                )


def call_after_step(optimizers: Sequence[optim.Optimizer]) -> None:
    """Call the step post-hooks of each optimizer, and torch's global ones."""
    for optimizer in optimizers:
        for hook in post_hooks(optimizer):
            hook(optimizer, (optimizer,), {})


def mark_schedulers(optimizers: Sequence[optim.Optimizer]) -> None:
    """Tell torch's learning-rate schedulers that the optimizers have stepped."""
    # Otherwise they warn that `scheduler.step()` was called before `optimizer.step()`.
    for optimizer in optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]


def _refuse_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    raise UsageError(
        f"{type(optimizer).__name__}.step() would use gradients that are not averaged over the "
        "workers. Write stats = engine.step(max_norm=...) instead, or "
        "engine.step(closure=closure) (a GradScaler goes into sw.Engine(..., scaler=scaler))."
    )


def _refuse_state_dict(optimizer: optim.Optimizer) -> None:
    raise UsageError(
        f"The engine holds the state of {type(optimizer).__name__}. Write "
        "engine.optimizer_state_dict(optimizer), on all ranks."
    )


def refuse_state(optimizer: optim.Optimizer) -> UsageError:
    """Return the error to raise when `optimizer.state` is used with several workers."""
    return UsageError(
        f"The engine holds the state of {type(optimizer).__name__}, so optimizer.state is empty. "
        "To read it: engine.optimizer_state_dict(optimizer), on all ranks. To change it: "
        "engine.load_optimizer_state_dict(state, optimizer)."
    )


def _refuse_load(optimizer: optim.Optimizer, state: Any) -> None:
    raise UsageError(
        f"{type(optimizer).__name__}.load_state_dict after sw.Engine(...) would not reach the "
        "engine. Write engine.load_optimizer_state_dict(state, optimizer), on all ranks; or load "
        "it before the engine is created."
    )


_allows_names: ContextVar[bool] = ContextVar("allows_names", default=False)


@contextmanager
def names_only() -> Iterator[None]:
    """Allow `state_dict()` of sharded modules inside the block, but only to read the names.

    Code that has the full weights uses this block to find the names of a module's weights. Any use
    of the values raises.
    """
    token = _allows_names.set(True)
    try:
        yield
    finally:
        _allows_names.reset(token)


def refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Module hook: raise if `state_dict` is called on a sharded module, whose values are NaN."""
    del prefix, keep_vars
    if is_sharded(module) and not _allows_names.get():
        # Raise instead of gathering, because state_dict on a single rank would hang.
        raise sharded_copy(f"A parameter of {type(module).__name__}", why_at_rest(module))


def refuse_load_state_dict(module: nn.Module, state: Any, *_: Any) -> None:
    """Module hook: raise if `load_state_dict` is called on a sharded module.

    The call would not change the shards.
    """
    if is_sharded(module):
        raise UsageError(
            f"{type(module).__name__}.load_state_dict would not change the weights of the engine: "
            f"a parameter is {why_at_rest(module)}. Load before sw.Engine(...), or inside "
            "with engine.full_parameters(write=True)."
        )


def refuse_another_engine(number: int) -> None:
    """Raise UsageError unless `number` is 0, because --survive supports only one engine."""
    if number:
        raise UsageError(
            "--survive supports one engine: after a loss, the steps of several engines cannot be "
            "repeated together. Pass all models and optimizers to one engine, or start without "
            "--survive."
        )
