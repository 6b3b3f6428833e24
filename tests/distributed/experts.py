"""A small language model with mixtures of experts, and its training in one plain process."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.layout.bucket_layout import even_cuts
from shardwise.parallel.tensor import compiled_units
from tests.unit.experts.naive import Loops, expert

WIDTH, WORDS, EXPERTS = 6, 11, 8


class Block(nn.Module):
    """Mixes the tokens of a row causally, then runs a mixture of experts."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        more = dict(options)
        number, shared = more.pop("experts", EXPERTS), more.pop("shared", True)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.moe = sw.MoE(
            nn.Linear(WIDTH, number, bias=False),
            nn.ModuleList([expert(WIDTH, 5) for _ in range(number)]),
            shared=expert(WIDTH, 4) if shared else None,
            **more,
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return (rows, tokens, WIDTH)."""
        x = x + self.mix(self.norm(x).cumsum(1))
        return x + self.moe(x, mask)


class Model(nn.Module):
    """An embedding, a dense layer, two blocks and a head."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.dense = expert(WIDTH, 4)
        self.blocks = nn.ModuleList([Block(options) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return logits (rows, tokens, WORDS)."""
        x = self.dense(self.words(ids))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


@dataclass(frozen=True)
class Problem:
    """A training: `rows` per micro-batch in each step, which ranks share."""

    optimizer: str = "adamw"
    steps: int = 4
    rows: tuple[tuple[int, ...], ...] = ((4,), (3,), (5,), (4,))
    options: dict[str, Any] = field(default_factory=dict)
    max_norm: float | None = 0.05
    settings: dict[str, Any] = field(default_factory=dict)
    lone: bool = False
    """True if the router sends every token to the same two experts."""
    seed: int = 0
    few_labels: bool = False
    """True if only the first row has labels, so that some ranks have tokens but no loss."""

    def model(self) -> Model:
        """Return the model in fp64, the same in every process."""
        torch.manual_seed(7 + self.seed)
        options = {"balance": 0.3, "z_loss": 0.05, "bias_rate": 0.02, **self.options}
        model = Model(options)
        model = model if "precision" in self.settings else model.double()
        if self.lone:
            with torch.no_grad():
                for block in model.blocks:
                    block.moe.router.weight.mul_(1e-3)
                    block.moe.selection_bias[1:3] += 5.0
        return model

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        if self.optimizer == "adafactor":  # it needs whole tensors
            return torch.optim.Adafactor(model.parameters(), lr=0.02)
        return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)

    def batches(self, step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return ids, mask and labels of the micro-batches of a step, (rows, 5) each."""
        torch.manual_seed(100 + step + 1000 * self.seed)
        found = []
        for rows in self.rows[step % len(self.rows)]:
            ids = torch.randint(WORDS, (rows, 5))
            mask = torch.rand(rows, 5) < 0.8
            labels = torch.randint(WORDS, (rows, 5)).masked_fill(~mask, -100)
            # The labels of few tokens count, so that loss weights and token counts differ.
            labels[:, 0] = -100
            if self.few_labels:
                labels[1:] = -100
            labels[0, 1] = 1
            found.append((ids, mask, labels))
        return found


@dataclass(frozen=True)
class InStages(Problem):
    """A training in which each of `replicas` cuts its share of the rows into micro-batches."""

    replicas: int = 2
    micro_batches: int = 4

    def whole(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return all rows of a step."""
        (batch,) = super().batches(step)
        return batch

    def batches(self, step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the micro-batches that run at the same time, each over all replicas."""
        tensors = self.whole(step)
        found: list[list[int]] = [[] for _ in range(self.micro_batches)]
        for first, end in pairwise(even_cuts(len(tensors[0]), self.replicas)):
            cuts = [first + cut for cut in even_cuts(end - first, self.micro_batches)]
            for rows, (begin, stop) in zip(found, pairwise(cuts), strict=True):
                rows += range(begin, stop)
        ids, mask, labels = tensors
        return [(ids[rows], mask[rows], labels[rows]) for rows in found if rows]


def train_step_in_stages(
    world: sw.World,
    engine: sw.Engine,
    problem: InStages,
    step: int,
    losses: list[float],
    norms: list[float],
) -> None:
    """Make one step with `engine.forward_backward`, and append its loss and norm."""
    model = engine._spec.models[0]
    batch = problem.whole(step)
    engine.forward_backward(
        lambda *part: loss_of(model, *part),
        *world.share(batch),
        weight=lambda ids, mask, labels: int((labels != -100).sum()),
    )
    stats = engine.step(max_norm=problem.max_norm)
    for counts in stats.experts.values():
        assert sum(counts) == int(batch[1].sum()) * model.blocks[0].moe.top_k
    assert len(stats.experts) == 2
    losses.append(stats.loss)
    norms.append(stats.grad_norm)


def loss_of(model: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over the labels that count, or 0 if none counts."""
    logits = model(ids, mask).flatten(0, 1)
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    return total / max(int((labels != -100).sum()), 1)


def plain(problem: Problem) -> dict[str, Any]:
    """Train in this process with PyTorch alone and loops over tokens. Return what to compare."""
    model = problem.model()
    optimizer = problem.optimizer_of(model)
    loops = Loops([block.moe for block in model.blocks])
    losses, norms = [], []
    for step in range(problem.steps):
        batches = problem.batches(step)
        total = sum(int((labels != -100).sum()) for *_, labels in batches)
        mean = 0.0
        for ids, mask, labels in batches:
            loops.losses = 0.0
            loss = loss_of(model, ids, mask, labels)
            share = int((labels != -100).sum()) / total
            mean += loss.item() * share
            ((loss + loops.losses) * share).backward()
        for parameter in model.parameters():  # as if every expert had run
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), problem.max_norm or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        loops.finish_step()
        losses.append(mean)
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "values": values}


def trained(world: sw.World, problem: Problem) -> dict[str, Any]:
    """Train with an engine on this rank. Return what to compare."""
    model = problem.model()
    optimizer = problem.optimizer_of(model)
    engine = sw.Engine(model, optimizer, quiet=True, **problem.settings)
    losses, norms = [], []
    make_step = train_step_in_stages if isinstance(problem, InStages) else train_step
    for step in range(problem.steps):
        make_step(world, engine, problem, step, losses, norms)
    with engine.full_parameters():
        values = {n: v.detach().clone() for n, v in named_values(model).items()}
    held = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    engine.close()
    return {"losses": losses, "norms": norms, "values": values, "held": held}


def named_values(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def train_step(
    world: sw.World,
    engine: sw.Engine,
    problem: Problem,
    step: int,
    losses: list[float],
    norms: list[float],
) -> None:
    """Make one step, and append its loss and norm."""
    model = engine._spec.models[0]
    batches = problem.batches(step)
    for number, batch in enumerate(batches):
        ids, mask, labels = (world.share(each) for each in batch)
        loss = loss_of(model, ids, mask, labels)
        items = 0 if world.rows == 0 else int((labels != -100).sum())
        engine.backward(loss, weight=items, last=number == len(batches) - 1)
    stats = engine.step(max_norm=problem.max_norm)
    tokens = sum(int(mask.sum()) for _, mask, _ in batches)
    assert stats.experts.keys() == {"blocks.0.moe", "blocks.1.moe"}
    for counts in stats.experts.values():
        assert sum(counts) == tokens * model.blocks[0].moe.top_k
    losses.append(stats.loss)
    norms.append(stats.grad_norm)


def compare(ours: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-8) -> None:
    """Assert that a training equals the one of a plain process."""
    for key in ("losses", "norms"):
        ours_, theirs = (torch.tensor(each[key], dtype=torch.float64) for each in (ours, expected))
        torch.testing.assert_close(ours_, theirs, rtol=tolerance, atol=tolerance)
    assert ours["values"].keys() == expected["values"].keys()
    for name, value in expected["values"].items():
        torch.testing.assert_close(
            ours["values"][name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


LIMIT = 380
"""Seconds for a training that is compiled. A busy machine takes minutes."""

ONE_GRAPH = {"backend": "aot_eager", "fullgraph": True}
"""Arguments of torch.compile that raise an error if code is not one graph."""


def compiled(
    world: sw.World, options: dict[str, Any], train: Callable[..., Any], *args: Any
) -> tuple[Any, int]:
    """Return `train(world, *args)`, and its number of graphs.

    `options` are arguments of torch.compile.
    """
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain_compile = torch.compile
    with (
        mock.patch.object(compiled_units, "BACKEND", options["backend"]),
        mock.patch.object(torch, "compile", partial(plain_compile, **options)),
        warnings.catch_warnings(),
    ):
        # The compiler itself inspects it, for any input that is not a leaf.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        # Dynamo creates an object of this class when it traces an autograd.Function.
        warnings.filterwarnings("ignore", ".*Function'> should not be", DeprecationWarning)
        # Inductor imports a module that uses it.
        warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)
        found = train(world, *args)
    torch.compiler.reset()
    return found, counters["stats"]["unique_graphs"]
