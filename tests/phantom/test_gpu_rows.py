"""The functions of tests/gpu, on the simulated device."""

import pytest
import torch

from tests.gpu import test_rows

@pytest.mark.parametrize("case", test_rows.CASES, ids=str)
def test_one_rank(phantom, case):
    phantom(1, test_rows.as_plain, *case, torch.float64, 1)
