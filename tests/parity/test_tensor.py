"""Parity of split layers with one plain PyTorch process, on any mesh, in every row.

Trainings have 6 steps. With `-m full` all have 20 as well.
"""

import hashlib

import pytest
import torch

import shardwise as sw
from tests.disk import on_a_disk
from tests.parity.plain import Trained
from tests.parity.problems import MODELS, Problem, loss_of
from tests.parity.test_rows import _assert_close, _assert_same, _from_loader
from tests.tables import covering

TOLERANCE = 1e-8

BUCKET = {"odd_mlp": 0.002, "splittable_gpt": 0.005, "deep_gpt": 0.01}
"""In MB, small enough for several buckets of each kind, and not a hundred."""


def _train(world, problem, plan, found, options) -> tuple[str, Trained]:
    model, optimizer, scheduler = problem.model_and_optimizer(seed=world.rank)
    before = dict(model.named_parameters())
    engine = sw.Engine(
        model, optimizer, tensor_plan=plan, bucket_mb=BUCKET[problem.model], **options
    )
    split = [name for name, cut in _cut(problem, model).items() if cut]
    assert len(split) >= found, f"only {split} were split"
    losses, norms = [], []
    for window in _from_loader(world, {}, problem):
        for (x, y), told in window:
            engine.backward(loss_of(model, x, y), **told)
        stats = engine.step(max_norm=problem.clip)
        scheduler.step()
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
    return ended(engine, model, before, losses, norms)


def ended(engine, model, before, losses, norms) -> tuple[str, Trained]:
    """Return this rank's part of the final model and a hash of it. close() restores the whole."""
    with engine.full_parameters():
        state = {name: value.clone() for name, value in model.state_dict().items()}
    kept = engine.optimizer_state_dict()
    engine.close()
    assert dict(model.named_parameters()) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()
    return digest, Trained(losses=losses, norms=norms, model=state, optimizer=kept)


def _cut(problem, model):
    """Map each parameter's name to whether its shape differs from the plain model's."""
    plain = MODELS[problem.model]().named_parameters()
    return {name: model.get_parameter(name).data.numel() not in (0, p.numel()) for name, p in plain}


def _problem(model, **changed):
    fields = {
        "optimizer": "adamw",
        "micro": "3",
        "dtype": torch.float64,
        "clip": 0.3,
        "schedule": "cosine",
        "groups": 2,
        "workers": 1,
    }
    return Problem(model=model, **fields | changed)


def _compare(group, plain, problem, plan, size, tensor, found=2, apart=None, **options):
    wanted = plain(problem)
    results = group(size, tensor=tensor, **(apart or {}))(
        _train, problem, plan, found, options, limit=120
    )
    compare(results, wanted, problem)


def compare(results, wanted, problem):
    """Check that all ranks end with the same model, equal to the plain process's."""
    assert len({digest for digest, _ in results}) == 1, "ranks end with different models"
    ours = results[0][1]
    _assert_close("losses", torch.tensor(ours.losses), torch.tensor(wanted.losses), TOLERANCE)
    _assert_close("norms", torch.tensor(ours.norms), torch.tensor(wanted.norms), TOLERANCE)
    assert problem.clip is None or max(wanted.norms) > problem.clip, "clipping was never on"
    _assert_same("model", ours.model, wanted.model, TOLERANCE)
    _assert_same("optimizer", ours.optimizer, wanted.optimizer, TOLERANCE)


BRIEFLY = pytest.mark.parametrize(
    "brief", [True, pytest.param(False, marks=pytest.mark.full)], ids=["brief", "long"]
)

MLP = {"0": "colwise", "2": "rowwise"}
TIED = {"tokens": "embedding", "head": "colwise_rep"}


@BRIEFLY
@pytest.mark.parametrize(
    ("size", "tensor", "row"), covering([*((4, 2, row) for row in range(4)), (2, 2, 0), (3, 3, 3)])
)
def test_an_mlp_by_plan_in_every_row(group, plain, size, tensor, row, brief):
    _compare(group, plain, _problem("odd_mlp", brief=brief), MLP, size, tensor, zero=row)


@BRIEFLY
@pytest.mark.parametrize(
    ("size", "tensor"), [(2, 2), (3, 3), pytest.param(4, 4, marks=pytest.mark.full)]
)
def test_a_gpt_by_known_modules(group, plain, size, tensor, brief):
    problem = _problem("splittable_gpt", brief=brief)
    _compare(group, plain, problem, None, size, tensor, found=6, zero=tensor % 4)


@BRIEFLY
@pytest.mark.parametrize(
    "row", [*(pytest.param(row, marks=pytest.mark.full) for row in (0, 1, 2)), 3]
)
def test_a_gpt_with_a_split_vocabulary_in_every_row(group, plain, row, brief):
    problem = _problem("splittable_gpt", micro="short", brief=brief)
    _compare(group, plain, problem, TIED, 4, 2, found=8, zero=row)


@BRIEFLY
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 3, "offload_optimizer": "nvme", "offload_params": "nvme"},
        pytest.param({"zero": 3, "apart": {"transport": "gloo"}}, marks=pytest.mark.full),
        pytest.param({"zero": 2, "apart": {"transport": "gloo"}}, marks=pytest.mark.full),
        # Split by tokens is tested below too.
        pytest.param({"zero": 3, "activations": "recomputed"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_combined_settings(group, plain, options, brief):
    options = {k: f"nvme:{on_a_disk()}" if v == "nvme" else v for k, v in options.items()}
    _compare(group, plain, _problem("splittable_gpt", brief=brief), TIED, 4, 2, found=8, **options)


@BRIEFLY
@pytest.mark.parametrize(
    ("size", "tensor", "plan", "options"),
    [
        (2, 2, None, {"zero": 0}),
        pytest.param(3, 3, TIED, {"zero": 2}, marks=pytest.mark.full),
        pytest.param(4, 2, TIED, {"zero": 1}, marks=pytest.mark.full),
        pytest.param(4, 2, None, {"zero": 3}, marks=pytest.mark.full),
        (4, 2, TIED, {"zero": 3, "activations": "recomputed"}),
        pytest.param(
            *(4, 2, TIED, {"zero": 3, "apart": {"transport": "gloo"}}), marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_sequence_parallel(group, plain, size, tensor, plan, options, brief):
    problem = _problem("splittable_gpt", micro="short" if tensor == 3 else "3", brief=brief)
    _compare(group, plain, problem, plan, size, tensor, found=6, sequence_parallel=True, **options)
