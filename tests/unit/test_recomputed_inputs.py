"""A recomputed unit that changes its input in place raises an error."""

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.recomputation import RecomputedForward


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2).tanh()


def test_a_unit_that_changes_its_input_is_refused():
    unit = InPlace()
    RecomputedForward(unit, None)
    with pytest.raises(ModelError, match=r"InPlace changes its input in place.*x\.clone\(\)"):
        unit(torch.ones(3, requires_grad=True) * 1.0)
    plain = nn.Tanh()
    RecomputedForward(plain, None)
    plain(torch.ones(3, requires_grad=True) * 1.0).sum().backward()
