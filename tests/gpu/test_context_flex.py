"""Flex attention under `--context` with torch's kernels, compared with plain PyTorch on the GPU."""

import pytest
import torch

import shardwise as sw
from tests.distributed.test_context_flex import Problem, compiled_by_default, trained
from tests.gpu.training import needs_gpu

pytestmark = needs_gpu


def both_losses(world: sw.World, problem: Problem) -> list[list[float]]:
    """Return the losses of plain PyTorch, and of training on a part of the sequences."""
    return [trained(each, problem, "cuda", torch.float32)["losses"] for each in (None, world)]


@pytest.mark.parametrize("kind", ["alibi", "documents"])
def test_two_ranks_equal_one_process(group, kind):
    problem = Problem(kind, length=200, attend=compiled_by_default)
    ranks = group(2, device="cuda", transport="gloo", context=2)
    for expected, ours in ranks(both_losses, problem, limit=120):
        assert ours == pytest.approx(expected, rel=1e-4)
