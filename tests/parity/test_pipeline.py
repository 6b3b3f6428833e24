"""Parity of pipelines with one plain PyTorch process, by every schedule, on any mesh, in every row.

Trainings have 6 steps. With `-m full` all have 20 as well.
"""

import pytest

import shardwise as sw
from tests.disk import on_a_disk
from tests.parity.plain import Trained
from tests.parity.problems import loss_of, weight_of
from tests.parity.test_rows import _from_loader
from tests.parity.test_tensor import BRIEFLY, BUCKET, _problem, compare, ended
from tests.tables import each_value


def _train(world, problem, plan, in_turn, options) -> tuple[str, Trained]:
    model, optimizer, scheduler = problem.model_and_optimizer(seed=world.rank)
    before = dict(model.named_parameters())
    engine = sw.Engine(
        model, optimizer, tensor_plan=plan, bucket_mb=BUCKET[problem.model], **options
    )
    is_text = problem.model.endswith("gpt")
    weigh = (lambda x, y: weight_of(y)) if is_text else None
    losses, norms = [], []
    for window in _from_loader(world, {}, problem):
        for (x, y), told in window:
            if in_turn:
                engine.backward(loss_of(model, x, y), **told)
            else:
                engine.forward_backward(lambda x, y: loss_of(model, x, y), x, y, weight=weigh)
        stats = engine.step(max_norm=problem.clip)
        scheduler.step()
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
    return ended(engine, model, before, losses, norms)


def _compare(group, plain, problem, size, *, plan=None, in_turn=False, options=None, **mesh):
    wanted = plain(problem)
    results = group(size, **mesh)(_train, problem, plan, in_turn, options or {}, limit=120)
    compare(results, wanted, problem)


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


@BRIEFLY
@each_value(schedule=SCHEDULES, pipeline=[2, 4])
def test_every_schedule(group, plain, schedule, pipeline, brief):
    """Embeddings are tied across the stages, and the items of the mean are not their rows."""
    problem = _problem("deep_gpt", micro="1", brief=brief)
    options = {"schedule": schedule, "microbatches": 4}
    _compare(group, plain, problem, pipeline, pipeline=pipeline, options=options)


OFTEN = {"1f1b": (3,), "interleaved": (), "zero-bubble": (2,)}
"""For `make test`. Row 0 and interleaved stages are tested above, row 1 below."""

EACH_ROW = [
    pytest.param(schedule, row, marks=() if row in often else pytest.mark.full)
    for schedule, often in OFTEN.items()
    for row in range(4)
    if (schedule, row) != ("zero-bubble", 3)
]
"""Not zero-bubble in row 3, which is refused: see tests/distributed/test_pipeline.py."""


@BRIEFLY
@pytest.mark.parametrize(("schedule", "row"), EACH_ROW)
def test_times_data_in_every_row(group, plain, schedule, row, brief):
    """Micro-batches have unequal sizes: 9 rows for each of two replicas, in four."""
    problem = _problem("deep_gpt", micro="1", brief=brief)
    options = {"schedule": schedule, "microbatches": 4, "zero": row}
    _compare(group, plain, problem, 4, pipeline=2, options=options)


@BRIEFLY
@pytest.mark.parametrize(
    "row", [*(pytest.param(row, marks=pytest.mark.full) for row in (0, 1, 2)), 3]
)
def test_times_data_and_tensor(group, plain, row, brief):
    problem = _problem("splittable_gpt", micro="1", brief=brief)
    _compare(group, plain, problem, 8, pipeline=2, tensor=2, options={"zero": row})


@pytest.mark.full  # 4 stages are in test_every_schedule, halves of layers in the test above
@pytest.mark.parametrize("brief", [True, False], ids=["brief", "long"])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_four_stages_of_two_halves(group, plain, by_tokens, brief):
    problem = _problem("splittable_gpt", micro="1", brief=brief)
    options = {"microbatches": 3, "sequence_parallel": by_tokens}
    _compare(group, plain, problem, 8, pipeline=4, tensor=2, options=options)


@BRIEFLY
@pytest.mark.parametrize("row", [pytest.param(0, marks=pytest.mark.full), 3])
def test_a_plain_loop_stage_after_stage(group, plain, row, brief):
    """Without forward_backward: correct, although only one worker is busy at a time."""
    problem = _problem("deep_gpt", micro="short", brief=brief)
    _compare(group, plain, problem, 4, pipeline=2, in_turn=True, options={"zero": row})


def test_accumulates_batches_that_do_not_divide(group, plain):
    """Micro-batches of 3 rows in 2 parts, and a last window with fewer rows."""
    problem = _problem("odd_mlp", micro="short")
    _compare(group, plain, problem, 2, pipeline=2, options={"microbatches": 2, "zero": 1})


@BRIEFLY
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 2, "transport": "gloo"},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in (
                {"zero": 3, "activations": "recomputed"},  # test_pipeline_programs.py
                {"zero": 3, "offload_optimizer": "nvme", "offload_params": "nvme"},
                {"zero": 3, "transport": "gloo", "schedule": "interleaved"},
            )
        ),
    ],
    ids=str,
)
def test_combined_settings(group, plain, options, brief):
    mesh = {name: options[name] for name in ("transport",) if name in options}
    options = {k: v for k, v in options.items() if k not in mesh}
    options = {k: f"nvme:{on_a_disk()}" if v == "nvme" else v for k, v in options.items()}
    problem = _problem("deep_gpt", micro="1", brief=brief)
    _compare(group, plain, problem, 4, pipeline=2, options=options, **mesh)
