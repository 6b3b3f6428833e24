"""The exact mode with mixtures of experts: identical bits for every `--expert` and `-n`."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, UsageError
from tests.parity import exact_problems
from tests.parity.test_exact_mode import alone, trained  # noqa: F401, the fixture `alone`
from tests.tables import covering
from tests.unit.experts.naive import moe

PLAN = {"expert_plan": {"blocks.*": {"router": "gate", "experts": "experts", "top_k": 2}}}
FURTHER: dict[str, dict[str, Any]] = {
    "moe": {},
    "planned": PLAN,
    "mixtral": {},
    "mixtral-grouped": {},
}

SIZES = ((4, 4), (4, 2), (2, 2), (4, 1), (2, 1))
"""Numbers of workers, and `--expert`."""


@pytest.mark.parametrize(
    ("sizes", "zero", "model"),
    covering(
        [(sizes, zero, model) for sizes in SIZES for zero in (0, 3) for model in FURTHER], often=2
    ),
)
def test_same_bits_as_one_worker(group, alone, sizes, zero, model):  # noqa: F811
    workers, expert = sizes
    expected = alone(model, settings=tuple(FURTHER[model].items()))
    found = group(workers, expert=expert)(trained, 4, model, {"zero": zero, **FURTHER[model]})
    assert set(found) == {expected}


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.full)])
def test_same_bits_if_autocast_casts_weights_that_are_used_twice(group, alone, workers):  # noqa: F811
    settings = {"precision": "bf16-mixed"}
    found = group(workers, expert=workers)(trained, 4, "moe-twice", settings | {"zero": 2})
    assert set(found) == {alone("moe-twice", settings=tuple(settings.items()))}


class Dropping(nn.Module):
    """Experts in tensors (E, ...), as in Transformers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim = 4, 4
        self.up = nn.Parameter(torch.randn(4, 4, 4))
        self.rate = 0.0

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """(T, 4) to the same."""
        total = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            gate = (top_k_weights * (top_k_index == e)).sum(1, keepdim=True)
            total = total + gate * F.dropout(hidden_states @ self.up[e], self.rate)
        return total


class Routed(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = Dropping()

    def forward(self, x):
        """(T, 4) to the same."""
        gates, chosen = self.router(x).softmax(-1).topk(2, -1)
        return self.experts(x, chosen, gates)


def refused(world: sw.World) -> dict[str, tuple[str, str]]:
    """Return the class and the text of each error."""
    os.environ["SHARDWISE_EXACT"] = "4"
    world.settings = world.settle()
    found = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (ConfigError, UsageError) as error:
            found[name] = type(error).__name__, str(error)

    def engine(model: nn.Module, **settings: Any) -> sw.Engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return sw.Engine(model, optimizer, quiet=True, **settings)

    note("narrow", lambda: engine(moe(), precision="bf16"))
    model, x = moe(), torch.randn(3, 6, dtype=torch.float64)
    twice = engine(model)
    note("twice", lambda: twice.backward(model(model(x)).sum()))
    twice.close()
    drops = Routed()
    random = engine(drops)
    drops.experts.rate = 0.5
    note("random", lambda: drops(x[:, :4].float()))
    random.close()
    recurrent = moe()
    recurrent.experts[1].append(nn.GRU(6, 6, dtype=torch.float64))
    note("recurrent", lambda: engine(recurrent))
    note("odd", lambda: engine(exact_problems.EXPERTS["mixtral-odd"]()))

    def quantised() -> sw.Engine:
        model = exact_problems.EXPERTS["mixtral"]()
        optimizer = torch.optim.AdamW(model.parameters())
        return sw.Engine(model, optimizer, quiet=True, optimizer_state="8bit")

    note("quantised", quantised)
    return found


def test_refuses_what_is_not_exact(group):
    for found in group(2, expert=2)(refused):
        assert found["narrow"][0] == "ConfigError"
        assert "parameters in torch.bfloat16" in found["narrow"][1]
        assert found["twice"][0] == found["random"][0] == "UsageError"
        assert "a mixture-of-experts layer ran twice before this backward pass" in found["twice"][1]
        assert found["recurrent"][0] == "ConfigError"
        assert "(GRU): its products use a list of its weights" in found["recurrent"][1]
        assert found["odd"][0] == "ConfigError"
        assert "has 1056 bytes, which is no multiple of 64" in found["odd"][1]
        assert found["quantised"][0] == "ConfigError"
        assert "elements, which is no multiple of 256" in found["quantised"][1]
        assert "experts that share tensors (E, ...) drew random numbers" in found["random"][1]
