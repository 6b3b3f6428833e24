"""Trials of forwards before a split, and forwards that compute something else later: in training,
from some step on, with hooks, with adapters."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, UsageError
from shardwise.parallel.tensor import known_modules


class Block(nn.Module):
    """A pair with an operation between that `kind` names, active if `on`."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.act, self.down = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.kind, self.on = kind, False

    def forward(self, x):
        if self.kind == "joins later" and not self.on:
            return x
        h = self.act(self.up(self.norm(x)))
        h = BETWEEN[self.kind](self, h)
        made = self.down(h)
        if self.kind == "drops the path":
            made = made * torch.rand(len(x), 1, 1, dtype=x.dtype).add(0.9).floor()
        return x + made


def dropped(block, h):
    """Drop some tokens of all features."""
    return h * F.dropout(torch.ones_like(h[..., :1]), 0.5, block.training)


def normed(h):
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)


BETWEEN = {
    "plain": lambda block, h: h,
    "joins later": lambda block, h: h,
    "drops": lambda block, h: F.dropout(h, 0.5, block.training),
    "drops the path": lambda block, h: h,
    "drops tokens": lambda block, h: (
        h * F.dropout(torch.ones_like(h[..., :1]), 0.5, block.training)
    ),
    "normed in training": lambda block, h: normed(h) if block.training else h,
    "normed in evaluation": lambda block, h: h if block.training else normed(h),
    "normed later": lambda block, h: normed(h) if block.on else h,
    "softmax later": lambda block, h: h.softmax(-1) if block.on else h,
    "scaled later": lambda block, h: h * block.scale if block.on else h,
    "halves later": lambda block, h: torch.cat(h.chunk(2, -1)[::-1], -1) if block.on else h,
    "relu later": lambda block, h: h.relu() * 2 if block.on else h,
}


@pytest.mark.parametrize(
    ("kind", "is_found"),
    [
        ("plain", True),
        ("drops", True),
        ("drops the path", True),
        ("drops tokens", False),
        ("normed in training", False),
        ("normed in evaluation", False),
        ("joins later", False),
    ],
)
@pytest.mark.parametrize("parts", [2, 4])
def test_tries_both_modes_without_randomness(kind, is_found, parts):
    trials = known_modules.SplitTrials()
    model = nn.Sequential(Block(kind)).train()
    before = torch.get_rng_state()
    found = known_modules.find([model], [""], parts, set(), trials)
    assert [group.name for group in found] == (["0"] if is_found else [])
    assert model.training
    assert torch.equal(before, torch.get_rng_state())
    why = {"0": "some of its layers did not run in the trial"}
    assert trials.reasons_unsplit() == (why if kind == "joins later" else {})


class ByInput(nn.Module):
    """Attention that derives the head width from its input, and is therefore not split."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.proj, self.n_head, self.width = nn.Linear(8, 24), nn.Linear(8, 8), 4, width

    def forward(self, x):
        rows, length, _ = x.size()
        several = (t.view(rows, length, self.n_head, self.width) for t in self.qkv(x).chunk(3, 2))
        seen = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in several))
        return self.proj(seen.transpose(1, 2).reshape(rows, length, -1))


class ByAll(ByInput):
    def forward(self, x):
        self.width = x.size(-1) // self.n_head
        return super().forward(x)


def test_attention_that_stays_whole_is_named():
    trials = known_modules.SplitTrials()
    model = nn.Sequential(ByInput(2), ByAll(2))
    found = known_modules.find([model], [""], 2, set(), trials)
    assert [(group.kind, group.name) for group in found] == [("attention", "0")]
    assert "write -1 for that in view" in trials.reasons_unsplit()["1"]


def test_pair_around_layers_that_did_not_run_stays_whole():
    model = nn.Sequential(nn.Linear(8, 8), Block("joins later"), nn.Linear(8, 1))
    trials = known_modules.SplitTrials()
    assert known_modules.find([model], [""], 2, set(), trials) == []
    assert set(trials.reasons_unsplit()) == {"", "1"}


# -- changes after the trial ---------------------------------------------------------------------


def net(kind):
    torch.manual_seed(0)
    return nn.Sequential(Block(kind), Block(), nn.Linear(8, 1)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rows():
    return torch.randn(4, 3, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def turns_on(world, kind):
    model, same = net(kind), net(kind)
    engine, optimizer = sw.Engine(model, sgd(model)), sgd(same)
    for step in range(3):
        model[0].on = same[0].on = step > 0
        engine.backward(model(rows()).square().mean())
        found = engine.step().loss
        loss = same(rows()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found == pytest.approx(loss.item(), rel=1e-8)
    engine.close()
    return True


def test_allows_feature_wise_operations_later(group):
    assert all(group(2, tensor=2)(turns_on, "relu later"))


def is_refused_later(world, kind):
    model = net(kind)
    engine = sw.Engine(model, sgd(model))
    engine.backward(model(rows()).square().mean())
    engine.step()
    model[0].on = True
    try:
        model(rows())
    except UsageError as error:
        return str(error)
    finally:
        engine.close()
    return "taken"


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("normed later", "Mean"),
        ("softmax later", "Softmax"),
        ("scaled later", "AccumulateGrad"),
        ("halves later", "Cat"),
    ],
)
def test_rejects_untried_operations_when_they_first_run(group, kind, operation):
    for said in group(2, tensor=2)(is_refused_later, kind):
        assert re.search(f"forward computes .*{operation}.*tensor_plan", said), said


# -- hooks --------------------------------------------------------------------------------------


def hooked(world, late, plan):
    """Add a penalty on features that a hook has seen; return the error if the hook cannot see
    them."""
    model, same = net("plain"), net("plain")
    losses = []
    for each in (same, model):
        seen = {}

        def see(module, args, output, seen=seen):
            seen["h"] = output

        if each is same or not late:
            each[0].act.register_forward_hook(see)
        optimizer = sgd(each)
        engine = sw.Engine(each, optimizer, tensor_plan=plan) if each is model else None
        if each is model and late:
            each[0].act.register_forward_hook(see)
        losses.append([])
        for _ in range(2):
            try:
                loss = each(rows()).square().mean()
            except UsageError as error:
                engine.close()
                return str(error)
            loss = loss + seen["h"].square().mean()
            if engine is not None:
                engine.backward(loss)
                losses[-1].append(engine.step().loss)
                continue
            loss.backward()
            losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    split = [name for name, p in model.named_parameters() if p.data.shape != p.shape]
    engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-8)
    return split


PLAN = {"0.up": "colwise", "0.down": "rowwise"}


def test_hooked_module_stays_whole(group):
    wanted = ["1.up.weight", "1.up.bias", "1.down.weight"]
    assert group(2, tensor=2)(hooked, False, None) == [wanted] * 2


@pytest.mark.parametrize(("late", "plan"), [(True, None), (True, PLAN), (False, PLAN)])
def test_rejects_hook_that_would_see_a_part(group, late, plan):
    for said in group(2, tensor=2)(hooked, late, plan):
        assert re.search("a forward hook on 0.act \\(Tanh\\) runs between", said), said


def hooks_everywhere(world, where, kind):
    model = net("plain")
    engine = sw.Engine(model, sgd(model))
    module = model[0] if where == "block" else getattr(model[0], where)
    heard = []
    if kind == "all":
        handle = nn.modules.module.register_module_forward_hook(lambda m, a, o: heard.append(o))
    elif kind == "before":
        handle = module.register_forward_pre_hook(lambda m, a: heard.append(a[0]))
    elif kind == "backward":
        handle = module.register_full_backward_hook(lambda m, i, o: heard.append(o[0]))
    else:
        handle = module.register_forward_hook(lambda m, a, o: heard.append(o))
    try:
        engine.backward(model(rows().requires_grad_()).square().mean())
        engine.step()
    except UsageError as error:
        return str(error)
    finally:
        handle.remove()
        engine.close()
    return heard[0].shape[-1]


@pytest.mark.parametrize(
    ("where", "kind", "found"),
    [
        ("block", "after", 8),
        ("block", "backward", 8),
        ("norm", "after", 8),
        ("up", "before", 8),
        ("down", "after", 8),
        ("up", "after", "a forward hook on 0.up"),
        ("up", "backward", "a backward hook on 0.up"),
        ("act", "before", "a forward pre-hook on 0.act"),
        ("down", "before", "a forward pre-hook on 0.down"),
        ("down", "backward", "a backward hook on 0.down"),
        ("block", "all", "a forward hook on every module"),
    ],
)
def test_hooks_that_see_the_whole_are_left_alone(group, where, kind, found):
    for told in group(2, tensor=2)(hooks_everywhere, where, kind):
        assert told == found if isinstance(found, int) else found in told, told


# -- adapters -----------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear map with a parallel low-rank map, as peft builds them."""

    def __init__(self, base, into, out):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(into, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, out, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted(adapts):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16, n_layer=2, n_head=2, n_embd=8, n_positions=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double().requires_grad_(False)
    for block in model.transformer.h:
        if "c_attn" in adapts:
            block.attn.c_attn = Adapted(block.attn.c_attn, 8, 24).double()
        if "c_fc" in adapts:
            block.mlp.c_fc = Adapted(block.mlp.c_fc, 8, 32).double()
    return model


def trains_adapters(world, adapts):
    x = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(2))
    model, same = adapted(adapts), adapted(adapts)
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (model, same)]
    optimizer = torch.optim.AdamW(trained[1], lr=0.1)
    engine = sw.Engine(model, torch.optim.AdamW(trained[0], lr=0.1))
    split = sorted({group.kind for group in engine._spec.tensor.groups})
    for _ in range(3):
        engine.backward(model(input_ids=x, labels=x).loss)
        found = engine.step().loss
        loss = same(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found == pytest.approx(loss.item(), rel=1e-6)  # the loss is computed in fp32
    with engine.full_parameters():
        for name, value in same.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    engine.close()
    return split


@pytest.mark.parametrize(
    ("adapts", "split"),
    [
        (("c_attn",), ["feed-forward"]),
        (("c_fc",), ["attention"]),
    ],
)
def test_layers_with_adapters_stay_whole(group, adapts, split):
    assert group(2, tensor=2)(trains_adapters, adapts) == [split] * 2


def test_layers_with_parametrized_weights_stay_whole():
    block = Block()
    nn.utils.parametrizations.weight_norm(block.up)
    assert known_modules.find([nn.Sequential(block)], [""], 2, set()) == []


@pytest.mark.parametrize("qkv", [("c_attn",), ("q", "k"), ("q", "k", 3)])
def test_names_of_attention_are_one_or_three(qkv):
    with pytest.raises(ModelError, match=r"three names of the maps .*or a string .*qkv="):
        sw.Attention(qkv=qkv, out="c_proj", heads=2)
