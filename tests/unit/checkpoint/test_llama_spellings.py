"""The same Llama in the layouts of four libraries: after a map, Transformers has equal logits."""

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

from shardwise.checkpoint.commands import checkpoint
from tests import foreign_checkpoints as foreign

VOCABULARY, HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS = 11, 16, 24, 2, 4, 2
HEAD = HIDDEN // HEADS


def rotated(x, is_paired):
    """Rotate queries or keys [tokens, heads, HEAD] by their positions.

    Meta rotates neighbouring elements together, Transformers an element with one of the other half.
    """
    angles = torch.arange(x.shape[0])[:, None] / 10000 ** (torch.arange(0, HEAD, 2) / HEAD)
    turn = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if is_paired else x.chunk(2, -1)
    z = torch.complex(a, b) * turn
    if is_paired:
        return torch.view_as_real(z).flatten(-2)
    return torch.cat([z.real, z.imag], -1)


def logits(tokens, weights, is_paired=False):
    """Compute a Llama in plain torch.

    Args:
        tokens: [tokens] ids.
        weights: Function that returns the matrices of a layer (its number), or (None) embedding,
            last norm and head.
        is_paired: True for Meta's rotation.
    """
    embedding, norm, head = weights(None)
    x = embedding[tokens]
    for number in range(LAYERS):
        norm_1, q, k, v, o, norm_2, gate, up, down = weights(number)
        y = F.rms_norm(x, (HIDDEN,), norm_1, 1e-5)
        q, k, v = ((y @ w.T).view(len(tokens), -1, HEAD) for w in (q, k, v))
        q, k = rotated(q, is_paired), rotated(k, is_paired)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(0, 1).flatten(1) @ o.T
        y = F.rms_norm(x, (HIDDEN,), norm_2, 1e-5)
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return F.rms_norm(x, (HIDDEN,), norm, 1e-5) @ head.T


def drawn(*shape):
    return nn.Parameter(torch.randn(shape, dtype=torch.float64) / 3)


class Bag:
    """Parameters by name, as the writers of checkpoints expect them."""

    def __init__(self, tensors):
        self.tensors = tensors

    def named_parameters(self):
        return self.tensors.items()

    def parameters(self):
        return iter(self.tensors.values())


def meta(folder):
    names = {"attention.wq": HIDDEN, "attention.wk": 8, "attention.wv": 8, "attention.wo": HIDDEN}
    w = {
        f"layers.{i}.{n}.weight": drawn(s, HIDDEN) for i in range(LAYERS) for n, s in names.items()
    }
    for i in range(LAYERS):
        w[f"layers.{i}.feed_forward.w1.weight"] = drawn(WIDE, HIDDEN)
        w[f"layers.{i}.feed_forward.w2.weight"] = drawn(HIDDEN, WIDE)
        w[f"layers.{i}.feed_forward.w3.weight"] = drawn(WIDE, HIDDEN)
        w[f"layers.{i}.attention_norm.weight"] = drawn(HIDDEN)
        w[f"layers.{i}.ffn_norm.weight"] = drawn(HIDDEN)
    w["tok_embeddings.weight"], w["norm.weight"] = drawn(VOCABULARY, HIDDEN), drawn(HIDDEN)
    w["output.weight"] = drawn(VOCABULARY, HIDDEN)
    torch.save(w, folder / "consolidated.00.pth")

    def weights(number):
        if number is None:
            return [w[f"{name}.weight"] for name in ("tok_embeddings", "norm", "output")]
        order = (
            "attention_norm attention.wq attention.wk attention.wv attention.wo ffn_norm "
            "feed_forward.w1 feed_forward.w3 feed_forward.w2"
        )
        return [w[f"layers.{number}.{name}.weight"] for name in order.split()]

    return folder / "consolidated.00.pth", weights, True


def fused(layer, rest, writer):
    """Return a writer of a layout that fuses q with k and v, and gate with up.

    Args:
        layer: Names of a layer: first norm, qkv, o, second norm, gate and up, down.
        rest: Names of the embedding, the last norm and the head.
        writer: Writes the checkpoint.
    """
    shapes = [(HIDDEN,), (HIDDEN + 16, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,), (2 * WIDE, HIDDEN)]
    shapes.append((HIDDEN, WIDE))

    def write(folder):
        w = {
            n.format(i=i): drawn(*s)
            for i in range(LAYERS)
            for n, s in zip(layer, shapes, strict=True)
        }
        outer = [(VOCABULARY, HIDDEN), (HIDDEN,), (VOCABULARY, HIDDEN)]
        w |= {name: drawn(*shape) for name, shape in zip(rest, outer, strict=True)}

        def weights(number):
            if number is None:
                return [w[name] for name in rest]
            norm_1, qkv, o, norm_2, gate_up, down = (w[name.format(i=number)] for name in layer)
            gate, up = gate_up.chunk(2)
            if writer is foreign.megatron:  # q, q, k, v of each group of heads
                grouped = qkv.view(KV_HEADS, -1, HEAD, HIDDEN)
                q, k, v = (t.flatten(0, 2) for t in grouped.split([2, 1, 1], 1))
            else:
                q, k, v = qkv.split([HIDDEN, 8, 8])
            return [norm_1, q, k, v, o, norm_2, gate, up, down]

        model = Bag(w)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        return writer(folder, model, plain), weights, False

    return write


MEGATRON = fused(
    [
        f"decoder.layers.{{i}}.{name}"
        for name in (
            "self_attention.linear_qkv.layer_norm_weight",
            "self_attention.linear_qkv.weight",
            "self_attention.linear_proj.weight",
            "mlp.linear_fc1.layer_norm_weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
        )
    ],
    ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"],
    foreign.megatron,
)
NANOTRON = fused(
    [
        f"model.decoder.{{i}}.pp_block.{name}.weight"
        for name in (
            "input_layernorm",
            "attn.qkv_proj",
            "attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_up_proj",
            "mlp.down_proj",
        )
    ],
    [
        "model.token_position_embeddings.pp_block.token_embedding.weight",
        "model.final_layer_norm.pp_block.weight",
        "model.lm_head.pp_block.weight",
    ],
    foreign.nanotron,
)


@pytest.mark.parametrize(
    ("write", "name"), [(meta, "meta"), (MEGATRON, "megatron"), (NANOTRON, "nanotron")]
)
def test_map_gives_transformers_the_same_logits(tmp_path, write, name):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    path, weights, is_paired = write(tmp_path)
    rule = f"llama-{name}-to-hf:heads={HEADS},kv_heads={KV_HEADS}"
    words = ["export", str(path), str(tmp_path / "hf"), "--map", rule]
    told = CliRunner().invoke(checkpoint, words)
    assert told.exit_code == 0, told.output
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path / "hf")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    tokens = torch.tensor([3, 1, 4, 1, 5, 9])
    with torch.no_grad():
        # Transformers computes the angles in fp32.
        wanted, found = logits(tokens, weights, is_paired), loaded(tokens[None]).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
