"""Rules that rename, split, fuse and transpose tensors."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.formats import rules
from shardwise.checkpoint.formats.saved import (
    Checkpoint,
    Leaf,
    MemoryReader,
    OptimizerGroup,
    SavedOptimizer,
)
from shardwise.errors import CheckpointError


def source(tensors, optimizer=()):
    """Return a checkpoint in memory, and an optimizer with a momentum per name in `optimizer`."""
    memory = MemoryReader()
    for name, value in tensors.items():
        memory.add(name, value)
    found = Checkpoint("test", Path("test"), memory)
    if optimizer:
        state = MemoryReader()
        entries = {
            name: {"momentum_buffer": state.add(name, -tensors[name]), "step": 3}
            for name in optimizer
        }
        found.optimizers = [SavedOptimizer([OptimizerGroup(list(optimizer), {"lr": 1})], entries)]
    return found


def applied(checkpoint, *texts):
    rules.apply(checkpoint, rules.rules_of(texts, checkpoint))
    return {name: checkpoint.model.whole(name) for name in checkpoint.model.specs}


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["model.layers.{i}.=blocks.{i}."], ["blocks.0.w", "blocks.11.w", "model.norm"]),
        (["model.="], ["layers.0.w", "layers.11.w", "norm"]),
        (["=net."], ["net.model.layers.0.w", "net.model.layers.11.w", "net.model.norm"]),
        (["model.norm=n"], ["model.layers.0.w", "model.layers.11.w", "n"]),
        # The first rule that matches a name is used.
        (["model.layers.11.=last.", "model.="], ["layers.0.w", "last.w", "norm"]),
    ],
)
def test_rename(texts, names):
    tensors = {n: torch.ones(1) for n in ("model.layers.0.w", "model.layers.11.w", "model.norm")}
    assert list(applied(source(tensors), *texts)) == names


def test_split_and_fuse_are_inverse_also_for_the_optimizer_state():
    qkv = torch.arange(24.0).view(8, 3)
    split = source({"a.qkv": qkv, "b": torch.ones(2)}, ["a.qkv", "b"])
    parts = applied(split, "{m}.qkv={m}.q,{m}.k,{m}.v;sizes=2:1:1")
    assert [parts[f"a.{n}"].tolist() for n in "qkv"] == [
        qkv[:4].tolist(),
        qkv[4:6].tolist(),
        qkv[6:].tolist(),
    ]
    (optimizer,) = split.optimizers
    assert optimizer.groups[0].keys == ["a.q", "a.k", "a.v", "b"]
    assert torch.equal(optimizer.state["a.k"]["momentum_buffer"].value(), -qkv[4:6])
    assert optimizer.state["a.v"]["step"] == 3
    fused = applied(split, "{m}.q,{m}.k,{m}.v={m}.qkv")
    assert torch.equal(fused["a.qkv"], qkv)
    assert torch.equal(split.optimizers[0].state["a.qkv"]["momentum_buffer"].value(), -qkv)
    assert split.optimizers[0].groups[0].keys == ["a.qkv", "b"]


def test_groups_split_every_group():
    """Megatron-Core stores q, k and v of each group of heads next to each other."""
    whole = torch.arange(12.0)
    parts = applied(source({"qkv": whole}), "qkv=q,k,v;groups=2")
    assert [parts[n].tolist() for n in "qkv"] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    back = applied(source(parts), "q,k,v=qkv;groups=2")
    assert torch.equal(back["qkv"], whole)


def experts(kind):
    """Return a checkpoint of one layer with three experts, each in tensors of its own."""
    block, gate, up, down = rules.EXPERTS[kind]
    tensors = {f"layers.0.{block}.gate.weight": torch.randn(3, 2)}
    for number in range(3):
        for part, shape in ((gate, (5, 2)), (up, (5, 2)), (down, (2, 5))):
            tensors[f"layers.0.{block}.experts.{number}.{part}.weight"] = torch.randn(shape)
    found = source(tensors)
    found.config["config.json"] = json.dumps({"model_type": kind}).encode()
    return found, tensors


@pytest.mark.parametrize("kind", ["mixtral", "olmoe"])
def test_experts_are_fused_as_in_transformers_and_split_again(kind):
    checkpoint, tensors = experts(kind)
    block, gate, up, down = rules.EXPERTS[kind]
    fused = applied(checkpoint, "experts-fuse")

    def each(part):
        names = (f"layers.0.{block}.experts.{number}.{part}.weight" for number in range(3))
        return torch.stack([tensors[name] for name in names])

    # Source: MergeModulelist and Concatenate in transformers/conversion_mapping.py.
    pairs = torch.cat([each(gate), each(up)], 1)
    assert torch.equal(fused["layers.0.mlp.experts.gate_up_proj"], pairs)
    assert torch.equal(fused["layers.0.mlp.experts.down_proj"], each(down))
    assert len(fused) == 3
    into = torch.empty(13)
    checkpoint.model.read("layers.0.mlp.experts.gate_up_proj", 7, into)
    assert torch.equal(into, pairs.view(-1)[7:20])
    back = applied(checkpoint, "experts-split")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_fused_experts_read_only_the_tensors_that_they_need(monkeypatch):
    checkpoint, _ = experts("mixtral")
    names = ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]
    reader, read = checkpoint.model, []
    plain = reader.read
    monkeypatch.setattr(reader, "read", lambda name, *rest: (read.append(name), plain(name, *rest)))
    model = rules.with_fused_experts(checkpoint, names)
    model.read(names[1], 10, torch.empty(10))
    assert read == ["layers.0.block_sparse_moe.experts.1.w2.weight"]
    # A model that holds each expert by itself reads the file as it is.
    assert rules.with_fused_experts(checkpoint, list(reader.specs)) is reader


def test_maps_of_experts_refuse_what_they_do_not_know():
    checkpoint, _ = experts("olmoe")
    with pytest.raises(CheckpointError, match="experts that are not split yet"):
        applied(checkpoint, "experts-split")
    with pytest.raises(CheckpointError, match="takes no arguments"):
        applied(checkpoint, "experts-fuse:heads=2")
    checkpoint.config["config.json"] = b'{"model_type": "gpt_oss"}'
    with pytest.raises(CheckpointError, match="whose model_type is mixtral"):
        applied(checkpoint, "experts-fuse")


def test_parts_of_a_tensor_are_read_in_ranges():
    checkpoint = source({"w": torch.arange(6.0).view(2, 3)})
    applied(checkpoint, "w=w;transpose")
    into = torch.empty(3, dtype=torch.float64)
    checkpoint.model.read("w", 2, into)
    assert into.tolist() == [1, 4, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "no map 'nonsense'"),
        ("a=b=c", "is not a rule"),
        ("a=b;dim=x", "invalid option 'dim=x'"),
        ("a=b;sizes=0", "invalid option"),
        ("a,b=c,d", "several names on both sides"),
        ("x.=y.;transpose", "not a prefix"),
        ("a=b.{i}", "uses {i}"),
        ("a,=b", "empty name"),
        ("nothing.=x.", "matches no tensor"),
        ("a=b", "two tensors the name 'b'"),
        ("a,c=d", "fuses a with c, which the source does not have"),
        ("a=x,y;sizes=2:1", "cannot be split as 2:1"),
        ("a=c;transpose", None),
        ("a=x,y;stack=3", "needs dim=0 and a multiple of 3 names"),
        ("a=x,y;stack=2", "4 is not stack=2"),
        ("a=c;rope=3", "4 rows are not a multiple"),
        ("gate-up-split:depth=3", "takes heads=N"),
        ("llama-meta-to-hf", "needs the number of heads"),
    ],
)
def test_wrong_rules_are_refused(text, said):
    tensors = {"a": torch.ones(4, 2), "b": torch.ones(3)}
    with pytest.raises(CheckpointError, match=said) if said else nullcontext():
        applied(source(tensors), text)


def test_llama_maps_reorder_rotary_rows_as_transformers_does():
    """Meta's order of rotary rows is that of Transformers' own conversion script."""
    heads, kv, width = 4, 2, 16
    values = torch.randn(width, width)

    # Source: `permute` in transformers/models/llama/convert_llama_weights_to_hf.py.
    def permute(w, n):
        return w.view(n, w.shape[0] // n // 2, 2, width).transpose(1, 2).reshape(w.shape)

    meta = {
        "tok_embeddings.weight": torch.randn(7, width),
        "layers.0.attention.wq.weight": values,
        "layers.0.attention.wk.weight": values[:8],
        "layers.0.attention.wv.weight": values[:8],
        "layers.0.attention.wo.weight": values,
        "layers.0.feed_forward.w1.weight": values,
        "layers.0.feed_forward.w2.weight": values,
        "layers.0.feed_forward.w3.weight": values,
        "layers.0.attention_norm.weight": values[0],
        "layers.0.ffn_norm.weight": values[1],
        "norm.weight": values[2],
        "output.weight": torch.randn(7, width),
    }
    checkpoint = source(meta)
    hf = applied(checkpoint, f"llama-meta-to-hf:heads={heads},kv_heads={kv}")
    assert torch.equal(hf["model.layers.0.self_attn.q_proj.weight"], permute(values, heads))
    assert torch.equal(hf["model.layers.0.self_attn.k_proj.weight"], permute(values[:8], kv))
    assert torch.equal(hf["model.layers.0.self_attn.v_proj.weight"], values[:8])
    back = applied(checkpoint, f"llama-hf-to-meta:heads={heads},kv_heads={kv}")
    assert back.keys() == meta.keys()
    assert all(torch.equal(back[name], value) for name, value in meta.items())


def test_a_built_in_map_reads_the_heads_from_the_config():
    checkpoint = source({"model.layers.0.self_attn.qkv_proj.weight": torch.arange(8.0)})
    checkpoint.config["config.json"] = b'{"num_attention_heads": 2, "num_key_value_heads": 1}'
    parts = applied(checkpoint, "qkv-split")
    assert [len(value) for value in parts.values()] == [4, 2, 2]


def test_leaves_keep_their_reader():
    """A rule that only renames reads the source directly, so that ranks can read ranges."""
    checkpoint = source({"a": torch.ones(2)})
    applied(checkpoint, "a=b")
    leaf = checkpoint.model.leaves["b"]
    assert isinstance(leaf, Leaf)
    assert leaf.name == "a"
