"""Adds one more feature to the programs of some seeds. Pure.

It uses a separate generator, so it changes neither the draws of drawing.py nor the other features
of a seed.

    items      a loss that is a mean over other items than rows, without a weight
    stand-ins  buffers that count forwards, and batches with fewer rows than workers
    norm       BatchNorm inside of the model's own checkpointing
    fork       a forked child that writes into the weights
    stream     an iterable dataset with shard(), and a resume at another number of workers
    in place   layers that begin with an in-place operation, most often in a pipeline
"""

import random
from collections.abc import Callable
from dataclasses import replace

from tests.parity.random_programs.program import Config, Part, Phase, Program, Step
from tests.parity.random_programs.sense import STREAM_ROWS, counts_forwards, sensible

OFTEN = 0.3
"""Share of the seeds that have one of them."""


def added_to(program: Program) -> Program:
    """Return `program` with one more feature, or unchanged."""
    draw = random.Random(f"{program.seed} further")
    if draw.random() >= OFTEN:
        return program
    for _ in range(20):
        made = draw.choice(FEATURES)(program, draw)
        if made != program and sensible(made):
            return made
    return program


def _items(program: Program, draw: random.Random) -> Program:
    if program.family != "one":
        return program
    net = replace(program.nets[0], modality="tokens", channels_last=False)
    name = draw.choice(["ignored", "class_weights"])

    def part(given: Part) -> Part:
        return replace(given, losses=(name,), shared=False, cuts=None, explicit=False, factor=1)

    made = replace(program, nets=(net, *program.nets[1:]))
    return _with_steps(made, lambda at, step: replace(_of_parts(step, part), ahead=False))


def _stand_ins(program: Program, draw: random.Random) -> Program:
    made = _with_blocks(program, (draw.choice(["tally", "spectral"]), *program.nets[0].blocks[1:]))
    few = {draw.randint(0, 3), draw.randint(0, 3)}
    if made.feed != "share":
        return program

    def step(at: int, given: Step) -> Step:
        rows = draw.randint(1, 2) if at in few else 6
        return replace(_of_parts(given, lambda part: replace(part, rows=rows, cuts=None)))

    size = draw.choice([2, 3, 4])
    made = _with_configs(made, lambda config: replace(_flat(config), size=size))
    return _with_steps(replace(made, phases=_in_one(made.phases)), step)


def _norm(program: Program, draw: random.Random) -> Program:
    if program.family != "one":
        return program
    blocks = ("batch_norm", *(b for b in program.nets[0].blocks[1:] if b != "hooked"))
    made = _with_blocks(program, blocks, draw.choice(["reentrant", "nonreentrant"]))

    def part(given: Part) -> Part:
        return replace(given, rows=max(given.rows, 4), cuts=None)

    def config(given: Config) -> Config:
        return replace(given, micro_batch_size=None, exact=None, microbatches=None)

    made = _with_configs(made, lambda c: replace(config(_flat(c)), activations="kept"))
    return _with_steps(made, lambda at, step: _of_parts(step, part))


def _fork(program: Program, draw: random.Random) -> Program:
    at = draw.randint(1, sum(1 for _ in program.steps()) - 1)
    return _with_steps(
        program, lambda n, step: replace(step, before=(*step.before, *(["fork"] * (n == at))))
    )


def _stream(program: Program, draw: random.Random) -> Program:
    if program.family == "gan":
        return program

    def step(at: int, given: Step) -> Step:
        events = tuple(event for event in given.before if event != "add_group")
        part = Part(rows=STREAM_ROWS, losses=given.parts[0].losses[:1])
        return replace(given, before=events, parts=(part,), ahead=False)

    optimizers = tuple(replace(each, later="") for each in program.optimizers)
    made = replace(program, feed="stream", optimizers=optimizers)
    made = _with_configs(made, lambda config: replace(_flat(config), micro_batch_size=None))
    made = _with_steps(made, step)
    if counts_forwards(made) or made.average or draw.random() < 0.2:
        return made
    first, *_ = _in_one(made.phases)
    cut = draw.randint(1, len(first.steps) - 1)
    sizes = draw.sample([1, 2, 3, 4], 2)
    configs = [replace(first.config, size=size) for size in sizes]
    parts = (first.steps[:cut], first.steps[cut:])
    phases = tuple(
        Phase(config=config, steps=steps) for config, steps in zip(configs, parts, strict=True)
    )
    return replace(made, phases=phases)


def _in_place(program: Program, draw: random.Random) -> Program:
    made = _with_blocks(program, ("in_place",) * draw.randint(2, 4))
    if program.family != "one" or program.feed != "share" or draw.random() < 0.2:
        return made
    pipeline = Config(
        size=draw.choice([2, 2, 4]),
        zero=draw.choice([0, 1, 2, 3]),
        pipeline=2,
        schedule=draw.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
        microbatches=draw.choice([None, 2, 3]),
        call="forward_backward",
    )

    def part(given: Part) -> Part:
        return replace(given, losses=("mse",), shared=False, cuts=None)

    made = _with_configs(made, lambda _: pipeline)
    return _with_steps(made, lambda at, step: replace(_of_parts(step, part), ahead=False))


FEATURES: tuple[Callable[[Program, random.Random], Program], ...] = (
    *(_items, _stand_ins, _norm, _fork, _stream, _in_place),
)


def _with_blocks(program: Program, blocks: tuple[str, ...], checkpoint: str = "") -> Program:
    net = replace(program.nets[0], blocks=blocks, checkpoint=checkpoint)
    return replace(program, nets=(net, *program.nets[1:]))


def _with_steps(program: Program, made: Callable[[int, Step], Step]) -> Program:
    numbers = iter(range(sum(1 for _ in program.steps())))
    return replace(
        program,
        phases=tuple(
            replace(phase, steps=tuple(made(next(numbers), step) for step in phase.steps))
            for phase in program.phases
        ),
    )


def _with_configs(program: Program, made: Callable[[Config], Config]) -> Program:
    return replace(
        program,
        phases=tuple(replace(phase, config=made(phase.config)) for phase in program.phases),
    )


def _of_parts(step: Step, made: Callable[[Part], Part]) -> Step:
    return replace(step, parts=tuple(map(made, step.parts)))


def _in_one(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    steps = tuple(step for phase in phases for step in phase.steps)
    return (replace(phases[0], steps=steps),)


def _flat(config: Config) -> Config:
    """Return a configuration that does not divide a replica or a step."""
    return replace(
        config,
        tensor=1,
        pipeline=1,
        schedule="1f1b",
        microbatches=None,
        exact=None,
        call="backward",
    )
