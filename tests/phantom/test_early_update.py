"""One device: the update is launched before the host reads the step's totals."""

import contextlib
import math

import pytest
import torch

import shardwise as sw
from shardwise.engine.step import StepRunner
from shardwise.engine.step_statistics import StepReport
from shardwise.errors import NonFiniteError, UsageError
from tests.phantom import cases

CASES = {
    "no clipping": ({}, {}),
    "clipped": ({}, {"max_norm": 0.05}),
    "clipped in ZERO_3": ({"zero": 3}, {"max_norm": 0.05}),
    "loss scale": ({"precision": "fp16-mixed"}, {"max_norm": 0.05}),
    "masters": ({"precision": "bf16"}, {"max_norm": 0.05}),
}


def trained(world, settings, options, *, early, weights=(5.0, 3.0), poison=None, passes=1):
    """Train three steps; return parameters, state, statistics and what the step waited for.

    `poison` is a pair of a step and the value that multiplies its loss.
    """
    from tests.phantom.streams import Device

    world.engines = 0
    torch.manual_seed(0)
    model = cases.Model().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    engine = sw.Engine(model, optimizer, **settings)
    assert StepRunner._updates_early
    found, waiting = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRunner, "_updates_early", early)
        for step in range(4):
            for number in range(passes):
                x, y = cases.batch(world, step + number)
                loss = cases.loss_of(model, x.float(), y)
                if poison is not None and step == poison[0]:
                    loss = loss * poison[1]
                engine.backward(loss, weight=weights[step % 2])
            Device.order.begin()
            waits = []
            synchronise = Device.order.synchronize

            def noted(seen, why, waits=waits, synchronise=synchronise):
                # The update has begun if its kernel was launched.
                waits.append(any("fused_adam" in name for name in Device.order.kernels))
                synchronise(seen, why)

            patch.setattr(Device.order, "synchronize", noted)
            error = contextlib.nullcontext()
            if poison is not None and step == poison[0] and not math.isfinite(poison[1]):
                error = pytest.raises(NonFiniteError)
            if settings.get("nonfinite", "stop") != "stop" or "fp16" in str(settings):
                error = contextlib.nullcontext()
            with error:
                found.append(engine.step(**options))
            patch.setattr(Device.order, "synchronize", synchronise)
            waiting.append(waits)
    with engine.full_parameters():
        values = [p.detach().cpu().clone() for p in model.parameters()]
    steps = [
        value.cpu().clone()
        for inner in engine._states.optimizer.inners
        for state in inner.inner.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    engine.close()
    return values, steps, found, waiting


def compared(world, settings, options, others=None):
    """Train with and without an early update; return whether all is equal, and the waits."""
    others = others or {}
    ours = trained(world, settings, options, early=True, **others)
    theirs = trained(world, settings, options, early=False, **others)
    for one, other in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        assert torch.equal(one, other)
    assert repr(ours[2]) == repr(theirs[2])  # NaN differs from itself
    return ours[3], theirs[3]


@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_an_update_after_the_totals(phantom, case):
    ((ours, theirs),) = phantom(1, compared, *CASES[case])
    # The first step creates the optimizer's state.
    assert [waits[:1] for waits in ours] == [[False], [True], [True], [True]]
    assert [waits[:1] for waits in theirs] == [[False]] * 4


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_device_skips_a_step_that_is_not_finite(phantom, nonfinite):
    options = {"nonfinite": nonfinite}
    ((ours, _),) = phantom(1, compared, options, {"max_norm": 0.05}, {"poison": (2, math.inf)})
    assert ours[2][:1] == [True]


def test_squares_that_overflow_are_summed_again(phantom):
    """The gradient is finite, but not its norm in fp32: the host updates after all."""
    ((ours, _),) = phantom(1, compared, {}, {"max_norm": 0.05}, {"poison": (2, 1e22)})
    assert ours[2][:1] == [True]


def weighed_on_the_device(world, passes=1):
    weights = [torch.tensor(float(n), device=world.device) for n in (5, 0)]
    return compared(world, {}, {"max_norm": 0.05}, {"weights": weights, "passes": passes})


def test_weight_on_the_device(phantom):
    """The second and the fourth step have no items, so they change nothing."""
    ((ours, _),) = phantom(1, weighed_on_the_device)
    assert [waits[:1] for waits in ours] == [[False], [True], [True], [True]]


def test_several_weights_on_the_device_are_read_first(phantom):
    ((ours, _),) = phantom(1, weighed_on_the_device, 2)
    assert not any(any(waits) for waits in ours)


def piped(world, early):
    """Train two stages with clipping; return the losses, norms and parameters of this stage."""
    world.engines = 0
    torch.manual_seed(0)
    model = cases.Model().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRunner, "_updates_early", early)
        engine = sw.Engine(model, optimizer)
        for step in range(3):
            x, y = cases.batch(world, step)
            engine.forward_backward(
                lambda x, y: torch.nn.functional.cross_entropy(model(x), y), x.float(), y
            )
            stats = engine.step(max_norm=0.05)
            found += [stats.loss, stats.grad_norm]
        found += [float(p.detach().double().sum()) for p in model.parameters() if p.numel()]
        engine.close()
    return found


def test_stages_of_a_pipeline_clip_by_the_norm_of_all(phantom):
    early, late = (phantom(2, piped, early, pipeline=2) for early in (True, False))
    assert early == late


def interrupted(world):
    """Interrupt a step that waits for the totals, and call it again."""
    model = cases.Model().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = sw.Engine(model, optimizer)
    for step in range(2):
        x, y = cases.batch(world, step)
        engine.backward(cases.loss_of(model, x.float(), y), weight=8.0)
        if step == 0:
            engine.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepReport, "totals_of_one", totals := StepReport.totals_of_one)

        def interrupt(report, aggregation):
            if report.squared_norm.item():
                raise KeyboardInterrupt
            return totals(report, aggregation)

        patch.setattr(StepReport, "totals_of_one", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(UsageError, match="call backward first"):
        engine.step()
    (inner,) = engine._states.optimizer.inners
    counts = [float(state["step"]) for state in inner.inner.state.values()]
    engine.close()
    return set(counts)


def test_interrupted_step_is_not_applied_twice(phantom):
    assert phantom(1, interrupted) == [{2.0}]


def hooked(world):
    """Return the waits of a step whose optimizer has a pre-hook of a user."""
    from tests.phantom.streams import Device

    model = cases.Model().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(any("fused_adam" in name for name in Device.order.kernels))
    )
    engine = sw.Engine(model, optimizer)
    for step in range(2):
        x, y = cases.batch(world, step)
        engine.backward(cases.loss_of(model, x.float(), y), weight=8.0)
        Device.order.begin()
        engine.step()
    engine.close()
    return seen


def test_pre_hooks_run_before_the_update(phantom):
    assert phantom(1, hooked) == [[False, False]]
