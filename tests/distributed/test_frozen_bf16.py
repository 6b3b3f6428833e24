"""Adapters in fp32 on a frozen base in bf16, as PEFT builds them, compared with one process."""

import copy
import warnings

import pytest
import torch

import shardwise as sw
from tests.distributed.test_context_of_transformers import LLAMA, transformers

peft = pytest.importorskip("peft")

STEPS = 4


def made():
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(torch.bfloat16)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a name that Transformers renamed
        model = peft.get_peft_model(model, adapters)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide the gradients of lora_A
            torch.nn.init.normal_(parameter, std=0.3)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    return model, torch.optim.AdamW(trained, lr=0.02)


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(LLAMA["vocab_size"], (8, 9), generator=draw)


def adapters_of(model):
    state = peft.get_peft_model_state_dict(model)
    return {name: value.detach().clone() for name, value in state.items()}


def plain():
    model, optimizer = made()
    losses = []
    for step in range(STEPS):
        ids = batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, adapters_of(model), merged(model)


def merged(model):
    weights = copy.deepcopy(model).merge_and_unload().state_dict()
    return {name: value.clone() for name, value in weights.items()}


def trained(world, settings):
    model, optimizer = made()
    engine = sw.Engine(model, optimizer, **settings)
    losses = []
    for step in range(STEPS):
        ids = world.share(batch(step))
        engine.backward(model(input_ids=ids, labels=ids).loss)
        losses.append(engine.step().loss)
    with engine.full_parameters():
        result = losses, adapters_of(model)
    engine.close()
    return *result, merged(model)


@pytest.mark.parametrize(
    ("size", "settings"),
    [(1, {"zero": 3}), (2, {"zero": 3, "chunked_loss": True}), (2, {"zero": 0})],
)
def test_equals_one_process(group, size, settings):
    losses, adapters, weights = plain()
    # Products of bf16 tensors with other numbers of rows may round differently.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if size == 1 else {"rtol": 0.02, "atol": 2e-3}
    for ours, theirs, whole in group(size)(trained, settings):
        torch.testing.assert_close(ours, losses, **tolerance)
        torch.testing.assert_close(theirs, adapters, **tolerance)
        torch.testing.assert_close(whole, weights, **tolerance)
        assert whole["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
