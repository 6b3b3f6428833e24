"""Checks whether a step may use a closure, which some optimizers (L-BFGS) call several times."""

from __future__ import annotations

from shardwise.engine.build import States
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.loss_accumulation import LossAccumulation
from shardwise.errors import UsageError


def check(
    spec: EngineSpec, states: States, accumulation: LossAccumulation, *, scaled: bool
) -> None:
    """Raise UsageError if this step cannot use a closure.

    `scaled` is True if there is a loss scale.
    """
    # The gradients of earlier backward passes would be added to the closure's.
    if accumulation.backwards:
        raise UsageError(
            "engine.step(closure=...) was called after engine.backward, but the closure calls "
            "engine.backward itself. Remove the other call, or discard its gradients with "
            "engine.zero_grad()."
        )
    if not may_call_repeatedly(states):
        _check_known(states)
        return
    names = " and ".join(type(optimizer).__name__ for optimizer in spec.optimizers)
    if spec.staleness is not None:
        raise UsageError(
            f"{names} calls the closure for the gradient at the current weights, but with --behind "
            f"{spec.settings.behind} gradients are for earlier weights. Remove --behind, or "
            "use another optimizer, such as AdamW."
        )
    # Each inner optimizer would call the closure at different values of the others' parameters.
    if len(states.optimizer.inners) != 1:
        raise UsageError(
            f"engine.step(closure=...) with {names}, which may call the closure several times: it "
            "must be the only optimizer of this engine, over parameters of one dtype. Create one "
            "engine per optimizer."
        )
    if states.optimizer.has_masters:
        raise UsageError(
            f"{names} calls the closure between its own updates, but 16-bit parameters are copied "
            "from their fp32 masters only after the step. Write --precision fp32 or bf16-mixed."
        )
    # At the second evaluation parameters have already been updated, so the step cannot be undone.
    why = (
        f"{names} moves parameters between evaluations, so a step cannot be skipped when the "
        "gradient of one of them is not finite."
    )
    if scaled:
        raise UsageError(
            f"engine.step(closure=...) with a loss scale: {why} Write --precision fp32 or "
            "bf16-mixed, without a GradScaler."
        )
    if spec.settings.nonfinite == "skip":
        raise UsageError(
            f"engine.step(closure=...) with --nonfinite skip: {why} Write --nonfinite stop, which "
            "names the parameter and the rank."
        )


def may_call_repeatedly(states: States) -> bool:
    """Return whether an optimizer updates all tensors together, and so may repeat the closure."""
    return any(group.together for group in states.optimizer.groups)


def check_given(states: States, *, given: bool) -> None:
    """Raise UsageError if an optimizer needs a closure and none was `given`."""
    for group in states.optimizer.groups:
        if group.kind.needs_closure and not given:
            name = type(group.optimizer).__name__
            raise UsageError(
                f"{name} evaluates the loss several times per step: write a closure that "
                "computes it and calls engine.backward(loss), and engine.step(closure=closure)."
            )


def _check_known(states: States) -> None:
    """Raise UsageError unless all optimizers are torch's own."""
    # torch's elementwise optimizers call the closure once, before the update.
    for group in states.optimizer.groups:
        if not group.kind.known:
            raise UsageError(
                f"engine.step(closure=...) with {type(group.optimizer).__name__} is not "
                "supported, because its state is sharded and the number of times that it calls "
                "the closure is unknown. Start with --zero 0, or call engine.backward(loss) and "
                "engine.step() without a closure."
            )
