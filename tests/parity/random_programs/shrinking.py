"""Finds the smallest program with the same result, by removing one feature at a time."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.parity.random_programs.program import Config, Part, Phase, Program, Step
from tests.parity.random_programs.sense import sensible


def shrink(program: Program, same: Callable[[Program], bool]) -> Program:
    """Return the smallest program that still satisfies `same`."""
    while True:
        for smaller in simpler(program):
            if sensible(smaller) and same(smaller):
                program = smaller
                break
        else:
            return program


def simpler(program: Program) -> Iterator[Program]:
    """Yield programs with one feature less, the largest cuts first."""
    yield from _fewer_phases(program)
    for number, phase in enumerate(program.phases):
        for steps in _fewer(phase.steps):
            yield _with_phase(program, number, replace(phase, steps=steps))
    for number, net in enumerate(program.nets):
        for left in _fewer(net.blocks):
            yield _with(program, "nets", number, replace(net, blocks=left))
        yield from (_with(program, "nets", number, each) for each in _plainer(net, {"blocks"}))
    yield from _plainer(program, {"seed", "nets", "optimizers", "phases", "family"})
    for number, phase in enumerate(program.phases):
        for at, step in enumerate(phase.steps):
            for other in _simpler_steps(step):
                steps = (*phase.steps[:at], other, *phase.steps[at + 1 :])
                yield _with_phase(program, number, replace(phase, steps=steps))
        for config in _simpler_configs(phase.config):
            yield _with_phase(program, number, replace(phase, config=config))
    for number, optimizer in enumerate(program.optimizers):
        for other in _plainer(optimizer, {"later"}):
            yield _with(program, "optimizers", number, other)


def _fewer_phases(program: Program) -> Iterator[Program]:
    if len(program.phases) > 1:
        first, second = program.phases
        yield replace(program, phases=(replace(first, steps=first.steps + second.steps),))
        yield replace(program, phases=(first,))


def _simpler_steps(step: Step) -> Iterator[Step]:
    for before in _fewer(step.before, least=0):
        yield replace(step, before=before)
    for parts in _fewer(step.parts):
        yield replace(step, parts=parts)
    for number, part in enumerate(step.parts):
        for other in _plainer(part, {"rows", "cuts"}):
            yield replace(step, parts=(*step.parts[:number], other, *step.parts[number + 1 :]))
        if part.cuts is not None:
            plain = Part(rows=part.rows, losses=part.losses)
            yield replace(step, parts=(*step.parts[:number], plain, *step.parts[number + 1 :]))
    yield from _plainer(step, {"before", "parts"})


def _simpler_configs(config: Config) -> Iterator[Config]:
    yield from _plainer(config, {"size"})
    if config.tensor == config.pipeline == 1:
        for size in range(1, config.size):
            yield replace(config, size=size)
    elif config.size == 4:
        yield replace(config, size=2)


def _fewer(several: tuple[Any, ...], least: int = 1) -> Iterator[tuple[Any, ...]]:
    if len(several) // 2 >= max(least, 1) and len(several) > 2:
        yield several[: len(several) // 2]
    if len(several) > least:
        for number in reversed(range(len(several))):
            yield (*several[:number], *several[number + 1 :])


def _plainer(value: Any, kept: set[str]) -> Iterator[Any]:
    """Yield `value` with one field set to its default."""
    for field in fields(value):
        if field.name not in kept and getattr(value, field.name) != field.default:
            yield replace(value, **{field.name: field.default})


def _with(program: Program, name: str, number: int, value: Any) -> Program:
    several = getattr(program, name)
    changed: dict[str, Any] = {name: (*several[:number], value, *several[number + 1 :])}
    return replace(program, **changed)


def _with_phase(program: Program, number: int, phase: Phase) -> Program:
    return _with(program, "phases", number, phase)
