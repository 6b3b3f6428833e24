"""Reading the terms of a loss from its autograd graph."""

import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.engine.gradient_weighting import weigh
from shardwise.engine.loss_terms import read
from shardwise.model import checkpointed_scalars

ROWS = 6


def made(loss_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return loss_of(model, model(torch.randn(ROWS, 4)), torch.randint(3, (ROWS,)))


def terms(loss_of, rows=ROWS):
    found = read(made(loss_of), rows)
    return [(term.kind, term.items, term.source) for term in found.terms]


HALF = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])

MEANS = {
    "cross entropy": (lambda m, out, y: F.cross_entropy(out, y), ROWS),
    "ignored labels": (lambda m, out, y: F.cross_entropy(out, y.fill_(1), ignore_index=1), 0),
    "mean of elements": (lambda m, out, y: out.square().mean(), ROWS * 3),
    "rows summed, then their mean": (lambda m, out, y: out.square().sum(1).mean(), ROWS),
    "mean of rows, then their sum": (lambda m, out, y: out.square().mean(0).sum(), ROWS),
    "divided by the rows": (lambda m, out, y: out.square().sum() / len(out), ROWS),
    "times one by the rows": (lambda m, out, y: out.sum() * (1 / ROWS), ROWS),
    "masked": (lambda m, out, y: (out.mean(1) * HALF).sum() / HALF.sum(), 3),
    "masked, of which nothing counts": (
        lambda m, out, y: (out.mean(1) * 0 * HALF).sum() / (0 * HALF).sum().clamp(min=1),
        1,
    ),
    "an empty mask": (
        lambda m, out, y: (out.mean(1) * (HALF > 1)).sum() / (HALF > 1).sum().clamp(min=1),
        0,
    ),
    "with penalties": (
        lambda m, out, y: (
            out.mean()
            + 0.1 * sum(p.square().sum() for p in m.parameters())
            + m[0].weight.norm()
            + (m[0].weight - torch.ones(5, 4)).square().sum()
        ),
        ROWS * 3,
    ),
    "a learned factor": (
        lambda m, out, y: out.mean() * m[0].bias[0].exp() + m[0].bias[0],
        ROWS * 3,
    ),
    "a Python sum of rows": (
        lambda m, out, y: sum(F.cross_entropy(o, t) for o, t in zip(out, y, strict=True)) / ROWS,
        ROWS,
    ),
    "statistics of the batch beside": (
        lambda m, out, y: (
            out.mean() + (1 - out.std(0)).relu().mean() + (out.T @ out).square().mean()
        ),
        ROWS * 3,
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_are_over_a_number_of_items(name):
    loss_of, items = MEANS[name]
    ((kind, found, _),) = terms(loss_of)
    assert (kind, found) == ("mean", items)


SUMS = {
    "cross entropy": lambda m, out, y: F.cross_entropy(out, y, reduction="sum"),
    "mse": lambda m, out, y: F.mse_loss(out, torch.zeros_like(out), reduction="sum"),
    "sum": lambda m, out, y: out.square().sum(),
    "half of a sum": lambda m, out, y: 0.5 * out.square().sum(),
    "a VAE's": lambda m, out, y: (
        F.binary_cross_entropy_with_logits(out, torch.ones_like(out), reduction="sum")
        - 0.5 * (1 + out - out.exp()).sum()
    ),
    "flattened": lambda m, out, y: F.binary_cross_entropy(
        out.sigmoid().view(-1), torch.ones(ROWS * 3), reduction="sum"
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_told_from_means(name):
    assert read(made(SUMS[name]), ROWS).is_sum
    assert not any(read(made(loss_of), ROWS).is_sum for loss_of, _ in MEANS.values())


def test_several_terms():
    def loss_of(model, out, y):
        y[:2] = -100
        return F.cross_entropy(out, y) + 0.1 * out.logsumexp(1).square().mean() + out.sum() * 0

    found = read(made(loss_of), ROWS)
    assert [term.items for term in found.terms] == [4, ROWS]
    assert found.main.source == "cross_entropy"
    assert found.mix(4.0) != found.mix(5.0)
    assert read(made(lambda m, out, y: out.sum() * 0), ROWS).is_zero


def test_functions_of_means_are_named():
    assert read(made(lambda m, out, y: out.square().mean().sqrt()), ROWS).curved == ("sqrt",)
    dice = read(made(lambda m, out, y: 1 - out.exp().sum() / (out.exp().sum() + 1)), ROWS)
    assert dice.curved == ("div of two terms",)
    assert not dice.is_sum


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_loss_cannot_be_read():
    compiled = torch.compile(F.cross_entropy, backend="aot_eager")
    ((kind, all_labels, _),) = terms(lambda m, out, y: compiled(out, y))
    assert kind == "unread"
    ((_, some, _),) = terms(lambda m, out, y: compiled(out, y.index_fill(0, torch.tensor(0), -100)))
    assert some == all_labels - 1


def test_a_constant_is_no_certain_number_of_items():
    assert read(made(lambda m, out, y: out.square().sum() / 7), ROWS).guessed == [7]
    assert read(made(lambda m, out, y: out.square().sum() / ROWS), ROWS).guessed == []


class Fused(torch.autograd.Function):
    """Cross entropy fused with a linear layer, as in libraries."""

    @staticmethod
    def forward(ctx, hidden, weight, table, labels):
        ctx.save_for_backward(hidden, weight, table, labels)
        return F.cross_entropy(hidden @ weight.float().T, labels)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("only the graph is looked at")


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_fused_loss_has_one_number_for_each_row(tokens):
    """Weights, tables and positions have the same size for any number of rows."""
    weight = nn.Parameter(torch.randn(3, 4))
    found = set()
    for rows in (6, 4, 3, 2, 1):
        hidden = torch.randn(rows * tokens, 4) @ nn.Parameter(torch.randn(4, 4))
        labels, table = torch.ones(rows * tokens, dtype=torch.int64), torch.arange(tokens)
        (term,) = read(Fused.apply(hidden, weight.bfloat16(), table, labels), rows).terms
        assert term.kind == "unread"
        found.add(term.items / rows)
        labels[0] = -100
        (fewer,) = read(Fused.apply(hidden, weight.bfloat16(), table, labels), rows).terms
        assert term.items - fewer.items == 1
    assert len(found) == 1


def test_saved_tensors_are_read_only_without_hooks():
    """A hook may run a forward again, or read a disk."""
    unpacked = []

    def by_hand(model, out, y):
        return (out.mean(1) * HALF).sum() / HALF.sum()

    for loss_of in (by_hand, MEANS["an empty mask"][0], MEANS["ignored labels"][0]):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked.append):
            loss = made(loss_of)
        (term,) = read(loss, ROWS).terms
        assert term.kind == "unread"
    assert not unpacked


def test_a_loss_in_a_checkpoint_is_not_run_again(monkeypatch):
    runs = []
    original = torch.utils.checkpoint._checkpoint_hook
    if hasattr(original, checkpointed_scalars._SCALAR):  # an engine of another test was here
        original = original.__base__
    monkeypatch.setattr(torch.utils.checkpoint, "_checkpoint_hook", original)

    def cross_entropy(out, y):
        runs.append(1)
        return F.cross_entropy(out, y)

    def items(**options):
        loss = made(lambda m, out, y: checkpoint(cross_entropy, out, y, use_reentrant=False))
        return [(t.kind, t.items, t.source) for t in read(loss, ROWS).terms]

    assert items() == [("unread", ROWS, "cross_entropy in a checkpoint")]
    assert len(runs) == 1
    checkpointed_scalars.keep()
    checkpointed_scalars.keep()  # by a second engine
    assert torch.utils.checkpoint._checkpoint_hook.__base__ is original
    assert items() == [("mean", ROWS, "cross_entropy")]
    assert len(runs) == 2


def test_long_sums_do_not_recurse():
    found = read(
        made(lambda m, out, y: sum(o.mean() for _ in range(300) for o in out) / 1800), ROWS
    )
    assert [term.kind for term in found.terms] == ["mean"]


SIGNED = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, -0.5])


def test_factors_that_sum_to_0_mask_nothing():
    for by in (ROWS, torch.tensor(float(ROWS))):
        found = read(made(lambda m, out, y, by=by: -(out[:, 0] * SIGNED).sum() / by), ROWS)
        assert found.main.items == ROWS


def test_a_factor_that_is_not_finite_is_read():
    for factor in (math.nan, math.inf, 1e-320):
        read(made(lambda m, out, y, factor=factor: out.sum() * factor), ROWS)


def test_numbers_of_a_16_bit_loss_are_in_fp64():
    # The meta device stands for an accelerator, whose numbers stay there.
    logits = torch.randn(ROWS, 3, dtype=torch.bfloat16, device="meta", requires_grad=True)
    loss = F.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.int64, device="meta"))
    assert read(loss, ROWS).main.items.dtype == torch.float64
    weight = torch.ones((), dtype=torch.float16, device="meta")
    assert weigh(None, weight, summed=False).items.dtype == torch.float64


ZEROS = {
    "of parameters": lambda m, out, y: 0 * sum(p.sum() for p in m.parameters()),
    "of parameters, on the right": lambda m, out, y: sum(p.sum() * 0.0 for p in m.parameters()),
    "under the sum": lambda m, out, y: (out * 0).sum(),
    "under a view": lambda m, out, y: -(0.0 * out).view(-1).sum(),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zero_losses_are_neither_sums_nor_penalties(name):
    found = read(made(ZEROS[name]), ROWS)
    assert found.is_zero
    assert not found.is_sum
    assert not found.has_penalty
    beside = read(
        made(lambda m, out, y: F.cross_entropy(out, y, reduction="sum") + ZEROS[name](m, out, y)),
        ROWS,
    )
    assert not beside.mixes_sums(summed=True)


def test_a_recurrence_of_scalars_is_read_in_time():
    state = torch.ones((), dtype=torch.float64, requires_grad=True) * 1.0
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    rows = torch.ones(4, 3, dtype=torch.float64)
    state = (rows * weight).mean() + state
    for _ in range(40):  # 2 ** 40 paths
        state = state + 0.1 * torch.sin(state)
    begun = time.monotonic()
    read((state - 1) ** 2, 4)
    assert time.monotonic() - begun < 5
