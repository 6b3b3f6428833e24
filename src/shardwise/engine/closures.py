"""Checks steps with a closure, which some optimizers call several times by themselves."""

from __future__ import annotations

from shardwise.engine.build import States
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.loss_accumulation import LossAccumulation
from shardwise.errors import UsageError


def check(
    spec: EngineSpec, states: States, accumulation: LossAccumulation, *, scaled: bool
) -> None:
    """Raise UsageError where a step cannot be made with a closure; `scaled` where there is a loss
    scale."""
    if accumulation.backwards:
        raise UsageError(
            "engine.step(closure=...) after engine.backward: the closure makes the backwards of "
            "its step itself. Leave the other one out, or forget it by engine.zero_grad()."
        )
    if not asks_often(states):
        _check_known(states)
        return
    names = " and ".join(type(optimizer).__name__ for optimizer in spec.optimizers)
    if spec.staleness is not None:
        raise UsageError(
            f"{names} calls the closure to know the gradient where it stands, and with --behind "
            f"{spec.settings.behind} it would be of weights from before. Leave --behind out, or "
            "take another optimizer, such as AdamW."
        )
    if len(states.optimizer.inners) != 1:
        raise UsageError(
            f"engine.step(closure=...) with {names}, which calls the closure as often as it wants: "
            "let it be the only optimizer of this engine, over parameters of one dtype, or give "
            "each an engine of its own."
        )
    if states.optimizer.has_masters:
        raise UsageError(
            f"{names} calls the closure between its own updates, and 16-bit parameters follow "
            "their masters only when all is done. Write --precision fp32 or bf16-mixed."
        )
    _check_no_skips(names, spec.settings.nonfinite, scaled=scaled)


def _check_no_skips(names: str, nonfinite: str, *, scaled: bool) -> None:
    """Raise UsageError where steps may be skipped: parameters have moved at the second evaluation,
    and the optimizer would go on with what is not finite."""
    why = (
        f"{names} moves parameters between evaluations, so a step cannot be skipped when one of "
        "them has no finite gradient."
    )
    if scaled:
        raise UsageError(
            f"engine.step(closure=...) with a loss scale: {why} Write --precision fp32 or "
            "bf16-mixed, without a GradScaler."
        )
    if nonfinite == "skip":
        raise UsageError(
            f"engine.step(closure=...) with --nonfinite skip: {why} Write --nonfinite stop, which "
            "says where it comes from."
        )


def asks_often(states: States) -> bool:
    """Whether an optimizer has all of its tensors in one call, so that a closure is its to call."""
    return any(group.together for group in states.optimizer.groups)


def check_given(states: States, *, given: bool) -> None:
    """Raise UsageError where an optimizer needs a closure and there is none."""
    for group in states.optimizer.groups:
        if group.kind.needs_closure and not given:
            name = type(group.optimizer).__name__
            raise UsageError(
                f"{name} evaluates the loss several times in a step: write a closure that "
                "computes it and calls engine.backward(loss), and engine.step(closure=closure)."
            )


def _check_known(states: States) -> None:
    """Of torch's element-wise optimizers each calls the closure once, before it updates."""
    for group in states.optimizer.groups:
        if not group.kind.known:
            raise UsageError(
                f"engine.step(closure=...) with {type(group.optimizer).__name__} where its state "
                "is sharded: how often it calls the closure is not known. Start with --zero 0; or "
                "call engine.backward(loss) and engine.step() without."
            )
