"""`--context` with language models of Transformers, which get positions and return logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 13, "max_position_embeddings": 32}
LLAMA = {
    **SIZES,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "Llama": LLAMA,
    "Qwen2": LLAMA,
    "GPT2": {
        "vocab_size": 13,
        "n_positions": 32,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**CONFIGS[kind])
    classes = {"GPT2": "GPT2LMHeadModel"}
    model = getattr(transformers, classes.get(kind, f"{kind}ForCausalLM"))(config).train()
    for module in list(model.modules()):
        for name, child in module.named_children():
            # These norms compute in fp32, whose rounding would hide differences.
            if type(child).__name__ in ("LlamaRMSNorm", "Qwen2RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                setattr(module, name, norm)
    return model.double()


def batch_of(step: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(13, (2, 12), generator=draw)
    ids, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[:, : 2 + step] = -100
    return ids, torch.arange(11).expand(2, 11), labels


def loss_of(model: nn.Module, ids: Any, positions: Any, labels: Any) -> torch.Tensor:
    logits = model(input_ids=ids, position_ids=positions).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(world: sw.World, kind: str, zero: int) -> dict[str, Any]:
    model = model_of(kind)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.2), zero=zero, quiet=True)
    losses = []
    for step in range(3):
        engine.backward(loss_of(model, *world.share(batch_of(step))))
        losses.append(engine.step().loss)
    with engine.full_parameters():
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.close()
    return {"losses": losses, "values": values}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "zero"), [("Llama", 3), ("Qwen2", 1), ("GPT2", 2)])
def test_equals_one_process(group, kind, zero):
    model = model_of(kind)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    for step in range(3):
        loss = loss_of(model, *batch_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for ours in group(2, context=2)(trained, kind, zero):
        assert ours["losses"] == pytest.approx(losses, rel=1e-8)
        for name, value in model.named_parameters():
            torch.testing.assert_close(ours["values"][name], value.detach(), rtol=1e-8, atol=1e-10)
