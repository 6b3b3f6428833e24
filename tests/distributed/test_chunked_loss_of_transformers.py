"""`--chunked-loss` with language models of Transformers, compared with one plain process."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import config
from shardwise.errors import ConfigError, ModelError, UsageError
from tests.distributed.test_context_of_transformers import model_of, transformers

VOCABULARY = 13
STEPS = 3


def batch(step):
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (6, 11), generator=draw)
    labels = ids.clone()
    for row in range(6):
        labels[row, : 2 * row] = -100  # ranks have different numbers of labels
    return ids, labels


def optimizer_of(kind, model):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(model, optimizer):
    losses = []
    for step in range(STEPS):
        ids, labels = batch(step)
        scores = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(scores, labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def trained(world, kind, name, zero):
    model = model_of(kind)
    own = model.forward
    settings = {"zero": zero, "chunked_loss": True, "quiet": True}
    engine = sw.Engine(model, optimizer_of(name, model), **settings)
    losses = []
    for step in range(STEPS):
        ids, labels = world.share(batch(step))
        output = model(input_ids=ids, labels=labels)
        assert output.logits is None
        assert "logits" not in output
        engine.backward(output.loss)
        losses.append(engine.step().loss)
    with engine.full_parameters():
        values = [p.detach().clone() for p in model.parameters()]
        check_other_calls(model, *batch(0))
    engine.close()
    assert model.forward == own
    return losses, values


def check_other_calls(model, ids, labels):
    """Calls without labels or in evaluation return scores, and a copy has its own head."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        scores = model(input_ids=ids).logits
        twin.get_output_embeddings().weight.mul_(0)
        whole = F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        model.eval()
        evaluated = model(input_ids=ids, labels=labels)
        model.train()
    torch.testing.assert_close(evaluated.logits, scores)
    torch.testing.assert_close(evaluated.loss.double(), whole, rtol=1e-5, atol=1e-5)
    with torch.enable_grad():
        uniform = twin(input_ids=ids, labels=labels)
        with pytest.raises(UsageError, match="return_dict=True"):
            model(input_ids=ids, labels=labels, return_dict=False)
    assert uniform.logits is None
    assert uniform.loss.item() == pytest.approx(math.log(VOCABULARY))


@pytest.mark.parametrize(
    ("kind", "name", "zero", "size"),
    [("Llama", "sgd", 3, 2), ("GPT2", "adamw", 2, 3), ("Qwen2", "sgd", 0, 2)],
)
def test_equals_the_loss_of_one_process(group, kind, name, zero, size):
    model = model_of(kind)
    losses, values = plain(model, optimizer_of(name, model))
    for ours, theirs in group(size)(trained, kind, name, zero):
        assert ours == pytest.approx(losses, rel=1e-8)
        torch.testing.assert_close(theirs, values, rtol=1e-8, atol=1e-11)


def refused_case(world):
    del world
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, pad_token_id=0))
    other = model_of("Llama")
    other.loss_function = partial(sum_of_squares)
    adapted = model_of("Llama")
    adapted.lm_head = nn.Sequential(adapted.lm_head)
    for model, text in [
        (capped, r"support Gemma2ForCausalLM: in a trial, .* \(it may scale or cap its scores\)"),
        (other, "LlamaForCausalLM: in a trial, its loss was not the mean cross entropy"),
        (adapted, r"LlamaForCausalLM: get_output_embeddings\(\) is not an nn.Linear"),
        (nn.Linear(2, 2), "found no language model of Transformers in Linear"),
    ]:
        before = dict(vars(model))
        with pytest.raises(ModelError, match=text):
            sw.Engine(model, torch.optim.SGD(model.parameters()), chunked_loss=True)
        assert vars(model) == before
    with pytest.raises(ConfigError, match="--chunked-loss cannot be combined with --tensor 2"):
        config.check_contradictions(config.Settings(tensor=2, chunked_loss=True))


def sum_of_squares(logits, labels, vocab_size, **_):
    return logits.square().sum()


def test_refuses_models_that_compute_another_loss(group):
    group(1)(refused_case)
