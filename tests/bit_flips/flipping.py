"""Trains with a guard, flips one bit at a random place, and judges what the guard reports.

A bit flips in the memory of a state, or in a result of a device: the output of a matrix product, or
the gradient of a weight. A device computes wrongly once, in a run that checks each step, or in each
call from some step on.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import GuardError, NonFiniteError
from shardwise.guard.memory import other_pieces, pieces_of
from tests.distributed.group import Groups
from tests.seeded import Command, Result, console

SIZE = 3
"""Number of ranks. With three, a majority of copies is right."""

LIMIT = 600.0
"""Maximum seconds of a run."""

RUN = 250
"""Number of steps of a clean run."""

STATES = ("parameter", "optimizer state", "average", "buffer")
RESULTS = {"matmul": "forward pass", "gradient": "gradient"}
"""Maps each faulty result to the kind of error that the guard must report."""

MOMENTS = ("between steps", "before the backward pass", "before the step")

COMMAND = Command(
    name="bit_flips",
    about="Flip a random bit in a guarded run, and check that the guard names it.",
    thing="flip",
    things="flips",
    fine=("reported", "not finite", "changes nothing"),
    wrong=("missed", "late", "wrong rank", "wrong kind", "failed"),
)


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A bit that flips on rank `victim` in step `step`.

    what      a kind of state, or a key of RESULTS
    place     position of the element, as a share of all elements of this kind
    bit       number of the bit in the element
    moment    one of MOMENTS, for states
    layer     the faulty layer, for results
    call      number of the call within the step; None if each call from this step on is wrong
    settings  settings of the engine
    """

    what: str
    victim: int
    step: int
    place: float
    bit: int
    moment: str
    layer: int
    call: int | None
    transport: str
    recomputes: bool
    settings: Mapping[str, Any]

    @property
    def every(self) -> int:
        """Number of steps between two checks."""
        return int(self.settings["guard"])

    def __str__(self) -> str:
        where = f"{self.what}, bit {self.bit}"
        if self.what in RESULTS:
            often = "each call" if self.call is None else f"call {self.call}"
            where += f" of layer {self.layer}, {often}"
        else:
            where += f", {self.moment}"
        recomputes = ", recomputation" if self.recomputes else ""
        settings = f"{dict(self.settings)}, {self.transport}{recomputes}"
        return f"rank {self.victim}, step {self.step}: {where} ({settings})"


def draw(seed: int) -> Flip:
    """Return the flip of `seed`."""
    rng = Random(seed)
    what = rng.choice([*STATES, *RESULTS])
    zero = rng.randrange(4)
    settings: dict[str, Any] = {"zero": zero, "guard": rng.choice([2, 3, 4])}
    call = None
    if what in RESULTS and rng.random() < 0.5:
        call, settings["guard"] = rng.randrange(2), 1
    has_copies = what == "buffer" or (zero == 0 and what != "average")
    if what in STATES and (not has_copies or rng.random() < 0.5):
        settings["guard_memory"] = True
    if what == "average" or rng.random() < 0.3:
        settings["ema_decay"] = 0.9
    if zero and rng.random() < 0.2:
        settings["offload_optimizer"] = "cpu"
    return Flip(
        what=what,
        victim=rng.randrange(SIZE),
        # In its first four steps, an engine averages any buffers that differ.
        step=rng.randrange(5, 9) if what == "buffer" else rng.randrange(2, 6),
        place=rng.random(),
        bit=rng.randrange(32),
        moment=rng.choice(MOMENTS),
        layer=rng.randrange(3),
        call=call,
        transport=rng.choice(["shared", "shared", "gloo"]),
        recomputes=rng.random() < 0.3,
        settings=settings,
    )


class Device:
    """Computes results wrongly, as the `flip` says, on this rank."""

    def __init__(self, flip: Flip | None, rank: int) -> None:
        self.step = 0
        self._flip = flip if flip is not None and rank == flip.victim else None
        self._rng = Random(0)
        self._calls = 0

    def begin(self, step: int) -> None:
        """Begin step number `step`."""
        self.step, self._calls = step, 0

    def result(self, what: str, layer: int, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, or a copy with a flipped bit."""
        flip = self._flip
        if flip is None or (flip.what, flip.layer) != (what, layer) or self.step < flip.step:
            return value
        place, bit = flip.place, flip.bit
        if flip.call is None:
            place, bit = self._rng.random(), self._rng.randrange(32)
        elif self.step > flip.step or self._calls != flip.call:
            self._calls += 1
            return value
        self._calls += 1
        wrong = value.clone()
        flip_bit(wrong.view(-1), int(place * wrong.numel()), bit)
        return wrong


def flip_bit(flat: torch.Tensor, place: int, bit: int) -> None:
    """Flip a bit of an element, so that torch does not count a write."""
    words = flat.detach().numpy().view({4: np.uint32, 8: np.uint64}[flat.itemsize])
    words[place] ^= words.dtype.type(1 << bit)


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, device, layer):
        return device.result("matmul", layer, output).view_as(output)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, device, layer):
        ctx.device, ctx.layer = device, layer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return ctx.device.result("gradient", ctx.layer, grad), None, None


class Layer(nn.Linear):
    """A linear layer on a device that may be faulty."""

    def __init__(self, inputs: int, outputs: int, device: Device, number: int) -> None:
        super().__init__(inputs, outputs)
        self.on = device
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, after the device's error, if any."""
        weight = _Weight.apply(self.weight, self.on, self.number)
        return _Output.apply(F.linear(x, weight, self.bias), self.on, self.number)


class Net(nn.Module):
    """Three layers with BatchNorm, dropout and a buffer. The second is large enough for words."""

    def __init__(self, device: Device, recomputes: bool) -> None:
        super().__init__()
        self.first, self.norm = Layer(6, 40, device, 0), nn.BatchNorm1d(40)
        self.middle, self.drop = Layer(40, 420, device, 1), nn.Dropout(0.2)
        self.last = Layer(420, 2, device, 2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 420))
        self._recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the predictions."""
        x = torch.tanh(self.norm(self.first(x)))
        run = self._inside
        x = checkpoint(run, x, use_reentrant=False) if self._recomputes else run(x)
        return self.last(x)

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.relu(self.middle(x))) * self.scale


def trained(
    world: Any, flip: Flip, steps: int, *, flips: bool, guards: bool
) -> tuple[str, str, list[int], int, list[str], list[str]]:
    """Train for `steps` steps.

    Returns what ended the training: the name of the error or "", its message, the ranks that it
    blames, the number of completed steps, the flipped tensor, and the final values.
    """
    world.engines = 0
    torch.manual_seed(5)
    device = Device(flip if flips else None, world.rank)
    model = Net(device, flip.recomputes)
    # A decay, so that values of parameters without a gradient change, too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    settings = dict(flip.settings)
    if not guards:
        settings = {key: value for key, value in settings.items() if "guard" not in key}
    engine = sw.Engine(model, optimizer, bucket_mb=0.01, quiet=True, **settings)
    flipped: list[str] = []

    def at(moment: str) -> None:
        is_now = (device.step, moment) == (flip.step, flip.moment)
        if flips and flip.what in STATES and is_now and world.rank == flip.victim:
            flipped.extend(_flip_state(engine._state, flip))

    kind, message, blamed = "", "", []
    try:
        while engine.steps < steps:
            device.begin(engine.steps + 1)
            at("between steps")
            seed = device.step * 7 + world.rank
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            loss = model(x).square().mean()
            at("before the backward pass")
            engine.backward(loss)
            at("before the step")
            engine.step()
    except (GuardError, NonFiniteError) as error:
        kind, message = type(error).__name__, str(error)
        blamed = list(getattr(error, "at_fault", ()))
    made = engine.steps
    values = []
    if not kind:
        with engine.full_parameters():
            values = [_digest(p) for p in [*model.parameters(), *model.buffers()]]
    engine.close()
    return kind, message, blamed, made, flipped, values


def _flip_state(state: Any, flip: Flip) -> list[str]:
    """Flip a bit of the state, and return the tensor's name, or nothing without such a state."""
    pieces = [*pieces_of(state.spec, state.states), *other_pieces(state.spec, state.states)]
    parts = [
        (name, values)
        for piece in pieces
        if piece.kind == flip.what
        for name, values in piece.parts()
        # Each step averages the running statistics over the ranks, so their copies are equal.
        if not name.startswith("norm.") or flip.what != "buffer"
    ]
    left = int(flip.place * sum(values.numel() for _, values in parts))
    for name, values in parts:
        if left < values.numel():
            flip_bit(values, left, flip.bit)
            return [name]
        left -= values.numel()
    return []


def _digest(value: torch.Tensor) -> str:
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()[-64:] + (
        f" {value.double().sum().item()!r}"
    )


class Runner:
    """Tries flips on warm ranks."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def __call__(self, seed: int) -> Result:
        """Try the flip of `seed`."""
        flip, began = draw(seed), time.monotonic()
        steps = flip.step + flip.every
        group = self._groups(SIZE, transport=flip.transport)

        def run(*, flips: bool, guards: bool) -> list[Any]:
            return group(_run, flip, steps, flips, guards, limit=LIMIT)

        of = f"{flip.what}, ZERO_{flip.settings['zero']}"
        outcome = run(flips=True, guards=True)
        kind, story = judged(flip, outcome)
        if kind == "missed":
            # Does the flip change any result at all?
            wrong, right = run(flips=True, guards=False), run(flips=False, guards=False)
            if [each[-1] for each in wrong] == [each[-1] for each in right]:
                kind = "changes nothing"
        seconds = time.monotonic() - began
        return Result(kind=kind, of=of, words=str(flip), story=story, seconds=seconds)


def _run(world: Any, flip: Flip, steps: int, flips: bool, guards: bool) -> Any:
    return trained(world, flip, steps, flips=flips, guards=guards)


def judged(flip: Flip, outcome: list[Any]) -> tuple[str, str]:
    """Return the kind of result, and all details."""
    kind, message, blamed, made, *_ = outcome[0]
    flipped = [name for each in outcome for name in each[4]]
    story = f"{kind or 'no error'} after step {made}: {message} (flipped: {flipped})"
    if len({each[0] for each in outcome}) > 1:
        return "failed", f"ranks disagree: {[each[:2] for each in outcome]}"
    if not kind:
        return "missed", story
    if kind == "NonFiniteError":
        return "not finite", story
    if made > flip.step + flip.every:
        return "late", story
    if blamed != [flip.victim]:
        return "wrong rank", story
    wanted = RESULTS.get(flip.what, flip.what)
    named = f"{wanted} " in message and all(name in message for name in flipped)
    return ("reported" if named else "wrong kind"), story


def clean(world: Any, flip: Flip) -> tuple[str, str]:
    """Train without a flip, and return what the guard reports."""
    return trained(world, flip, RUN, flips=False, guards=True)[:2]


def count_clean(groups: Groups, steps: int, first: int) -> bool:
    """Make clean steps, and return whether the guard reported nothing."""
    alarms = 0
    for seed in range(first, first + -(-steps // RUN)):
        flip = draw(seed)
        group = groups(SIZE, transport=flip.transport)
        kinds = set(group(clean, flip, limit=600))
        if kinds != {("", "")}:
            alarms += 1
            console.print(f"seed {seed}: {kinds} ({flip})", markup=False)
    made = -(-steps // RUN) * RUN
    console.print(f"{made} clean steps on {SIZE} ranks: {alarms} runs with a false alarm")
    return alarms == 0
