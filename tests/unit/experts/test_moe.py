"""`sw.MoE` on one process, against a loop over tokens."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine import ExpertCounts
from shardwise.errors import ModelError, UsageError
from tests.unit.experts.naive import moe, naive

OPTIONS = {
    "plain": {"shared": False},
    "losses": {"balance": 0.5, "z_loss": 0.1},
    "sigmoid": {"scores": "sigmoid", "scale": 2.5, "bias_rate": 0.05},
    "one": {"top_k": 1, "normalize": False, "balance": 1.0},
    "all": {"top_k": 8, "balance": 1.0},
}


def gradients(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by name; that of an expert without tokens is zero."""
    named = layer.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_a_loop_over_tokens(name, masked):
    torch.manual_seed(1)
    layer = moe(**OPTIONS[name])
    if layer.selection_bias is not None:
        layer.selection_bias.normal_(std=0.3)
    other = copy.deepcopy(layer)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    mask = torch.rand(3, 5) < 0.6 if masked else None
    ours = x.clone().requires_grad_()
    out = layer(ours, mask)
    out.square().sum().backward()
    theirs = x.clone().requires_grad_()
    expected, loss, counts = naive(other, theirs, mask)
    (expected.square().sum() + loss).backward()
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(layer), gradients(other), rtol=1e-12, atol=1e-12)
    assert layer.counts.tolist() == counts.tolist()


def test_losses_change_the_gradient_of_the_router():
    # A layer whose losses were dropped would pass every test of its output.
    grads = []
    for balance in (0.0, 1.0):
        torch.manual_seed(1)
        layer = moe(balance=balance)
        layer(torch.randn(9, 6, dtype=torch.float64)).sum().backward()
        grads.append(layer.router.weight.grad)
    assert (grads[0] - grads[1]).abs().max() > 1e-3


def test_lower_index_wins_a_tie():
    layer = moe(top_k=3, shared=False)
    with torch.no_grad():
        layer.router.weight.zero_()
    layer(torch.randn(7, 6, dtype=torch.float64))
    assert layer.counts.tolist() == [7, 7, 7, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("rows", [0, 1])
def test_runs_without_tokens(rows):
    layer = moe(balance=1.0, z_loss=1.0)
    x = torch.randn(rows, 6, dtype=torch.float64)
    layer(x, torch.zeros(rows, dtype=torch.bool)).sum().backward()
    assert layer.counts.sum() == 0
    assert layer.experts[3][0].weight.grad.abs().sum() == 0
    assert torch.isfinite(layer.router.weight.grad).all()


def test_routes_in_fp32_inside_autocast():
    torch.manual_seed(3)
    layer = moe(shared=False).float()
    x = torch.randn(200, 6)
    layer(x)
    wide = layer.counts
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert layer.counts.tolist() == wide.tolist()
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_bias_follows_the_counts_of_training_only():
    torch.manual_seed(2)
    layer = moe(bias_rate=0.01, top_k=2)
    x = torch.randn(40, 6, dtype=torch.float64)
    layer.eval()(x)
    with torch.no_grad():
        layer.train()(x)
    layer.update_bias()
    assert layer.selection_bias.abs().max() == 0
    counts = torch.zeros(8, dtype=torch.int64)
    for part in x.split(13):
        torch.utils.checkpoint.checkpoint(layer, part, use_reentrant=False).sum().backward()
        counts += naive(layer, part)[2]
    layer.update_bias()
    expected = 0.01 * torch.sign(counts.double().mean() - counts)
    torch.testing.assert_close(layer.selection_bias, expected.to(layer.selection_bias))
    layer.update_bias()  # nothing was counted since
    torch.testing.assert_close(layer.selection_bias, expected.to(layer.selection_bias))


def test_copies_and_pickles():
    layer = moe()
    x = torch.randn(4, 6, dtype=torch.float64)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))


def test_names_in_the_state_dict_are_plain():
    names = set(moe(experts=2, bias_rate=0.1).state_dict())
    assert {"router.weight", "experts.1.2.bias", "shared.0.weight", "selection_bias"} <= names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 9}, "choose 1 to 8"),
        ({"scores": "relu"}, "softmax, sigmoid"),
        ({"balance": -1.0}, "balance takes a number of 0 or more"),
    ],
)
def test_refuses_options(options, words):
    with pytest.raises(ModelError, match=words):
        moe(**options)


def test_refuses_wrong_shapes():
    layer = moe(experts=4)
    with pytest.raises(UsageError, match=r"pass one of shape \(2, 3\)"):
        layer(torch.zeros(2, 3, 6, dtype=torch.float64), torch.ones(3, 2, dtype=torch.bool))
    layer.router = nn.Linear(6, 5, bias=False).double()
    with pytest.raises(UsageError, match="5 logits per token, but there are 4"):
        layer(torch.zeros(3, 6, dtype=torch.float64))
    with pytest.raises(ModelError, match=r"nn\.ModuleList"):
        sw.MoE(nn.Linear(2, 2), [nn.Linear(2, 2)])


def test_counts_each_forward_pass_once_with_gradients_only():
    layer = moe(top_k=2)
    x = torch.randn(5, 6, dtype=torch.float64)
    out = layer(x)
    layer(x)  # no backward pass reaches it
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    layer.eval()(x).sum().backward()
    assert sum(layer.step_counts.values) == 10
    layer.update_bias()
    assert sum(layer.step_counts.values) == 0


@pytest.mark.parametrize(
    ("counts", "entropy", "imbalance"),
    [
        ((5, 5, 5, 5), 1.0, 1.0),
        ((0, 7, 0, 0), 0.0, 4.0),
        ((30, 10, 0, 0), 0.40563906, 3.0),
        ((3,), 1.0, 1.0),
        ((0, 0), math.nan, math.nan),
    ],
)
def test_entropy_and_imbalance_of_counts(counts, entropy, imbalance):
    found = ExpertCounts(counts)
    assert found.entropy == pytest.approx(entropy, nan_ok=True)
    assert found.imbalance == pytest.approx(imbalance, nan_ok=True)
