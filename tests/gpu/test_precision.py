"""The precision presets on a GPU, compared with plain autocast and GradScaler."""

import pytest
import torch

from tests.gpu.training import assert_close, needs_gpu, tiers, train, train_plain

pytestmark = needs_gpu

OVERFLOW = {3: 1e7}
"""In step 3 the loss is so large that fp16 gradients overflow."""

ROWS = [
    (0, {}),
    (1, {"optimizer": "cpu"}),
    (2, {}),
    (2, {"optimizer": "cpu"}),
    (3, {"params": "cpu", "optimizer": "cpu"}),
]


def bf16_mixed(world, row, named):
    ours = train(world, zero=row, precision="bf16-mixed", **tiers(**named))
    assert_close(ours, train_plain(world, autocast=torch.bfloat16), 2e-2)


def fp16_mixed(world, row, named):
    ours = train(world, zero=row, precision="fp16-mixed", scales=OVERFLOW, **tiers(**named))
    plain = train_plain(world, autocast=torch.float16, scales=OVERFLOW)
    assert ours.skipped == plain.skipped
    assert any(ours.skipped)
    assert ours.scale == plain.scale
    counted = [step for step, skipped in enumerate(plain.skipped) if not skipped]
    for name in ("losses", "norms"):
        one, two = getattr(ours, name), getattr(plain, name)
        assert [one[s] for s in counted] == pytest.approx([two[s] for s in counted], rel=3e-2)


def bf16(world, row, named, micro):
    ours = train(world, zero=row, precision="bf16", micro=micro, **tiers(**named))
    assert ours.values[0].dtype == torch.bfloat16
    plain = train_plain(world)
    assert ours.losses == pytest.approx(plain.losses, rel=5e-2)


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_bf16_mixed(group, case):
    group(1, device="cuda")(bf16_mixed, *case)


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_fp16_mixed_with_its_loss_scale(group, case):
    group(1, device="cuda")(fp16_mixed, *case)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_bf16(group, case, micro):
    group(1, device="cuda")(bf16, *case, micro)


def test_bf16_on_two_ranks_of_one_gpu(group):
    group(2, device="cuda", transport="gloo")(bf16, 2, {"optimizer": "cpu"}, 1)
