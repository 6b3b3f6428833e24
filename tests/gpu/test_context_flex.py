"""Flex attention under `--context` with torch's kernels, compared with plain PyTorch on the GPU."""

import pytest
import torch

from tests.distributed.test_context_flex import Problem, compiled_by_default, trained
from tests.gpu.training import needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize("kind", ["alibi", "documents"])
def test_equals_one_process(group, kind):
    problem = Problem(kind, length=200, attend=compiled_by_default)
    expected = trained(None, problem, "cuda", torch.float32)
    for ours in group(2, device="cuda", transport="gloo", context=2)(
        trained, problem, "cuda", torch.float32
    ):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-4)
