"""A small language model with attention, and its training in one plain process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from tests.unit.experts.naive import Loops, moe

WIDTH, WORDS, LONGEST = 8, 11, 16


class Core(nn.Module):
    """Attention that calls softmax itself. Causal unless it gets a mask."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Return (rows, heads, tokens, features)."""
        rows, tokens = q.size(0), q.size(2)
        copies = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril() if mask is None else mask
        if offsets is not None:
            assert int(offsets[-1]) == rows * tokens
            numbers = torch.bucketize(torch.arange(rows * tokens), offsets, right=True)
            numbers = numbers.view(rows, 1, tokens)
            allowed = allowed & (numbers[..., None] == numbers[..., None, :])
        scores = q @ k.mT / q.size(3) ** 0.5
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


class Block(nn.Module):
    """Grouped-query attention, and a two-layer network or a mixture of them."""

    def __init__(
        self,
        heads: int,
        groups: int,
        experts: dict[str, Any] | None,
        dropout: float,
        *,
        own_core: bool,
        first: bool,
    ) -> None:
        super().__init__()
        self.first = first
        self.core = Core() if own_core else None
        self.heads, self.groups, features = heads, groups, WIDTH // heads
        self.dropout = dropout
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, heads * features)
        self.k = nn.Linear(WIDTH, groups * features)
        self.v = nn.Linear(WIDTH, groups * features)
        self.out = nn.Linear(heads * features, WIDTH)
        if experts is None:
            self.wide, self.narrow = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        else:
            self.moe = moe(WIDTH, 5, **experts)

    def forward(self, x: Tensor, mask: Tensor | None, offsets: Tensor | None = None) -> Tensor:
        """Return (rows, tokens, WIDTH), or (tokens, rows, WIDTH)."""
        h = self.norm(x)
        if self.first:
            h = h.transpose(0, 1)
        rows, tokens, _ = h.shape
        q = self.q(h).view(rows, tokens, self.heads, -1).transpose(1, 2)
        k = self.k(h).view(rows, tokens, self.groups, -1).transpose(1, 2)
        v = self.v(h).view(rows, tokens, self.groups, -1).transpose(1, 2)
        mask = mask[:, None, None, :] if mask is not None and mask.ndim == 2 else mask
        if self.core is not None:
            attended = self.core(q, k, v, mask, offsets)
        else:
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=mask is None,
                enable_gqa=self.heads != self.groups,
            )
        attended = self.out(attended.transpose(1, 2).reshape(rows, tokens, -1))
        x = x + (attended.transpose(0, 1) if self.first else attended)
        h = self.norm2(x)
        return x + (self.moe(h) if hasattr(self, "moe") else self.narrow(F.gelu(self.wide(h))))


PLAN = {"blocks.*": sw.Attention(qkv=("q", "k", "v"), out="out", heads="heads", kv_heads="groups")}
"""The plan for `--tensor`. The two-layer networks are found without it."""


class Model(nn.Module):
    """Embeddings of words and of given positions, two blocks, and a tied head."""

    def __init__(
        self,
        heads: int = 4,
        groups: int = 4,
        experts: dict[str, Any] | None = None,
        dropout: float = 0.0,
        *,
        own_core: bool = False,
        first: bool = False,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(
            [
                Block(heads, groups, experts, dropout, own_core=own_core, first=first)
                for _ in range(2)
            ]
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Return logits (rows, tokens, WORDS), or (tokens, rows, WORDS)."""
        x = self.words(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x, mask, offsets)
        return self.norm(x) @ self.words.weight.T


@dataclass(frozen=True)
class Problem:
    """A training whose micro-batches have `rows` x `length` tokens."""

    optimizer: str = "sgd"
    steps: int = 3
    rows: tuple[int, ...] = (2,)
    length: int = 9
    shrinks: int = 0
    """Each micro-batch has this many fewer tokens than the one before."""
    heads: int = 4
    groups: int = 4
    mask: str = ""
    """The mask of attention. Empty for causal attention.

    "padding"    bidirectional attention to the tokens that are not padding
    "documents"  causal attention within documents
    "window"     causal attention to the last tokens
    "bias"       a bias of each head, by the distance of two tokens
    "offsets"    no mask, but the offsets of documents in the flattened rows
    """
    unlabelled: int = 0
    """The number of first tokens without labels, so that some ranks have tokens but no loss."""
    own_mean: bool = False
    """True if the script divides the loss by its own number of labels, which may be 0."""
    experts: dict[str, Any] | None = None
    """Options of `sw.MoE` in each block, or None for dense blocks."""
    dropout: float = 0.0
    """The probability that attention drops a score."""
    own_core: bool = False
    """True to compute attention in a module that calls softmax itself."""
    first: bool = False
    """True for sequences along dimension 0: (length, rows)."""
    scheduled: bool = False
    """True to call `engine.forward_backward`, which cuts batches into micro-batches."""
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    method: str = "auto"

    def model(self) -> Model:
        """Return the model in fp64, the same in every process."""
        torch.manual_seed(7 + self.seed)
        return Model(
            self.heads,
            self.groups,
            self.experts,
            self.dropout,
            own_core=self.own_core,
            first=self.first,
        ).double()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)

    def batches(self, step: int) -> list[tuple[Tensor, ...]]:
        """Return ids, positions, mask and labels of the micro-batches of a step."""
        torch.manual_seed(100 + step + 1000 * self.seed)
        found = []
        for number, rows in enumerate(self.rows):
            length = self.length - number * self.shrinks
            shape = rows, length
            ids, labels = torch.randint(WORDS, shape), torch.randint(WORDS, shape)
            positions = torch.arange(length).expand(shape)
            mask = positions < torch.randint(2, length + 1, (rows, 1))
            labels[torch.rand(shape) < 0.3] = -100
            if self.mask == "padding":
                labels[~mask] = -100
            elif self.mask == "offsets":  # True at the first token of a document
                mask = torch.rand(shape) < 0.4
                mask[:, 0] = True
            elif self.mask:
                mask = self.pairs(rows)
            labels[:, : self.unlabelled] = -100
            labels[0, self.unlabelled] = 1
            batch = ids, positions, mask, labels
            found.append(tuple(each.transpose(0, 1) for each in batch) if self.first else batch)
        return found

    def share(self, world: sw.World, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return this rank's part of `batch`. Starts of documents are not split."""
        if self.first:
            uncut = {2: None} if self.mask == "offsets" else {}
            return world.share(batch, dim=1, sequence_dim=dict.fromkeys(range(4), 0) | uncut)
        return world.share(batch, sequence_dim={2: None} if self.mask == "offsets" else None)

    def logits(self, model: nn.Module, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Call the model."""
        if self.mask == "offsets":
            starts = mask.T if self.first else mask
            found = starts.reshape(-1).nonzero().view(-1).to(torch.int32)
            return model(ids, positions, None, F.pad(found, (0, 1), value=starts.numel()))
        if self.mask == "padding" and self.first:
            return model(ids, positions, mask.T)
        return model(ids, positions, mask if self.mask else None)

    def pairs(self, rows: int) -> Tensor:
        """Return a causal mask of pairs of tokens, (rows, 1 or heads, length, length)."""
        places = torch.arange(self.length)
        distances = places[:, None] - places
        mask = (distances >= 0).expand(rows, 1, -1, -1)
        if self.mask == "window":
            return mask & (distances < 3)
        if self.mask == "documents":
            numbers = (torch.rand(rows, self.length) < 0.3).cumsum(1)
            return mask & (numbers[:, None, :, None] == numbers[:, None, None, :])
        slopes = 0.5 ** torch.arange(1.0, self.heads + 1, dtype=torch.float64)
        bias = -slopes[:, None, None] * distances
        return bias.masked_fill(~mask, float("-inf"))

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross entropy over the labels that count; NaN if none counts."""
        ids, positions, mask, labels = batch
        logits = self.logits(model, ids, positions, mask).flatten(0, 1)
        if self.own_mean:
            each = F.cross_entropy(logits, labels.flatten(), reduction="none")
            # Tokens of a part without labels count in router losses, so its loss must be finite.
            least = 0 if self.experts is None else 1
            return each.sum() / (labels != -100).sum().clamp(min=least)
        return F.cross_entropy(logits, labels.flatten())


def plain(problem: Problem) -> dict[str, Any]:
    """Train in this process with PyTorch alone. Return what to compare."""
    model = problem.model()
    optimizer = problem.optimizer_of(model)
    loops = Loops([block.moe for block in model.blocks] if problem.experts is not None else [])
    losses, norms = [], []
    for step in range(problem.steps):
        batches = problem.batches(step)
        total = sum(int((labels != -100).sum()) for *_, labels in batches)
        mean = 0.0
        for batch in batches:
            loops.losses, share = 0.0, int((batch[-1] != -100).sum()) / total
            loss = problem.loss_of(model, batch)
            ((loss + loops.losses) * share).backward()
            mean += loss.item() * share
        for parameter in model.parameters():  # as if every expert had run
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        loops.finish_step()
        losses.append(mean)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "values": values, "logits": logits_of(model, problem)}


def logits_of(model: nn.Module, problem: Problem, world: sw.World | None = None) -> Tensor:
    """Evaluate the model on one more batch."""
    batch = problem.batches(problem.steps)[0]
    with torch.no_grad():
        ids, positions, mask, _ = batch if world is None else problem.share(world, batch)
        logits = problem.logits(model, ids, positions, mask)
        return logits.transpose(0, 1) if problem.first else logits


def trained(
    world: sw.World, problem: Problem, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> dict[str, Any]:
    """Train with an engine on this rank. Return what to compare. `wrap` may compile the model."""
    model = wrap(problem.model())
    optimizer = problem.optimizer_of(model)
    planned = ["blocks.*.core"] if problem.own_core else None
    engine = sw.Engine(
        model, optimizer, tensor_plan=PLAN, context_plan=planned, quiet=True, **problem.settings
    )
    losses, norms = [], []
    for step in range(problem.steps):
        batches = problem.batches(step)
        for number, batch in enumerate(batches):
            mine = problem.share(world, batch)
            if problem.scheduled:
                engine.forward_backward(
                    lambda *part: problem.loss_of(model, part),
                    *mine,
                    weight=lambda *part: int((part[-1] != -100).sum()),
                )
                continue
            # The stages of a pipeline without the loss cannot count its labels.
            is_counted = problem.own_mean or world.pipeline_size > 1
            weight = int((mine[-1] != -100).sum()) if is_counted else None
            last = number == len(batches) - 1
            engine.backward(problem.loss_of(model, mine), weight=weight, last=last)
        stats = engine.step(max_norm=0.5)
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
    logits = logits_of(model, problem, world)
    with engine.full_parameters():
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.close()
    return {"losses": losses, "norms": norms, "values": values, "logits": logits}
