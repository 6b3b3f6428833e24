"""`--expert`: training equals that of one process, in every row, on every number of ranks."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from tests.distributed.experts import (
    LIMIT,
    ONE_GRAPH,
    InStages,
    Problem,
    compare,
    compiled,
    named_values,
    plain,
    train_step,
    trained,
)
from tests.random_experts import check
from tests.unit.experts.naive import moe

UNEVEN = ((3, 2), (5, 1), (4, 4))
"""Two micro-batches per step, some with fewer rows than there are ranks."""

FAST = {(0, "sgd"), (1, "adamw"), (2, "sgd"), (3, "adamw")}


@pytest.mark.parametrize(
    ("zero", "optimizer"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.full)
        for case in [(zero, name) for zero in range(4) for name in ("sgd", "adamw")]
    ],
)
def test_equals_one_process(group, zero, optimizer):
    problem = Problem(optimizer=optimizer, settings={"zero": zero})
    expected = plain(problem)
    for ours in group(2, expert=2)(trained, problem):
        compare(ours, expected)
        assert (
            ours["held"]
            == sum(v.numel() for n, v in expected["values"].items() if ".experts." in n) / 2
        )


CASES = {
    "copies": (4, 2, Problem(rows=UNEVEN, steps=3, settings={"zero": 3})),
    "lone": (4, 4, Problem(optimizer="sgd", rows=UNEVEN, steps=3, lone=True, settings={"zero": 2})),
    "few labels": (2, 2, Problem(optimizer="sgd", few_labels=True, settings={"zero": 1})),
    "whole": (2, 1, Problem(optimizer="sgd", rows=UNEVEN, steps=3, settings={"zero": 2})),
    "recomputed": (
        2,
        2,
        Problem(optimizer="sgd", settings={"zero": 3, "activations": "recomputed"}),
    ),
    "averages": (2, 2, Problem(settings={"zero": 2, "ema_decay": 0.9})),
    "whole tensors": (2, 2, Problem(optimizer="adafactor", settings={"zero": 2})),
    "bias only": (
        4,
        2,
        Problem(
            optimizer="sgd",
            rows=UNEVEN,
            steps=3,
            options={"balance": 0.0, "z_loss": 0.0},
            settings={"zero": 1},
        ),
    ),
    "no losses": (
        2,
        2,
        Problem(options={"balance": 0.0, "z_loss": 0.0, "bias_rate": 0.0}, settings={"zero": 1}),
    ),
    # Each second backward pass runs twice, and must not count tokens twice.
    "guarded": (2, 1, Problem(optimizer="sgd", rows=UNEVEN, steps=3, settings={"guard": 2})),
    "sigmoid": (2, 2, Problem(options={"scores": "sigmoid", "scale": 1.5}, settings={"zero": 1})),
}


SLOW = {"averages", "sigmoid", "recomputed", "whole", "no losses"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in SLOW else ()) for name in CASES],
)
def test_equals_one_process_also_with(group, name):
    size, expert, problem = CASES[name]
    expected = plain(problem)
    for ours in group(size, expert=expert)(trained, problem):
        compare(ours, expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("bf16", marks=pytest.mark.full)])
def test_narrow_training_is_near_that_of_one_rank(group, precision):
    problem = Problem(options={"bias_rate": 0.0}, settings={"zero": 2, "precision": precision})
    (alone,) = group(1)(trained, problem)
    for ours in group(2, expert=2)(trained, problem):
        for key in ("losses", "norms"):
            assert ours[key] == pytest.approx(alone[key], rel=0.03)


COMPILED = {name: CASES[name] for name in CASES if name not in ("averages", "whole tensors")}
COMPILED |= {
    # Without batches of one row, for which torch compiles further graphs.
    "ragged": (2, 2, Problem(rows=((8,), (8,), (6,), (8,)), settings={"zero": 3})),
    "alone": (1, 1, Problem(options={"shared": False})),
    "inductor": (2, 2, Problem(optimizer="sgd", steps=3, settings={"zero": 3})),
}


QUICK = {"copies", "few labels", "bias only", "recomputed", "ragged", "inductor"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in COMPILED],
)
def test_compiled_equals_one_process(group, name):
    size, expert, problem = COMPILED[name]
    expected = plain(problem)
    options = {"backend": "inductor"} if name == "inductor" else ONE_GRAPH
    if name == "ragged":
        options = {"backend": "aot_eager"}  # as users do, so that torch may split graphs
    problem = dataclasses.replace(problem, settings={**problem.settings, "compile": True})
    for ours, graphs in group(size, expert=expert)(
        compiled, options, trained, problem, limit=LIMIT
    ):
        compare(ours, expected)
        if name == "ragged":
            # The dense unit and the blocks, each with static and with symbolic sizes.
            assert graphs <= 4


REPLICAS = {  # ranks, --expert, --tensor
    (4, 1, 2): Problem(optimizer="sgd", rows=UNEVEN, steps=3, settings={"zero": 1}),
    (2, 2, 2): Problem(
        optimizer="sgd", rows=UNEVEN, steps=3, settings={"zero": 0, "sequence_parallel": True}
    ),
    (4, 4, 4): Problem(rows=UNEVEN, steps=3, lone=True, settings={"zero": 2}),
    (4, 2, 2): Problem(rows=UNEVEN, steps=3, settings={"zero": 3, "activations": "recomputed"}),
    (4, 4, 2): Problem(optimizer="sgd", few_labels=True, settings={"zero": 3}),
}


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(axes, marks=() if axes in {(4, 4, 4), (4, 4, 2)} else pytest.mark.full)
        for axes in REPLICAS
    ],
)
def test_equals_one_process_inside_tensor_parallel_replicas(group, axes):
    size, expert, tensor = axes
    expected = plain(REPLICAS[axes])
    for ours in group(size, expert=expert, tensor=tensor)(trained, REPLICAS[axes]):
        compare(ours, expected)
        share = 1 if expert == 1 else expert
        whole = sum(v.numel() for n, v in expected["values"].items() if ".experts." in n)
        if expert > 1 and REPLICAS[axes].settings["zero"] < 3:
            assert ours["held"] == whole / share


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(axes, marks=() if axes in {(2, 2, 2), (4, 4, 2)} else pytest.mark.full)
        for axes in REPLICAS
    ],
)
def test_compiled_equals_one_process_inside_tensor_parallel_replicas(group, axes):
    size, expert, tensor = axes
    problem = REPLICAS[axes]
    expected = plain(problem)
    problem = dataclasses.replace(problem, settings={**problem.settings, "compile": True})
    ranks = group(size, expert=expert, tensor=tensor)
    for ours, _ in ranks(compiled, ONE_GRAPH, trained, problem, limit=LIMIT):
        compare(ours, expected)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", [(2, 2), (4, 2), (4, 4)])
def test_equals_one_process_on_four_ranks_with_tensor(group, axes, zero, optimizer):
    problem = Problem(optimizer=optimizer, rows=UNEVEN, steps=20, settings={"zero": zero})
    expected = plain(problem)
    for ours in group(4, expert=axes[0], tensor=axes[1])(trained, problem, limit=300):
        compare(ours, expected)


ROWS = ((8,), (5,), (3,), (7,))
"""Rows of the steps. Some leave micro-batches of some or of all replicas without rows."""

STAGES = {  # axes, and further settings
    "1f1b": ({"expert": 2, "pipeline": 2}, {"zero": 2}),
    "interleaved": ({"expert": 2, "pipeline": 2}, {"zero": 0, "schedule": "interleaved"}),
    "sharded": ({"expert": 2, "pipeline": 2}, {"zero": 3, "ema_decay": 0.9}),
    "recomputed": ({"expert": 2, "pipeline": 2}, {"zero": 1, "activations": "recomputed"}),
    "gpipe": ({"expert": 2, "pipeline": 2}, {"zero": 1, "schedule": "gpipe"}),
    "whole experts": ({"pipeline": 2}, {"zero": 1}),
    "tensor": ({"expert": 2, "pipeline": 2, "tensor": 2}, {"zero": 0}),
    "one stage": ({"expert": 4}, {"zero": 2}),
}
FAST_STAGES = {("1f1b", "adamw"), ("interleaved", "sgd"), ("one stage", "sgd")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param(*case, marks=() if case in FAST_STAGES else pytest.mark.full)
        for case in itertools.product(STAGES, ("sgd", "adamw"))
    ],
)
def test_equals_one_process_in_stages(group, name, optimizer):
    axes, settings = STAGES[name]
    replicas = 4 // axes.get("pipeline", 1) // axes.get("tensor", 1)
    problem = InStages(
        optimizer=optimizer, rows=ROWS, replicas=replicas, settings={"microbatches": 4, **settings}
    )
    expected = plain(problem)
    for ours in group(4, **axes)(trained, problem):
        compare(ours, expected)


def split_in_two(world: sw.World) -> str:
    """Return the error of a schedule that splits the backward pass."""
    model = Problem().model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError) as caught:
        sw.Engine(model, optimizer, quiet=True, schedule="zero-bubble")
    return str(caught.value)


def test_refuses_a_schedule_that_splits_the_backward_pass(group):
    for said in group(2, pipeline=2)(split_in_two):
        assert "--schedule zero-bubble cannot be combined with --expert" in said
        assert "Write --schedule 1f1b" in said


@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.full), 3])
def test_equals_one_process_over_gloo(group, zero):
    problem = Problem(rows=UNEVEN, steps=3, settings={"zero": zero})
    expected = plain(problem)
    for ours in group(4, expert=2, transport="gloo")(trained, problem):
        compare(ours, expected)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("expert", [1, 2, 4])
def test_equals_one_process_on_four_ranks(group, expert, zero, optimizer):
    problem = Problem(optimizer=optimizer, rows=UNEVEN, steps=20, settings={"zero": zero})
    expected = plain(problem)
    for ours in group(4, expert=expert)(trained, problem):
        compare(ours, expected)


@pytest.mark.parametrize(
    "seed",
    [7, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(18, 45))],
)
def test_random_program_equals_one_process(group, seed):
    check(group, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 2 else pytest.mark.full) for seed in range(18)]
)
def test_random_compiled_program_equals_one_process(group, seed):
    check(group, seed, compiles=True)


# -- the faults that other libraries had ---------------------------------------------------


def plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Plant a fault that other libraries have had."""
    from shardwise.engine.gradient_weighting import GradientWeighting
    from shardwise.parallel.expert import dispatch, moe
    from shardwise.states.gradients.bucket import GradientBucket

    if fault == "expert gradients divided by the ranks":
        plain_start = dispatch._start

        def divided(rows: torch.Tensor, counts: Any, group: Any, row: Any) -> Any:
            # Only gradients have no grad_fn.
            rows = rows / group.size if rows.grad_fn is None else rows
            return plain_start(rows, counts, group, row)

        patch.setattr(dispatch, "_start", divided)
    elif fault == "no gradient through the gates":
        combined = dispatch.TokenCopies.combined
        patch.setattr(
            dispatch.TokenCopies,
            "combined",
            lambda copies, rows, gates: combined(copies, rows, gates.detach()),
        )
    elif fault == "norm without experts":
        square = GradientBucket.square
        patch.setattr(GradientBucket, "square", lambda s: square(s) * (s.layout.axis == "data"))
    elif fault == "router losses divided by the ranks":
        seed_of = GradientWeighting.seed_of
        patch.setattr(GradientWeighting, "seed_of", lambda s, *a, **k: seed_of(s, *a, **k) / 2)
    else:
        assert fault == "counts of one rank only"
        gather = moe.RoutingRun.gather_counts

        def local(row: torch.Tensor, group: Any) -> torch.Tensor:
            rows = gather(row, group)
            own = torch.zeros_like(rows)
            own[group.rank] = rows[group.rank]
            return own

        patch.setattr(moe.RoutingRun, "gather_counts", staticmethod(local))


def faulty(world: sw.World, problem: Problem, fault: str) -> Any:
    """Train with a planted fault."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, fault)
        return trained(world, problem)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "expert"),
    [
        ("expert gradients divided by the ranks", 2),
        ("no gradient through the gates", 2),
        ("norm without experts", 2),
        ("router losses divided by the ranks", 2),
        ("counts of one rank only", 1),
    ],
)
def test_comparison_finds_planted_faults(group, fault, expert):
    problem = Problem(optimizer="sgd", settings={"zero": 2})
    expected = plain(problem)
    compare(group(2, expert=expert)(trained, problem)[0], expected)
    with pytest.raises(AssertionError, match="not close"):
        compare(group(2, expert=expert)(faulty, problem, fault)[0], expected)


# -- checkpoints ------------------------------------------------------------------------------


def continued(world: sw.World, problem: Problem, folder: str, first: int, end: int) -> Any:
    """Resume from `folder` if there is a checkpoint, train steps [first, end) and save."""
    model = problem.model()
    optimizer = problem.optimizer_of(model)
    engine = sw.Engine(model, optimizer, quiet=True, **problem.settings)
    engine.resume(folder)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(first, end):
        train_step(world, engine, problem, step, losses, norms)
    engine.save(folder)
    with engine.full_parameters():
        values = {n: v.detach().clone() for n, v in named_values(model).items()}
    state = engine.optimizer_state_dict()
    engine.close()
    moments = {k: list(v) for k, v in optimizer.state_dict()["state"].items()}
    return {"losses": losses, "norms": norms, "values": values, "state": state, "kept": moments}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zeros", "axes", "later"),
    [
        ((2, 0), {"size": 2, "expert": 2, "tensor": 2}, {"expert": 4, "tensor": 2}),
        pytest.param((0, 3), {"size": 2, "expert": 2}, {"expert": 4}, marks=pytest.mark.full),
        pytest.param(
            (1, 0), {"size": 2, "expert": 2}, {"expert": 2, "pipeline": 2}, marks=pytest.mark.full
        ),
        pytest.param(
            (3, 2), {"size": 4, "expert": 2, "pipeline": 2}, {"expert": 4}, marks=pytest.mark.full
        ),
    ],
)
def test_checkpoint_loads_at_any_expert_size(group, tmp_path, zeros, axes, later):
    folder = str(tmp_path / "checkpoints")
    problem = Problem(settings={"zero": zeros[0]})
    expected = plain(Problem(steps=6))
    axes = dict(axes)
    group(axes.pop("size"), **axes)(continued, problem, folder, 0, 2)
    other = Problem(settings={"zero": zeros[1]})
    (alone,) = group(1)(continued, other, folder, 2, 4)
    compare(
        {**alone, **{k: expected[k][2:4] for k in ("losses", "norms")}},
        {**plain(Problem(steps=4)), **{k: expected[k][2:4] for k in ("losses", "norms")}},
    )
    names = set(alone["values"])
    for ours in group(4, **later)(continued, problem, folder, 4, 6):
        part = {**expected, "losses": expected["losses"][4:], "norms": expected["norms"][4:]}
        compare(ours, part)
        assert set(ours["values"]) == names
        # After `close` every rank has all experts and their moments, as in one process.
        assert len(ours["kept"]) == len(list(problem.model().parameters()))
    weights = next(Path(folder).glob("**/*.safetensors"), None)
    assert weights is not None


# -- the user's view --------------------------------------------------------------------------


def written(world: sw.World) -> Any:
    """Write a parameter of each expert, and run the whole model on one rank."""
    problem = Problem(settings={"zero": 2})
    model = problem.model()
    engine = sw.Engine(model, problem.optimizer_of(model), quiet=True)
    layer = model.blocks[0].moe
    held = [index for index, e in enumerate(layer.experts) if e[0].weight.numel()]
    with engine.full_parameters(write=True):
        for index, each in enumerate(layer.experts):
            each[0].bias.fill_(float(index))
    inside = None
    with engine.full_parameters():
        values = [float(each[0].bias[0]) for each in layer.experts]
        ids, mask, _ = problem.batches(0)[0]
        if world.rank == 0:
            inside = model.eval()(ids, mask)
    plain_state = engine.model_state_dict()
    engine.close()
    model.eval()
    outside = model(ids, mask)
    if world.rank == 0:
        assert torch.equal(inside, outside)
        assert plain_state["blocks.0.moe.experts.7.0.weight"].shape == (5, 6)
    return held, values, [each[0].bias[0].item() for each in layer.experts]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.full)])
def test_full_parameters_hold_all_experts(group, stages):
    found = group(2 * stages, expert=2, pipeline=stages)(written)
    held = [each[0] for each in found]
    assert held == [[0, 1, 2, 3]] * stages + [[4, 5, 6, 7]] * stages
    expected = [float(index) for index in range(8)]
    assert all(each[1:] == (expected, expected) for each in found)


class Bad:
    """Models that cannot be divided."""

    @staticmethod
    def none() -> nn.Module:
        """Return a model without experts."""
        return nn.Linear(3, 3)

    @staticmethod
    def few() -> nn.Module:
        """Return a layer with fewer experts than ranks."""
        return moe(experts=1, top_k=1)

    @staticmethod
    def tied() -> nn.Module:
        """Return experts that share a weight."""
        layer = moe()
        layer.experts[5][0].weight = layer.experts[0][0].weight
        return layer

    @staticmethod
    def outside() -> nn.Module:
        """Return an expert's weight that is also another module's."""
        layer = moe()
        layer.shared[0].weight = layer.experts[3][0].weight
        return layer

    @staticmethod
    def buffers() -> nn.Module:
        """Return experts with running statistics."""
        layer = moe()
        layer.experts[1].append(nn.BatchNorm1d(6))
        return layer.double()


REFUSED = {
    "none": (ModelError, "--expert 2 found no mixture-of-experts layer to split in Linear"),
    "few": (ModelError, "has only 1 expert(s)"),
    "tied": (ModelError, "experts.5.0.weight is also a parameter of another expert"),
    "outside": (ModelError, "is a parameter of an expert, and of another module too"),
    "buffers": (ModelError, "experts.1 has a buffer, 3.running_mean"),
}


def refused(world: sw.World) -> dict[str, tuple[str, str]]:
    """Return the error of each bad model or setting."""
    found = {}
    for name in REFUSED:
        model = getattr(Bad, name)()
        before = [p.shape for p in model.parameters()]
        try:
            sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
        except (ModelError, ConfigError) as error:
            found[name] = type(error).__name__, str(error)
        assert [p.shape for p in model.parameters()] == before
    model = moe()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        sw.Engine(model, optimizer, quiet=True, shard_within="host", zero=2)
    except (ModelError, ConfigError) as error:
        found["host"] = type(error).__name__, str(error)
    model = moe(experts=4)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
    engine.backward(model(torch.randn(4, 6, dtype=torch.float64)).mean())
    try:
        with engine.full_gradients():
            pass
    except sw.errors.UsageError as error:
        found["gradients"] = type(error).__name__, str(error)
    engine.step()
    engine.close()
    return found


def test_refuses_what_it_cannot_split(group):
    for found in group(2, expert=2)(refused):
        for name, (kind, words) in REFUSED.items():
            assert found[name][0] == kind.__name__, name
            assert words in found[name][1]
        assert "--shard-within host" in found["host"][1]
        assert "with --expert 2: no worker has the whole gradient" in found["gradients"][1]
