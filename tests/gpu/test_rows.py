"""Every ZeRO stage on every tier trains on a GPU like plain PyTorch."""

import pytest
import torch

import shardwise as sw
from tests.gpu.training import (
    alone,
    assert_close,
    batch,
    build,
    loss_of,
    needs_gpu,
    tiers,
    train,
    train_plain,
)

pytestmark = needs_gpu

CASES = [
    (0, {}),
    (1, {}),
    (2, {}),
    (3, {}),
    *((row, {"optimizer": tier}) for row in range(4) for tier in ("cpu", "nvme")),
    *(
        (row, {"optimizer": "device", "gradients": tier})
        for row in (2, 3)
        for tier in ("cpu", "nvme")
    ),
    *(
        (3, {"optimizer": one, "params": other})
        for one in ("device", "cpu", "nvme")
        for other in ("cpu", "nvme")
    ),
]

EXACT = {torch.float64: 1e-8, torch.float32: 1e-5}


def as_plain(world, row, named, dtype, micro):
    ours = train(world, dtype=dtype, micro=micro, zero=row, **tiers(**named))
    tolerance = EXACT[dtype]
    assert_close(ours, train_plain(world, dtype=dtype), tolerance, values=dtype == torch.float64)


def as_plain_alone(world, *case):
    with alone(world):
        as_plain(world, *case)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank_over_nccl(group, case, micro, dtype):
    group(1, device="cuda")(as_plain, *case, dtype, micro, limit=120)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plain_python_process(group, case, dtype):
    group(1, device="cuda")(as_plain_alone, *case, dtype, 2, limit=120)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_of_one_gpu_over_gloo(group, case, dtype):
    group(2, device="cuda", transport="gloo")(as_plain, *case, dtype, 1, limit=120)


def carried_over(world, row, named):
    """State from before the engine, and given back after it, counts of steps included."""

    def plain_steps(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, *batch(world, step)).backward()
            optimizer.step()

    model, optimizer = build(world)
    plain_steps(model, optimizer, range(2))
    engine = sw.Engine(model, optimizer, zero=row, **tiers(**named))
    for step in range(2, 4):
        engine.backward(loss_of(model, *batch(world, step)))
        engine.step()
    engine.close()
    plain_steps(model, optimizer, range(4, 6))
    other, reference = build(world)
    plain_steps(other, reference, range(6))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
        assert float(optimizer.state[one]["step"]) == float(reference.state[two]["step"]) == 6.0


@pytest.mark.parametrize(
    "case", [(0, {}), (1, {"optimizer": "cpu"}), (3, {"optimizer": "nvme"})], ids=str
)
def test_state_is_carried_over(group, case):
    group(1, device="cuda")(carried_over, *case)
