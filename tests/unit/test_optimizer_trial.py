"""Trials of optimizers that users write; torch's own need none."""

import pytest
import torch
from torch import nn, optim

from shardwise.states.optimizer import optimizer_kind, optimizer_trial
from shardwise.states.optimizer.optimizer_trial import OptimizerKinds, examine

CPU = torch.device("cpu")


class Own(optim.Optimizer):
    """An optimizer whose updates `looks` computes.

    It gets a tensor, its gradient, step count and state.
    """

    def __init__(self, params, looks, **options):
        super().__init__(params, {"lr": 0.05, **options})
        self.looks = looks

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    p.sub_(group["lr"] * self.looks(p, p.grad, state["step"]))


def plain(p, g, step):
    return g


def signs(p, g, step):
    return g.sign() + 0.1 * p


def lars(p, g, step):
    return g * p.norm() / g.norm()


def lars_after_20(p, g, step):
    return g if step < 20 else lars(p, g, step)


def lars_after_5000(p, g, step):
    return g if step < 5000 else lars(p, g, step)


def clipped_at_1e4(p, g, step):
    return g * min(1.0, 1e4 / float(g.norm()))


def raised_to_1e_2(p, g, step):
    return g * max(1.0, 1e-2 / float(g.norm()))


def centred_where_convolved(p, g, step):
    return g - g.mean(dim=tuple(range(1, g.ndim)), keepdim=True) if g.ndim > 3 else g


def by_blocks_where_large(p, g, step):
    return g / g.abs().max() if g.numel() >= 2000 else g


def parameters(*shapes):
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


@pytest.mark.parametrize(
    ("looks", "shapes", "elementwise"),
    [
        (plain, [(5, 5), (5,), ()], True),
        (signs, [(5, 5), (4, 3, 3, 3)], True),
        (lars, [(5, 5)], False),
        (lars, [(5,)], False),
        (lars_after_20, [(5, 5)], False),
        (lars_after_5000, [(5, 5)], False),
        (clipped_at_1e4, [(5, 5)], False),
        (raised_to_1e_2, [(5, 5)], False),
        (centred_where_convolved, [(5, 5), (5,)], True),
        (centred_where_convolved, [(5, 5), (8, 3, 3, 3)], False),
        (by_blocks_where_large, [(5, 5)], False),
    ],
)
def test_trial_finds_optimizers_that_need_whole_tensors(looks, shapes, elementwise):
    optimizer = Own(parameters(*shapes), looks)
    kind = examine(optimizer, optimizer.param_groups[0], CPU)
    assert (kind.elementwise, kind.separable, kind.known) == (elementwise, True, False)


class GlobalNorm(optim.Optimizer):
    """Clips the norm over all tensors, at a value that small gradients do not reach."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.stack([p.grad.norm() for p in found]).norm())
        for p in found:
            p.sub_(0.05 * min(1.0, 1e4 / norm) * p.grad)


def test_trial_finds_norm_over_all_tensors():
    optimizer = GlobalNorm(parameters((5, 5), (5,)))
    assert not examine(optimizer, optimizer.param_groups[0], CPU).separable


OWN = [*optimizer_kind.ELEMENTWISE, *optimizer_kind.BY_TENSOR]


@pytest.mark.parametrize("own", OWN, ids=lambda own: own.__name__)
def test_trials_agree_with_the_known_kinds_of_torch(own):
    derived = type(f"Derived{own.__name__}", (own,), {})
    kinds = [
        examine(o, o.param_groups[0], CPU) for o in (c(parameters((5, 5))) for c in (own, derived))
    ]
    assert [kind.known for kind in kinds] == [True, False]
    assert kinds[0].elementwise == kinds[1].elementwise == (own in optimizer_kind.ELEMENTWISE)
    assert kinds[0].separable
    assert kinds[1].separable
    assert kinds[0].tensor_keys <= kinds[1].tensor_keys


def test_groups_that_differ_only_in_rates_need_one_trial(monkeypatch):
    tried = []
    monkeypatch.setattr(optimizer_trial, "examine", lambda *about, **_: tried.append(about))
    shapes = [(5, 5), (5, 5), (5,), (5, 5)]
    groups = [
        {"params": parameters(shape), "lr": 0.1 * number, "decay": number // 3}
        for number, shape in enumerate(shapes)
    ]
    optimizer, kinds = Own(groups, plain, decay=0), OptimizerKinds()
    for group in optimizer.param_groups:
        kinds.of(optimizer, group, CPU)
    assert len(tried) == 3  # two shapes, and one more with another option


def test_trial_leaves_the_optimizer_unchanged():
    optimizer = Own(parameters((5, 5)), lars)
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    examine(optimizer, optimizer.param_groups[0], CPU)
    assert not optimizer.state
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)


class Drawing(torch.optim.SGD):
    """Draws random numbers in its steps, as an optimizer with noise does."""

    def step(self, closure=None):
        torch.rand(3)
        super().step(closure)


def test_trials_leave_the_random_state_unchanged():
    optimizer = Drawing(nn.Linear(3, 2).parameters(), lr=0.1)
    before = torch.get_rng_state()
    OptimizerKinds().of(optimizer, optimizer.param_groups[0], torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
