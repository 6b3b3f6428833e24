"""Losses that are not means over rows: without `weight=` results equal plain PyTorch."""

import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.errors import UsageError

SIZES = [1, 2, 3]
BATCH, ROWS = 7, 23  # three whole batches, and one of 2 rows
CLASSES, LENGTH = 5, 4
IGNORED = -100


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES * LENGTH)).double()


def data():
    """Return inputs; per row one label and `LENGTH` labels, some of them ignored; a mask."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=draw, dtype=torch.float64)
    label = torch.randint(CLASSES, (ROWS,), generator=draw)
    labels = torch.randint(CLASSES, (ROWS, LENGTH), generator=draw)
    kept = torch.rand(ROWS, LENGTH, generator=draw) < 0.4
    kept[:, 0] |= torch.arange(ROWS) % 3 == 0
    kept[-1] = False  # a worker whose rows have no label that counts
    kept[-2, 0] = True
    return x, label, labels.masked_fill(~kept, IGNORED), kept


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0], dtype=torch.float64)


def tokens(out):
    return out.view(-1, LENGTH, CLASSES)


def per_token(out, labels):
    flat = F.cross_entropy(tokens(out).transpose(1, 2), labels, reduction="none")
    assert flat.shape == labels.shape
    return flat


def cross_entropy(out, labels, **how):
    return F.cross_entropy(tokens(out).flatten(0, 1), labels.flatten(), **how)


def boxes(out, kept):
    """Return a loss over the boxes of each row, whose number differs between rows."""
    return tokens(out)[kept]


class Fused(torch.autograd.Function):
    """A custom autograd.Function that exposes only its saved tensors."""

    @staticmethod
    def forward(ctx, out, classes, labels):
        ctx.save_for_backward(out, classes, labels)
        with torch.enable_grad():
            return Fused.of(out, classes, labels)

    @staticmethod
    def of(out, classes, labels):
        return F.cross_entropy(tokens(out).flatten(0, 1) @ classes, labels.flatten())

    @staticmethod
    def backward(ctx, grad):
        *of, labels = (each.detach() for each in ctx.saved_tensors)
        with torch.enable_grad():
            of = [each.requires_grad_() for each in of]
            return *torch.autograd.grad(Fused.of(*of, labels), of, grad), None


def fused(model, out, labels):
    classes = model[2].weight[:CLASSES, :CLASSES].clone()
    return Fused.apply(out, classes, labels)


LOSSES = {
    "cross_entropy": lambda m, out, y, ys, kept: F.cross_entropy(out[:, :CLASSES], y),
    "cross_entropy weight": lambda m, out, y, ys, kept: F.cross_entropy(
        out[:, :CLASSES], y, weight=WEIGHT
    ),
    "cross_entropy ignore_index": lambda m, out, y, ys, kept: cross_entropy(out, ys),
    "cross_entropy of 1 dimension more": lambda m, out, y, ys, kept: F.cross_entropy(
        tokens(out).transpose(1, 2), ys, weight=WEIGHT
    ),
    "cross_entropy of 2 dimensions more": lambda m, out, y, ys, kept: F.cross_entropy(
        tokens(out).transpose(1, 2).unflatten(2, (2, 2)), ys.unflatten(1, (2, 2))
    ),
    "module": lambda m, out, y, ys, kept: nn.CrossEntropyLoss(weight=WEIGHT)(
        tokens(out).transpose(1, 2), ys
    ),
    "label smoothing": lambda m, out, y, ys, kept: cross_entropy(out, ys, label_smoothing=0.1),
    "label smoothing and weight": lambda m, out, y, ys, kept: cross_entropy(
        out, ys, label_smoothing=0.1, weight=WEIGHT
    ),
    "class probabilities": lambda m, out, y, ys, kept: F.cross_entropy(
        tokens(out).flatten(0, 1), F.one_hot(ys.flatten().clamp(min=0), CLASSES).double()
    ),
    "nll_loss": lambda m, out, y, ys, kept: F.nll_loss(
        tokens(out).log_softmax(-1).flatten(0, 1), ys.flatten()
    ),
    "scaled, cast and viewed": lambda m, out, y, ys, kept: (
        3 * cross_entropy(out, ys).view(1).squeeze() / 2
    ),
    "masked mean": lambda m, out, y, ys, kept: (per_token(out, ys) * kept).sum() / kept.sum(),
    "masked mean with clamp": lambda m, out, y, ys, kept: (
        (per_token(out, ys) * kept).sum() / kept.sum().clamp(min=1)
    ),
    "masked mean with item": lambda m, out, y, ys, kept: (
        per_token(out, ys).sum() / max(int(kept.sum()), 1)
    ),
    "masked_fill": lambda m, out, y, ys, kept: (
        tokens(out).square().mean(-1).masked_fill(~kept, 0.0).sum() / kept.sum().clamp(min=1)
    ),
    "where": lambda m, out, y, ys, kept: (
        torch.where(kept, per_token(out, ys), 0.0).sum() / kept.sum().clamp(min=1)
    ),
    "weighted mean": lambda m, out, y, ys, kept: (
        (out.square().mean(1) * (y + 0.5)).sum() / (y + 0.5).sum()
    ),
    "selected items": lambda m, out, y, ys, kept: boxes(out, kept).square().mean(),
    "sum over selected items by their number": lambda m, out, y, ys, kept: (
        boxes(out, kept).abs().sum() / max(int(kept.sum()), 1)
    ),
    "gathered": lambda m, out, y, ys, kept: (
        -out[:, :CLASSES].log_softmax(1).gather(1, y[:, None]).mean()
    ),
    "masked in each row, then the mean of rows": lambda m, out, y, ys, kept: (
        (per_token(out, ys) * kept).sum(1) / kept.sum(1).clamp(min=1)
    ).mean(),
    "mse": lambda m, out, y, ys, kept: F.mse_loss(out, torch.ones_like(out)),
    "l1": lambda m, out, y, ys, kept: F.l1_loss(out, torch.ones_like(out)),
    "huber": lambda m, out, y, ys, kept: F.huber_loss(out, torch.ones_like(out), delta=0.3),
    "smooth l1": lambda m, out, y, ys, kept: F.smooth_l1_loss(out, torch.ones_like(out)),
    "bce weight": lambda m, out, y, ys, kept: F.binary_cross_entropy(
        tokens(out).sigmoid(), torch.ones(len(out), LENGTH, CLASSES).double(), weight=WEIGHT
    ),
    "bce pos_weight": lambda m, out, y, ys, kept: F.binary_cross_entropy_with_logits(
        tokens(out), F.one_hot(ys.clamp(min=0), CLASSES).double(), pos_weight=WEIGHT
    ),
    "kl batchmean": lambda m, out, y, ys, kept: F.kl_div(
        out.log_softmax(1), torch.full_like(out, 1 / out.shape[1]), reduction="batchmean"
    ),
    "kl batchmean of tokens": lambda m, out, y, ys, kept: F.kl_div(
        boxes(out, kept).log_softmax(1),
        torch.full((int(kept.sum()), CLASSES), 1 / CLASSES).double(),
        reduction="batchmean",
    ),
    "gaussian nll": lambda m, out, y, ys, kept: F.gaussian_nll_loss(
        out, torch.ones_like(out), out.exp()
    ),
    "poisson nll": lambda m, out, y, ys, kept: F.poisson_nll_loss(out, torch.ones_like(out)),
    "cosine": lambda m, out, y, ys, kept: F.cosine_embedding_loss(
        out, torch.ones_like(out), torch.where(y > 2, 1, -1)
    ),
    "triplet": lambda m, out, y, ys, kept: F.triplet_margin_loss(
        out, torch.ones_like(out), -torch.ones_like(out)
    ),
    "margin ranking": lambda m, out, y, ys, kept: F.margin_ranking_loss(
        out[:, 0], out[:, 1], torch.where(y > 2, 1, -1)
    ),
    "multi margin": lambda m, out, y, ys, kept: F.multi_margin_loss(out[:, :CLASSES], y),
    "multilabel soft margin": lambda m, out, y, ys, kept: F.multilabel_soft_margin_loss(
        out, torch.ones_like(out)
    ),
    "ctc": lambda m, out, y, ys, kept: F.ctc_loss(
        tokens(out).log_softmax(-1).transpose(0, 1),
        torch.ones(len(out), 2, dtype=torch.long),
        torch.full((len(out),), LENGTH),
        1 + (y > 2).long(),
    ),
    "mean of rows, then the sum": lambda m, out, y, ys, kept: out.square().mean(0).sum(),
    "Python sum over rows": lambda m, out, y, ys, kept: (
        sum(cross_entropy(o[None], t[None]) for o, t in zip(out, ys.clamp(min=0), strict=True))
        / len(out)
    ),
    "stack of rows": lambda m, out, y, ys, kept: torch.stack(
        [cross_entropy(o[None], t[None]) for o, t in zip(out, ys.clamp(min=0), strict=True)]
    ).mean(),
    "several terms": lambda m, out, y, ys, kept: (
        F.cross_entropy(out[:, :CLASSES], y)
        + 0.1 * out.logsumexp(1).square().mean()
        + 0.3 * F.mse_loss(out, torch.ones_like(out))
    ),
    "terms of the same labels": lambda m, out, y, ys, kept: (
        cross_entropy(out, ys)
        + 1e-2 * (tokens(out).logsumexp(-1).square() * kept).sum() / kept.sum().clamp(min=1)
    ),
    "a learned factor": lambda m, out, y, ys, kept: (
        torch.exp(-m[2].bias[0]) * cross_entropy(out, ys) + m[2].bias[0]
    ),
    "penalties": lambda m, out, y, ys, kept: (
        cross_entropy(out, ys)
        + 0.01 * sum(p.square().sum() for p in m.parameters())
        + 0.01 * (m[0].weight - 1).abs().mean()
        + 0.01 * (m[0].weight.T @ m[0].weight - torch.eye(6)).square().sum()
    ),
    "a sum": lambda m, out, y, ys, kept: cross_entropy(out, ys, reduction="sum"),
    "part of a sum": lambda m, out, y, ys, kept: 0.7 * out.square().sum(),
    "sums of two kinds": lambda m, out, y, ys, kept: (
        F.binary_cross_entropy_with_logits(out, torch.ones_like(out), reduction="sum")
        - 0.7 * (1 + out - out.exp()).sum()
    ),
    "a sum by the rows": lambda m, out, y, ys, kept: out.square().sum() / len(out),
    "a sum times one by the rows": lambda m, out, y, ys, kept: out.square().sum() * (1 / len(out)),
    "dot": lambda m, out, y, ys, kept: torch.dot(out[:, 0], out[:, 1].detach()) / len(out),
    "fused": lambda m, out, y, ys, kept: fused(m, out, ys.clamp(min=0)),
    "ignored labels in a checkpoint": lambda m, out, y, ys, kept: checkpoint(
        cross_entropy, out, ys, use_reentrant=False
    ),
    "class weights in a checkpoint": lambda m, out, y, ys, kept: checkpoint(
        lambda out, ys: cross_entropy(out, ys, weight=WEIGHT), out, ys, use_reentrant=False
    ),
}


def plain(loss_of):
    """Return losses, gradient norms and weights of a single process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for x, *others in zip(*(each.split(BATCH) for each in data()), strict=True):
        optimizer.zero_grad()
        loss = loss_of(model, model(x), *others)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen, [p.detach() for p in model.parameters()]


def compare(engine, model, seen, expected):
    values, parameters = expected
    assert len(seen) == len(values)
    for mine, theirs in zip(seen, values, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-8), (seen, values)
    with engine.full_parameters():
        for mine, theirs in zip(model.parameters(), parameters, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-11)


def trains(world, names, micro, zero):
    """Train each loss in the loop of the README."""
    for name in names:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=1e-4)
        loader = sw.Loader(TensorDataset(*data()), batch_size=BATCH, micro_batch_size=micro)
        seen = []
        for step in loader.steps():
            for x, *others in step:
                engine.backward(LOSSES[name](model, model(x), *others))
            stats = engine.step(max_norm=1.0)
            seen.append((stats.loss, stats.grad_norm))
        try:
            compare(engine, model, seen, plain(LOSSES[name]))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "micro"),
    [
        pytest.param(*case, marks=() if case in ((1, None), (3, 2)) else pytest.mark.full)
        for case in product(SIZES, (None, 2))  # models on two ranks are in the next test
    ],
)
def test_losses_are_those_of_one_process(group, size, micro):
    # Each part of a batch needs some labels: without any, plain PyTorch gives NaN too.
    group(size)(trains, list(LOSSES), micro, 0)


@pytest.mark.parametrize("zero", [2, 3])
def test_losses_of_sharded_models_are_those_of_one_process(group, zero):
    names = ["cross_entropy ignore_index", "masked mean with clamp", "several terms", "penalties"]
    names.append("ignored labels in a checkpoint")
    group(2)(trains, names, None, zero)


def mixed(out, ys):
    """Return a sum of means over different items: labels that count, and all elements."""
    return cross_entropy(out, ys) + 0.1 * out.square().mean()


def fused_of_ignored(out, ys):
    return Fused.apply(out, torch.eye(CLASSES, dtype=torch.float64, requires_grad=True), ys)


def refused(world, name):
    loss_of, how, _ = REFUSED[name]
    model, (x, _, ys, _) = net(), data()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.05))
    x, ys = world.share(x[:BATCH]), world.share(ys[:BATCH])
    if how == "forward_backward":
        engine.forward_backward(lambda x, ys: loss_of(model(x), ys), x, ys)
    else:
        engine.backward(loss_of(model(x), ys))
    engine.step()


REFUSED = {
    "means over different items": (mixed, "backward", r"a mean over \d+ items \(cross_entropy\)"),
    "in forward_backward": (cross_entropy, "forward_backward", r"weight=lambda \*batch: n"),
    "other numbers of labels in a function of one's own": (
        fused_of_ignored,
        "backward",
        r"one that cannot be read \(Fused, of \d+ elements\)",
    ),
    "a sum beside a mean": (
        lambda out, ys: out.square().mean() + out.square().sum(),
        "backward",
        r"a mean over \d+ items \(mean\) and a sum \(sum\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_losses_without_a_common_weight(group, name):
    words = REFUSED[name][2]
    for kind, message in group(2).errors(refused, name):
        assert kind == UsageError.__name__
        assert "worker 0: " in message
        assert re.search(words, message), message
    group(1)(refused, name)  # one process just adds its losses


COUNTS = {
    "number": lambda has: int(has.sum()),
    "tensor": lambda has: has.sum(),
    "rows": len,
    "labels": lambda labels: (labels != IGNORED).sum(),
}


def nothing_here(world, zero, weight):
    torch.manual_seed(0)
    x, has = torch.randn(8, 6).double(), torch.tensor([True] * 3 + [False] * 5)
    model = net()
    single = net()
    wanted = (single(x[has]) - 1).square().mean()
    wanted.backward()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=zero)
    x, has = world.share((x, has))
    loss = (model(x[has]) - 1).square().mean() if has.any() else torch.zeros(())
    engine.backward(loss, weight=COUNTS[weight](has))
    stats = engine.step()
    norm = nn.utils.clip_grad_norm_(single.parameters(), 1e9)
    assert (stats.loss, stats.grad_norm) == pytest.approx((wanted.item(), norm.item()), rel=1e-8)
    engine.close()


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_a_loss_of_weight_0_needs_no_graph(group, size, zero):
    group(size)(nothing_here, zero, "number")
    group(size)(nothing_here, zero, "tensor")


def further_loss(world, weighted):
    """Train on two batches. Only the second one has a further loss."""
    torch.manual_seed(0)
    batches, model, single = torch.randn(16, 6).double().split([10, 6]), net(), net()
    errors = [(single(x) - 1).square() for x in batches]
    ((errors[0].sum() + errors[1].sum() + errors[1].abs().sqrt().sum()) / 16 / 20).backward()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in map(world.share, batches):
        how = {"weight": len(x)} if weighted else {}
        out = model(x)
        engine.backward((out - 1).square().mean(), retain_graph=True, **how)
        if len(x) < 5:
            how |= {"same_items": True} if weighted else {}
            engine.backward((out - 1).abs().mean(), **how)
    norm = nn.utils.clip_grad_norm_(single.parameters(), 1e9)
    assert engine.step().grad_norm == pytest.approx(norm.item(), rel=1e-8)
    engine.close()


def test_a_further_loss_of_some_batches_needs_weights(group):
    for kind, message in group(2).errors(further_loss, False):
        assert kind == UsageError.__name__
        assert "worker 0: a mean over 100 items (mean), weighed by 100" in message
        assert "weighed by 60, with a further loss, a mean over 60 items (mean)." in message
        assert "engine.backward(further, weight=n, same_items=True)" in message
    group(2)(further_loss, True)  # as the message advises


def two_batches(world, how):
    """Losses of a batch of 4 rows and one of 10, added as the error message advises."""
    torch.manual_seed(0)
    a, b, model = torch.randn(4, 6).double(), torch.randn(10, 6).double(), net()
    want = (model(a).square().mean() + (model(b) - 1).square().mean()).item()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    a, b = world.share(a), world.share(b)
    loss_a, loss_b = model(a).square().mean(), (model(b) - 1).square().mean()
    if how == "weight":
        engine.backward(loss_a + loss_b, weight=len(b))
    elif how == "sum":
        engine.backward(loss_a * len(a) / 4 + loss_b * len(b) / 10, reduction="sum")
    else:
        engine.backward(loss_a + loss_b)
    loss = engine.step().loss
    engine.close()
    return loss, want


def test_two_batches_are_added_as_the_message_says(group):
    for size in SIZES:
        for kind, message in group(size).errors(two_batches, "unsaid"):
            assert kind == UsageError.__name__
            assert 'loss_b * n_b / total_b, reduction="sum")' in message
        for loss, want in group(size)(two_batches, "sum"):
            assert loss == pytest.approx(want, rel=1e-8)


def told(world, weights):
    """Return the lines about a loss of 7 rows with `weights`, in two steps."""
    said = []
    world.say_once = said.append
    try:
        model, (x, _, ys, _) = net(), data()
        engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for _ in range(2):
            mine, labels = world.share(x[:BATCH]), world.share(ys[:BATCH])
            engine.backward(cross_entropy(model(mine), labels), weight=COUNTS[weights](labels))
            engine.step()
        engine.close()
    finally:
        del world.say_once
    return said


def test_warns_once_of_a_weight_that_contradicts_the_loss(group):
    for said in group(2)(told, "rows"):
        (line,) = said
        assert line.startswith("weight= is not proportional to the number of items")
        assert re.search(
            r"worker 1: a mean over \d+ items \(cross_entropy\), weighed by [34]", line
        )
    assert not any(group(2)(told, "labels"))
    assert not any(group(1)(told, "rows"))
