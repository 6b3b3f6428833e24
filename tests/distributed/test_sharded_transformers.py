"""Sharded parameters with models of the transformers package, from small configurations."""

import os
import warnings

import pytest
import torch

from tests.distributed.sharded import by_turns, on, same_figures, same_weights, sharded, units_of

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the transformers package is not there")

ROWS, LENGTH, WORDS = 6, 10, 50


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=3, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), "transformer.h.0"


def llama():
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), "model.layers.0"


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), "encoder.block.0"


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")  # torch has no grouped product for fp64
    return model, "model.layers.0"


def built(make):
    torch.manual_seed(5)
    model, unit = make()
    return model.double(), unit


def text(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(2, WORDS, (ROWS, LENGTH), generator=draw)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trains(world, make, recomputed):
    """Losses, norms and tensors equal one process's; each rank generates between the steps."""
    (model, unit), (plain, _) = built(make), built(make)
    if recomputed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it has a new name in v5
            for each in (model, plain):
                each.gradient_checkpointing_enable({"use_reentrant": False})
    for each in (model, plain):
        each.train()
    engine, optimizer = sharded(model, optimizer=sgd), sgd(plain)
    assert unit in units_of(engine)
    for step in range(3):
        rows = world.share(text(step))
        engine.backward(model(input_ids=rows, labels=rows, use_cache=False).loss, weight=len(rows))
        stats = engine.step()
        optimizer.zero_grad()
        rows = text(step)
        loss = plain(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
        optimizer.step()
        # These models compute norms and the loss in fp32 under any cast.
        assert same_figures([stats.loss, stats.grad_norm], [loss.item(), norm.item()], 1e-5)
        for each in (model, plain):
            each.eval()
        prompt, longer = text(40)[:1, :4], 3 + 2 * world.rank
        with engine.uneven(), torch.no_grad():
            mine = model.generate(prompt, max_new_tokens=longer, do_sample=False)
        theirs = plain.generate(prompt, max_new_tokens=longer, do_sample=False)
        assert mine.tolist() == theirs.tolist()
        for each in (model, plain):
            each.train()
    same_weights(engine, model, plain, 1e-5)


@by_turns(recomputed=[False, True], make=[gpt2, llama, t5, mixtral])
def test_transformers(group, ranks, make, recomputed):
    on(group, ranks)(trains, make, recomputed, limit=120)
