"""Random programs give the results of plain PyTorch, or are refused for a valid reason.

Ten of the first hundred run in `make test`, all of them with `-m full`. To run more:
`python -m tests.parity.random_programs --programs 1000 --seed 1`. To see one that fails here, and
the smallest program that fails in the same way: `--program SEED`, `--shrink SEED`.
"""

from collections.abc import Iterator
from itertools import count, islice

import pytest
import torch
from _pytest.mark import ParameterSet

from shardwise.errors import ModelError
from tests.parity.random_programs import program as written
from tests.parity.random_programs.comparing import differences
from tests.parity.random_programs.drawing import _Drawing, draw
from tests.parity.random_programs.plain import Ran
from tests.parity.random_programs.program import Config, Program, readable
from tests.parity.random_programs.running import PlainSide, Runner, gone_wrong
from tests.parity.random_programs.sense import sensible
from tests.parity.random_programs.shrinking import shrink, simpler

PROGRAMS = 100
OFTEN = 10
"""Number of programs, from the first, that run in `make test`."""

TOGETHER = 10
"""Programs of one test case."""


def _is_cheap(program: Program) -> bool:
    """Return whether a program is fast, and needs no group of ranks of its own."""
    ranks = sum(phase.config.size * len(phase.steps) for phase in program.phases)
    return ranks <= 20 and all(_is_usual(phase.config) for phase in program.phases)


def _is_usual(config: Config) -> bool:
    return config.transport == "auto" and (config.tensor == config.pipeline == 1 or config.size < 4)


def _mesh(program: Program) -> str:
    config = program.phases[0].config
    return f"{config.size} = {config.tensor} tensor x {config.pipeline} pipeline x data"


def _cases() -> Iterator[ParameterSet]:
    """Return the seeds grouped by mesh, a number of them per test case."""
    cheap = (seed for seed in count(1) if _is_cheap(draw(seed)))
    yield from _by_mesh(list(islice(cheap, OFTEN)))
    yield from _by_mesh(list(islice(cheap, PROGRAMS - OFTEN)), pytest.mark.full)


def _by_mesh(chosen: list[int], *marks: pytest.MarkDecorator) -> Iterator[ParameterSet]:
    by_mesh: dict[str, list[int]] = {}
    for seed in chosen:
        by_mesh.setdefault(_mesh(draw(seed)), []).append(seed)
    for mesh, seeds in sorted(by_mesh.items()):
        for first in range(0, len(seeds), TOGETHER):
            yield pytest.param(mesh, seeds[first : first + TOGETHER], marks=marks)


def _name(value: str | list[int]) -> str:
    return value if isinstance(value, str) else f"from {value[0]}"


@pytest.fixture(scope="module")
def runner(group):
    plain = PlainSide()
    yield Runner(group, plain)
    plain.close()


@pytest.mark.parametrize(("mesh", "seeds"), list(_cases()), ids=_name)
def test_as_plain_pytorch(runner, mesh, seeds):
    del mesh  # names the case
    failures = []
    for seed in seeds:
        result = runner(draw(seed))
        if not result.fine:
            failures.append(
                f"{result.kind}: {result.words}\n"
                f"    python -m tests.parity.random_programs --program {seed}\n{result.story}"
            )
    assert not failures, "\n".join(failures)


# -- the instrument itself --------------------------------------------------------------------


def test_a_program_prints_as_it_is_written():
    for seed in range(1, 50):
        program = draw(seed)
        assert eval(readable(program), vars(written)) == program


def test_a_seed_is_one_program_that_makes_sense():
    for seed in range(1, 50):
        assert draw(seed) == draw(seed)
        assert sensible(draw(seed))
    assert len({draw(seed) for seed in range(1, 50)}) == 49


def test_shrinking_keeps_the_features_that_matter():
    def clips_twice(program):
        return sum(step.clip is not None for _, step in program.steps()) >= 2

    program = next(each for each in map(draw, count(1)) if clips_twice(each))
    left = shrink(program, clips_twice)
    assert clips_twice(left)
    assert not any(clips_twice(smaller) for smaller in simpler(left) if sensible(smaller))
    assert len(left.phases) == 1
    assert all(len(net.blocks) == 1 for net in left.nets)


def test_reports_the_first_difference():
    """A loss of the second step differs, and a tensor at the end."""
    program = Program()
    plain = Ran(
        losses=[(0, 1.0), (1, 2.0)], seen={"2: model": [{"w": torch.ones(2, dtype=torch.float64)}]}
    )
    ours = Ran(
        losses=[(0, 1.0), (1, 2.1)],
        seen={"2: model": [{"w": torch.tensor([1, 1.001], dtype=torch.float64)}]},
    )
    assert list(differences(program, plain, plain)) == []
    found = list(differences(program, ours, plain))
    assert [number for number, _ in found] == [1, 2]
    assert "w" in found[1][1]


def test_noise_is_the_effect_of_one_ulp_on_plain_pytorch():
    """A difference up to that size is rounding, a larger one is a fault."""
    program, plain = Program(), Ran(losses=[(0, 1.0), (1, 2.0)], seen={"2: model": [torch.ones(2)]})
    chaotic = Ran(losses=[(0, 1.0), (1, 2.001)], seen={"2: model": [torch.ones(2) * 1.02]})
    ours = Ran(losses=[(0, 1.0), (1, 2.02)], seen={"2: model": [torch.ones(2) * 1.2]})
    assert len(list(differences(program, ours, plain))) == 2
    assert list(differences(program, ours, plain, [chaotic])) == []
    fault = Ran(losses=[(0, 1.01), (1, 2.02)], seen=ours.seen)
    assert [number for number, _ in differences(program, fault, plain, [chaotic])] == [0]


def test_plain_pytorch_one_ulp_off_stays_near(runner):
    side = runner._plain
    program = next(each for each in map(draw, count(1)) if not each.single)
    one, other = side(program), side(program, perturbed=0)
    assert one.losses == side(program).losses
    assert one.losses != other.losses
    assert [a for _, a in one.losses] == pytest.approx([b for _, b in other.losses], rel=1e-10)


def test_further_features_leave_the_programs_of_other_seeds_alone():
    """Each feature is drawn, and a seed without one keeps its program."""
    drawn = [draw(seed) for seed in range(1, 301)]
    losses = {loss for p in drawn for _, s in p.steps() for part in s.parts for loss in part.losses}
    events = {event for p in drawn for _, step in p.steps() for event in step.before}
    blocks = {block for p in drawn for net in p.nets for block in net.blocks}
    assert {"ignored", "class_weights"} <= losses
    assert "fork" in events
    assert {"spectral", "in_place"} <= blocks
    assert any(net.checkpoint and "batch_norm" in net.blocks for p in drawn for net in p.nets)
    streams = [p for p in drawn if p.feed == "stream"]
    assert any(len({phase.config.size for phase in p.phases}) == 2 for p in streams)
    few = [p for p in drawn if any(part.rows == 1 for _, s in p.steps() for part in s.parts)]
    assert any({"tally", "spectral"} & {*p.nets[0].blocks} for p in few)
    changed = [p for p in drawn if p != _Drawing(p.seed, 0).program()]
    assert 0.1 * len(drawn) < len(changed) < 0.6 * len(drawn)


def test_finds_the_error_that_is_no_consequence_of_another(runner, group):
    """An error of torch is a crash, one of ours is a refusal, and a lost peer is neither."""
    for kind, error in (("crash", ZeroDivisionError), ("refused", ModelError)):
        result = gone_wrong(group(2).outcomes(_fail_on_one, error))
        assert (result.kind, result.words) == (kind, f"{error.__name__}: as asked")


def _fail_on_one(world, error):
    if world.rank == 1:
        raise error("as asked")
    world.barrier()
