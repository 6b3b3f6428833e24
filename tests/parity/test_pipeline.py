"""Promise 1 where layers are shared out: as one plain PyTorch process, by every schedule, on any
mesh, in every row."""

import hashlib

import pytest
import torch

import shardwise as sw
from tests.disk import on_a_disk
from tests.parity.plain import Trained
from tests.parity.problems import loss_of, weight_of
from tests.parity.test_rows import _assert_close, _assert_same, _from_loader
from tests.parity.test_tensor import TOLERANCE, _problem


def _train(world, problem, plan, in_turn, options) -> tuple[str, Trained]:
    model, optimizer, scheduler = problem.model_and_optimizer(seed=world.rank)
    before = dict(model.named_parameters())
    engine = sw.Engine(model, optimizer, tensor_plan=plan, bucket_mb=0.002, **options)
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
    with engine.full_parameters():
        state = {name: value.clone() for name, value in model.state_dict().items()}
    kept = engine.optimizer_state_dict()
    engine.close()
    assert dict(model.named_parameters()) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()
    return digest, Trained(losses=losses, norms=norms, model=state, optimizer=kept)


def _compare(group, plain, problem, size, *, plan=None, in_turn=False, options=None, **mesh):
    wanted = plain(problem)
    results = group(size, **mesh)(_train, problem, plan, in_turn, options or {}, limit=120)
    assert len({digest for digest, _ in results}) == 1, "ranks end with different models"
    ours = results[0][1]
    _assert_close("losses", torch.tensor(ours.losses), torch.tensor(wanted.losses), TOLERANCE)
    _assert_close("norms", torch.tensor(ours.norms), torch.tensor(wanted.norms), TOLERANCE)
    assert problem.clip is None or max(wanted.norms) > problem.clip, "clipping was never on"
    _assert_same("model", ours.model, wanted.model, TOLERANCE)
    _assert_same("optimizer", ours.optimizer, wanted.optimizer, TOLERANCE)


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(group, plain, schedule, pipeline):
    """Embeddings are tied across the stages, and their rows are not the items of the mean."""
    problem = _problem("deep_gpt", micro="1")
    options = {"schedule": schedule, "microbatches": 4}
    _compare(group, plain, problem, pipeline, pipeline=pipeline, options=options)
