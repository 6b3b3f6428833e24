"""The loss without all scores, compared with torch's two lines: a linear layer and its loss."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.engine import loss_terms
from shardwise.errors import UsageError

CLASSES = 33
SHAPE = (4, 9)


def problem(dtype=torch.float64, *, bias=True):
    torch.manual_seed(0)
    head = nn.Linear(8, CLASSES, bias=bias, dtype=dtype)
    hidden = torch.randn(*SHAPE, 8, dtype=dtype, requires_grad=True)
    target = torch.randint(CLASSES, SHAPE)
    target[1, 3:] = -100
    return head, hidden, target


def expected_loss(head, hidden, target, *, class_weight, smoothing, z_loss, softcap, reduction):
    scores, target = head(hidden).flatten(0, 1), target.flatten()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    loss = F.cross_entropy(
        scores, target, class_weight, label_smoothing=smoothing, reduction=reduction
    )
    counted = target != -100
    added = z_loss * (scores.logsumexp(-1).square() * counted).sum()
    if reduction == "mean":
        factors = torch.ones(CLASSES).double() if class_weight is None else class_weight
        added = added / factors[target[counted]].sum()
    return loss + added


def gradients(loss, head, hidden):
    return torch.autograd.grad(3 * loss, [hidden, *head.parameters()])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_torch_in_fp64(reduction):
    torch.manual_seed(1)
    weights = torch.rand(CLASSES, dtype=torch.float64)
    settings = itertools.product([0, 0.1], [0, 0.01], [None, 5.0], [None, weights], [True, False])
    for number, (smoothing, z_loss, softcap, class_weight, bias) in enumerate(settings):
        head, hidden, target = problem(bias=bias)
        options = {"class_weight": class_weight, "z_loss": z_loss, "softcap": softcap}
        options["reduction"] = reduction
        chunk = (None, 7, 36, 1)[number % 4]
        loss = sw.chunked_cross_entropy(
            hidden, target, head, chunk=chunk, label_smoothing=smoothing, **options
        )
        expected = expected_loss(head, hidden, target, smoothing=smoothing, **options)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        for mine, theirs in zip(
            gradients(loss, head, hidden), gradients(expected, head, hidden), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_ignored_tokens_only_give_no_gradient_and_a_loss_that_is_nan():
    head, hidden, target = problem()
    loss = sw.chunked_cross_entropy(hidden, target.fill_(-100), head)
    assert loss.isnan()
    assert all(grad.eq(0).all() for grad in gradients(loss, head, hidden))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_autocast_equals_fp32_at_a_large_loss_scale(narrow):
    """The gradients of a mean over many tokens are far below what fp16 can represent."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 500), torch.randn(512, 16, requires_grad=True)
    target = torch.randint(500, (512,))
    with torch.autocast("cpu", narrow):
        loss = sw.chunked_cross_entropy(hidden, target, head)
    expected = F.cross_entropy(head(hidden), target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    inputs = [hidden, *head.parameters()]
    mine = torch.autograd.grad(65536 * loss, inputs)
    for grad, theirs in zip(mine, torch.autograd.grad(65536 * expected, inputs), strict=True):
        assert grad.dtype == torch.float32
        assert (grad - theirs).norm() < 0.01 * theirs.norm()


def test_frozen_head_and_evaluation():
    head, hidden, target = problem()
    expected = F.cross_entropy(head(hidden).flatten(0, 1), target.flatten())
    (theirs,) = torch.autograd.grad(expected, hidden)
    head.requires_grad_(False)
    loss = sw.chunked_cross_entropy(hidden, target, head)
    loss.backward()
    torch.testing.assert_close(hidden.grad, theirs)
    assert head.weight.grad is None
    with torch.no_grad():
        assert torch.equal(sw.chunked_cross_entropy(hidden, target, head), loss.detach())


def test_hooks_of_the_head_run_and_its_forward_returns():
    head, hidden, target = problem()
    calls = []
    head.register_forward_pre_hook(lambda module, args: calls.append(args[0] is hidden))
    sw.chunked_cross_entropy(hidden, target, head)
    assert calls == [True]
    assert head(hidden).shape == (*SHAPE, CLASSES)
    assert "forward" not in vars(head)


def test_scores_of_one_chunk_exist_at_a_time():
    head, hidden, target = problem()
    sizes = []
    linear = F.linear

    def measured(*args):
        scores = linear(*args)
        sizes.append(tuple(scores.shape))
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", measured)
        sw.chunked_cross_entropy(hidden, target, head, chunk=10).backward()
    assert sizes == [(10, CLASSES)] * 3 + [(6, CLASSES)]


def test_the_engine_reads_what_the_loss_is_a_mean_over():
    head, hidden, target = problem()
    counted = int((target != -100).sum())
    (term,) = loss_terms.read(2 * sw.chunked_cross_entropy(hidden, target, head), 4).terms
    assert (term.kind, term.items, term.source) == ("mean", counted, "cross_entropy")
    total = sw.chunked_cross_entropy(hidden, target, head, reduction="sum")
    assert loss_terms.read(total, 4).is_sum
    (term,) = loss_terms.read(total / counted, 4).terms
    assert (term.kind, term.items) == ("mean", counted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": nn.Identity()}, "needs the model's last nn.Linear as its head, not a Identity"),
        ({"reduction": "none"}, "reduction must be mean or sum, not 'none'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, not 1.5"),
        ({"softcap": -1.0}, "softcap must be above 0, not -1.0"),
        ({"chunk": 0}, "chunk must be at least 1 token, not 0"),
        ({"class_weight": torch.ones(3)}, r"shape \(33,\), not \(3,\)"),
        ({"target": torch.zeros(36).long()}, r"last dimension, \(4, 9\), not \(36,\)"),
    ],
)
def test_rejects(options, message):
    head, hidden, target = problem()
    arguments = {"hidden": hidden, "target": target, "head": head} | options
    with pytest.raises(UsageError, match=message):
        sw.chunked_cross_entropy(**arguments)


def test_rejects_targets_out_of_range_and_a_second_backward():
    head, hidden, target = problem()
    with pytest.raises(IndexError, match="out of bounds"):
        sw.chunked_cross_entropy(hidden, target + CLASSES, head)
    loss = sw.chunked_cross_entropy(hidden, target, head)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
