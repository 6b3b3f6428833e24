"""`expert_plan`: a user's own blocks of experts are spread over ranks, if a trial agrees."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.distributed.experts import LIMIT, ONE_GRAPH, compiled
from tests.unit.experts.naive import expert

WIDTH, EXPERTS, CLASSES = 6, 5, 3
PLAN = {"blocks.*.mix": {"router": "gate", "experts": "nets", "shared": "always", "top_k": 2}}


class Mix(nn.Module):
    """Experts as many scripts write them: a loop over those that have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.nets = nn.ModuleList([expert(WIDTH, 4) for _ in range(EXPERTS)])
        self.always = expert(WIDTH, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (rows, tokens, WIDTH)."""
        x = hidden.reshape(-1, WIDTH)
        gates, chosen = self.gate(x).softmax(-1).topk(2)
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, net in enumerate(self.nets):
            rows, slots = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, net(x[rows]) * gates[rows, slots].unsqueeze(-1))
        return (out + self.always(x)).view_as(hidden)


class Block(nn.Module):
    """A linear map and a mixture of experts, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(WIDTH, WIDTH), Mix()

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, tokens, WIDTH)."""
        x = x + torch.tanh(self.linear(x))
        return x + self.mix(hidden=x)


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, CLASSES) for (rows, tokens, WIDTH)."""
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def train(step_with: Any, name: str) -> tuple[Model, list[float], list[float]]:
    """Train for three steps. `step_with` returns loss and norm of one, given the batch."""
    torch.manual_seed(3)
    model = Model().double()
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    step = step_with(model, kind(model.parameters(), lr=0.1))
    torch.manual_seed(4)
    batches = [(torch.randn(5, 4, WIDTH).double(), torch.randint(CLASSES, (5,))) for _ in range(3)]
    losses, norms = zip(*(step(x, y) for x, y in batches), strict=True)
    return model, list(losses), list(norms)


def plain(name: str) -> tuple[Model, list[float], list[float]]:
    """Train in one plain process."""

    def step_with(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def step(x: Tensor, y: Tensor) -> tuple[float, float]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for parameter in model.parameters():  # as if every expert had run
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
            return loss.item(), norm

        return step

    return train(step_with, name)


def planned(world: sw.World, name: str, settings: dict[str, Any]) -> Any:
    """Train with an engine and a plan. Return also the numbers of elements and of tokens."""
    seen: dict[str, Any] = {}

    def step_with(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        engine = sw.Engine(model, optimizer, quiet=True, expert_plan=PLAN, **settings)
        seen["engine"] = engine
        seen["held"] = sum(p.numel() for n, p in model.named_parameters() if ".nets." in n)

        def step(x: Tensor, y: Tensor) -> tuple[float, float]:
            x, y = world.share((x, y))
            engine.backward(F.cross_entropy(model(x), y))
            stats = engine.step(max_norm=0.3)
            seen["counts"] = {name: sum(counts) for name, counts in stats.experts.items()}
            return stats.loss, stats.grad_norm

        return step

    model, losses, norms = train(step_with, name)
    seen["engine"].close()
    assert "forward" not in vars(model.blocks[0].mix)
    return dict(model.state_dict()), losses, norms, seen["held"], seen["counts"]


@pytest.mark.slow
def test_compiled_equals_one_process(group):
    expected, losses, norms = plain("sgd")
    ranks, settings = group(2, expert=2), {"compile": True}
    for found, _ in ranks(compiled, ONE_GRAPH, planned, "sgd", settings, limit=LIMIT):
        assert (found[1], found[2]) == (pytest.approx(losses), pytest.approx(norms))
        torch.testing.assert_close(found[0], dict(expected.state_dict()), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "zero"),
    [("adamw", 3), *(pytest.param("sgd", z, marks=pytest.mark.full) for z in range(4))],
)
def test_equals_one_process(group, name, zero):
    model, losses, norms = plain(name)
    expected = model.state_dict()
    whole = sum(v.numel() for n, v in expected.items() if ".nets." in n)
    found = group(2, expert=2)(planned, name, {"zero": zero})
    if zero < 3:
        assert sum(held for *_, held, _ in found) == whole
    for values, ours, our_norms, _, counts in found:
        assert ours == pytest.approx(losses, rel=1e-8)
        assert our_norms == pytest.approx(norms, rel=1e-8)
        assert counts == {f"blocks.{n}.mix": 5 * 4 * 2 for n in range(2)}
        for key, value in expected.items():
            torch.testing.assert_close(values[key], value, rtol=1e-8, atol=1e-10)


class Noting(Mix):
    """Keeps a loss as an attribute, which scripts add to theirs."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (rows, tokens, WIDTH)."""
        self.loss = hidden.square().mean()
        return super().forward(hidden)


class Biased(Mix):
    """Adds a buffer to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(EXPERTS))


MIX = PLAN["blocks.*.mix"]
REFUSED = {
    "one expert": (Mix, {"mix": {**MIX, "top_k": 1}}, "sw.MoE has another value of the output"),
    "no sum": (Mix, {"mix": {**MIX, "normalize": False}}, "another value of the output"),
    "attribute": (Noting, {"mix": MIX}, "its forward sets attributes"),
    "buffer": (Biased, {"mix": MIX}, "it has buffers"),
    "name": (Mix, {"mixture": MIX}, "no module is called mixture"),
    "option": (Mix, {"mix": {**MIX, "k": 2}}, "mix has the unknown option 'k'"),
    "part": (Mix, {"mix": {**MIX, "router": "router"}}, "has no submodule router. Name its router"),
}


def refused(world: sw.World) -> dict[str, str]:
    """Return the error of each bad plan."""
    found = {}
    for name, (kind, plan, _) in REFUSED.items():
        model = nn.ModuleDict({"mix": kind(), "other": nn.Linear(2, 2)})
        try:
            sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True, expert_plan=plan)
        except ModelError as error:
            found[name] = str(error)
        assert not {"forward", "is_one_unit"} & vars(model["mix"]).keys()
        assert all(p.numel() for p in model.parameters())
    return found


def test_refuses_plans_that_do_not_fit(group):
    for found in group(2, expert=2)(refused):
        for name, (_, _, words) in REFUSED.items():
            assert words in found[name], name
