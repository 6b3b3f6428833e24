"""The guard finds flipped bits and wrong computations, and names rank and tensor."""

import time
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.config import Settings
from shardwise.config.effect import OF_AN_ENGINE
from shardwise.errors import ConfigError, GuardError, NonFiniteError
from shardwise.guard.engine_guard import check
from shardwise.guard.memory import pieces_of
from shardwise.timeline import recorder

EVERY = 4


class Wrong(torch.autograd.Function):
    """Adds an error to a result, or to a gradient, in the first of two runs only."""

    @staticmethod
    def forward(ctx, x, faults):
        ctx.faults = faults
        return x + 1 if faults.forward.pop(0) else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad + 1 if ctx.faults.backward.pop(0) else grad), None


class Faults(nn.Module):
    """Passes its input on, with errors in the calls that are listed."""

    forward_errors = ()

    def __init__(self):
        super().__init__()
        self.faults = type("Lists", (), {"forward": [], "backward": []})()

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        for listed in (self.faults.forward, self.faults.backward):
            listed.extend([False] * (2 - len(listed)))
        return Wrong.apply(x, self.faults)


class Model(nn.Module):
    """A model with a buffer, BatchNorm, dropout and a counter."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.faults, self.last = Faults(), nn.Linear(8, 2)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(self.faults(self.drop(self.norm(self.first(x))))) * self.scale[0]


def started(world, zero, **settings):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer, zero=zero, guard=EVERY, quiet=True, **settings)
    return model, engine


def train(world, model, engine, steps, before=None):
    """Make `steps` steps, and return the losses. `before` is called with each step's number."""
    losses = []
    for _ in range(steps):
        number = engine.steps + 1
        if before is not None:
            before(number)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number * 7 + world.rank))
        engine.backward(model(x).square().mean())
        losses.append(engine.step().loss)
    return losses


def flip(engine, kind, place=0, bit=30):
    """Flip a bit of the first piece of `kind`, as a defect in memory does, and return its name."""
    state = engine._state
    piece = next(p for p in pieces_of(state.spec, state.states) if p.kind == kind and p.names)
    name, first, _ = piece.names[0]
    piece.flat.numpy().view(np.uint32)[first + place] ^= np.uint32(1 << bit)
    return name


def caught(world, zero, kind, victim, steps, settings):
    model, engine = started(world, zero, **settings)
    flipped = []

    def before(number):
        if number == EVERY + 2 and world.rank == victim:
            flipped.append(flip(engine, kind))

    with pytest.raises(GuardError) as error:
        train(world, model, engine, steps, before)
    engine.close()
    return str(error.value), error.value.at_fault, engine.steps, flipped


@pytest.mark.parametrize("kind", ["parameter", "optimizer state"])
def test_copies_name_the_rank_that_differs(group, kind):
    for message, at_fault, steps, _ in group(3)(caught, 0, kind, 1, 2 * EVERY, {}):
        assert at_fault == (1,)
        assert steps == 2 * EVERY
        assert kind in message
        assert "rank 1" in message


@pytest.mark.parametrize(
    ("zero", "kind"),
    [(0, "parameter"), (1, "optimizer state"), (2, "parameter"), (3, "parameter")],
)
def test_memory_check_names_the_rank_where_there_is_no_copy(group, zero, kind):
    results = group(2)(caught, zero, kind, 1, 2 * EVERY, {"guard_memory": True})
    (name,) = results[1][3]
    for message, at_fault, _, _ in results:
        assert at_fault == (1,)
        assert f"step {EVERY + 2}: {kind} {name}" in message


def restored(world):
    model, engine = started(world, 0, guard_action="restore")

    def before(number):
        if number == EVERY + 3 and world.rank == 2:
            flip(engine, "parameter")

    train(world, model, engine, 3 * EVERY, before)
    values = [p.detach().clone() for p in model.parameters()]
    engine.close()
    return values


def test_restore_makes_copies_equal_again(group):
    first, *others = group(3)(restored)
    for other in others:
        assert all(map(torch.equal, first, other))


def computed_wrong(world, zero, way):
    model, engine = started(world, zero)

    def before(number):
        # The first of the two runs of the step that is computed twice.
        if number == EVERY and world.rank == 1:
            getattr(model.faults.faults, way).append(True)

    with pytest.raises(GuardError) as error:
        train(world, model, engine, EVERY, before)
    engine.close()
    return str(error.value), error.value.at_fault


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize(("way", "kind"), [("forward", "forward pass"), ("backward", "gradient")])
def test_second_run_names_the_rank_that_computes_wrongly(group, zero, way, kind):
    for message, at_fault in group(2)(computed_wrong, zero, way):
        assert at_fault == (1,)
        assert f"{kind} " in message


def clean(world, zero, guard):
    torch.manual_seed(0)
    model = Model()
    seen = []
    model.first.register_forward_hook(lambda *_: seen.append("forward"))
    model.last.weight.register_hook(lambda grad: seen.append("gradient"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"guard": 2, "guard_memory": True} if guard else {}
    engine = sw.Engine(model, optimizer, zero=zero, quiet=True, **settings)
    losses = train(world, model, engine, 6)
    drawn = torch.rand(1).item()
    buffers = [b.tolist() for b in model.buffers()]
    engine.close()
    return losses, drawn, buffers, model.calls, seen.count("forward"), seen.count("gradient")


@pytest.mark.parametrize("zero", [0, 3])
def test_guard_leaves_no_trace(group, zero):
    """Losses, random numbers, BatchNorm's statistics, counters and users' hooks are the same."""
    assert group(2)(clean, zero, True) == group(2)(clean, zero, False)


@pytest.mark.parametrize("setting", ["exact", "pipeline", "tensor", "islands", "behind", "expert"])
def test_refuses_what_it_cannot_compare(setting):
    with pytest.raises(ConfigError, match="--guard 4 cannot be combined with"):
        check(Settings(guard=4, **{setting: 2}))


@pytest.mark.parametrize("name", ["guard_action", "guard_spikes", "guard_memory"])
def test_option_without_guard_has_no_effect(name):
    (need,) = (need for need in OF_AN_ENGINE if need.name == name)
    assert not need.holds(Settings())
    assert need.holds(Settings(guard=5))


def nan_case(world, action):
    model, engine = started(world, 0, guard_action=action)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.ones(4, 6) * (float("nan") if world.rank == 1 else 1.0)
    engine.backward(model(x).square().mean())
    skipped = engine.step().skipped
    same = all(map(torch.equal, before, model.parameters()))
    engine.close()
    return skipped, same


def test_restore_skips_a_step_that_is_not_finite(group):
    assert group(2)(nan_case, "restore") == [(True, True)] * 2


@contextmanager
def printed(world):
    """Collect the lines that the main rank prints."""
    lines = []
    world.print = lines.append
    try:
        yield lines
    finally:
        del world.print


def action_case(world, zero, folder):
    """Flip a bit on rank 1 with both actions. Returns what the guard says, and the checkpoints."""

    def before(number):
        if number == EVERY + 2 and world.rank == 1:
            flip(engine, "parameter", bit=20)
        if number > 1 and engine.settings.guard_action == "restore":
            engine.save(folder)

    with printed(world) as lines:
        model, engine = started(world, zero, guard_action="warn", guard_memory=True)
        train(world, model, engine, 2 * EVERY, before)
        engine.close()
    message = ""
    model, engine = started(world, zero, guard_action="restore", guard_memory=True)
    try:
        train(world, model, engine, 2 * EVERY, before)
    except GuardError as error:
        message = str(error)
    steps = engine.steps
    engine.close()
    world.barrier()
    return lines, message, steps, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_warn_goes_on_and_restore_continues_from_good_states(group, tmp_path, zero):
    results = group(2)(action_case, zero, tmp_path)
    lines = results[0][0]
    assert f"step {EVERY + 2}: parameter " in lines[0]
    assert "is wrong on rank 1" in lines[0]
    for _, message, steps, names in results:
        if zero == 0:
            assert (message, steps) == ("", 2 * EVERY)
            continue
        assert steps == EVERY + 1
        assert "--restarts N" in message
        # The check after step 4 passed, so a resume continues from its checkpoint.
        assert f"step-{EVERY}" in names
        assert f"suspect-step-{EVERY + 1}" in names
        assert f"step-{EVERY + 1}" not in names


def compiled_case(world, backend):
    """Flip a bit on rank 1 in a compiled model. Returns the error, and what the guard says."""
    # Inductor imports a module that uses it.
    warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)
    torch.manual_seed(0)
    # Its backward pass, once compiled, overwrites saved tensors, and so cannot run twice.
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
    settings = {"compile": True} if backend == "inductor" else {}
    if not settings:
        model.compile(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said = []
    world.say_once = said.append
    try:
        engine = sw.Engine(
            model, optimizer, zero=0, guard=EVERY, guard_memory=True, quiet=True, **settings
        )
        train(world, model, engine, EVERY)  # ends with a check that finds nothing
        if world.rank == 1:
            flip(engine, "parameter")
        with pytest.raises(GuardError) as error:
            train(world, model, engine, EVERY)
        engine.close()
    finally:
        del world.say_once
    return str(error.value), error.value.at_fault, said


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_states_of_a_compiled_model_are_compared(group, backend):
    for message, at_fault, said in group(2)(compiled_case, backend):
        assert at_fault == (1,)
        assert f"step {EVERY + 1}: parameter " in message
        assert any("torch.compile has compiled the model: not proved" in line for line in said)


def error_in_second_check(world):
    """Compute wrongly once, with a check of each step and dropout."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer, zero=0, guard=1, quiet=True)

    def before(number):
        if number == 3 and world.rank == 1:
            model.faults.faults.forward.append(True)

    with pytest.raises(GuardError) as error:
        train(world, model, engine, 4, before)
    engine.close()
    return str(error.value), error.value.at_fault


def test_first_step_of_a_run_can_be_checked(group):
    """The generators are seeded in the first forward pass, so the second run must start there."""
    for message, at_fault in group(2)(error_in_second_check):
        assert at_fault == (1,)
        assert "step 3: forward pass faults, last, Model is wrong on rank 1" in message


class Notes:
    """Collects the events of a timeline."""

    def __init__(self):
        self.names = []

    def write(self, notes):
        self.names += [note.name for note in notes]

    def close(self):
        pass


def straggler_case(world, phase):
    notes = Notes()
    recording = recorder.TimelineRecorder(notes, lambda error: None)
    recorder.start(recording)
    with printed(world) as lines:
        model, engine = started(world, 3)
        delay = 0.1 * (world.rank == 1)
        if phase == "forward":
            model.last.register_forward_pre_hook(lambda *_: time.sleep(delay))
            delays = None
        else:
            delays = lambda _: time.sleep(delay)  # noqa: E731
        train(world, model, engine, 7 * EVERY, delays)
        engine.close()
    recorder.stop(recording)
    recording.stop()
    return lines, [name for name in notes.names if "straggler" in name]


@pytest.mark.parametrize("phase", ["data", "forward"])
def test_names_a_straggler_once(group, phase):
    (lines, first), (_, second) = group(2)(straggler_case, phase)
    (line,) = lines
    assert "wait for rank 1 (host " in line
    assert f"Most of the difference is in: {phase}" in line
    assert (first, second) == ([], [f"straggler: {phase}"])


def spike_case(world, action):
    data = [torch.randn(6, generator=torch.Generator().manual_seed(n)) for n in range(26 * 4)]
    # Row 101 is in the last batch, whose second half is on rank 1.
    data[-1] *= 1e4
    with printed(world) as lines:
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        engine = sw.Engine(model, optimizer, zero=1, guard=100, guard_spikes=action, quiet=True)
        message, skipped, moved = "", False, False
        try:
            for x in sw.Loader(data, 4):
                before = model.weight.detach().clone()
                engine.backward(model(x).square().mean())
                skipped = engine.step().skipped
        except GuardError as error:
            message = str(error)
        moved = not torch.equal(before, model.weight)
        engine.close()
    return lines, message, skipped, moved


@pytest.mark.parametrize("action", ["warn", "skip", "stop"])
def test_spike_names_the_samples(group, action):
    (lines, message, skipped, moved), (_, other, *_) = group(2)(spike_case, action)
    words = message if action == "stop" else lines[0]
    assert "step 26: the loss is " in words
    assert "The largest loss is that of rank 1 (" in words
    assert "samples 102, 103)" in words
    assert message == other
    assert (bool(message), skipped, moved) == (action == "stop", action == "skip", action == "warn")


def nan_with_statistics_case(world):
    model, engine = started(world, 0)
    train(world, model, engine, 1)
    x = torch.ones(4, 6) * (float("nan") if world.rank == 1 else world.rank + 1)
    engine.backward(model(x).square().mean())
    with pytest.raises(NonFiniteError) as error:
        engine.step()
    engine.close()
    return str(error.value)


def test_statistics_of_a_failed_step_are_no_error(group):
    """Running statistics differ between ranks until the exchange of the step."""
    for message in group(2)(nan_with_statistics_case):
        assert "rank 1 (its loss" in message
