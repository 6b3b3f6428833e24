"""`--expert` with the mixtures of experts of Transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint.commands import checkpoint
from shardwise.errors import ModelError
from tests.distributed.experts import LIMIT, ONE_GRAPH, compiled

SMALL = {
    "vocab_size": 19,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "attention_dropout": 0.0,
    "use_cache": False,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 4,
            "shared_expert_intermediate_size": 4,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "head_dim": 4},
    ),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 4,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 4,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
    ),
}

ROWS = (4, 3, 1)
"""Rows of the batches. The last one leaves a rank without rows."""


def build(kind: str, **more: Any) -> nn.Module:
    """Return a small model in fp64."""
    import transformers

    name, options = KINDS[kind]
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **options, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_experts_implementation("eager")  # the default kernel does not know fp64
    with torch.no_grad():
        for parameter in model.parameters():  # some weights start at zero, which ties all experts
            parameter.normal_(std=0.3)
    return model.double()


def batch(step: int) -> torch.Tensor:
    """Return the token ids of a step, (rows, 7)."""
    torch.manual_seed(50 + step)
    return torch.randint(19, (ROWS[step], 7))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next token."""
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def plain(kind: str) -> dict[str, Any]:
    """Train in one plain process. Return losses, norms and values."""
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, norms = [], []
    for step in range(len(ROWS)):
        loss = loss_of(model, batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "values": dict(model.state_dict())}


def trained(
    world: sw.World, kind: str, settings: dict[str, Any], kernel: str = "eager"
) -> dict[str, Any]:
    """Train with an engine. Return losses, norms and values, and what this rank holds."""
    model = build(kind)
    model.set_experts_implementation(kernel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = sw.Engine(model, optimizer, quiet=True, **settings)
    losses, norms = [], []
    for step in range(len(ROWS)):
        engine.backward(loss_of(model, world.share(batch(step))))
        stats = engine.step(max_norm=0.5)
        assert stats.experts
        assert {sum(counts) for counts in stats.experts.values()} == {2 * batch(step).numel()}
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
    held = {n: tuple(p.shape) for n, p in model.named_parameters() if n.endswith("down_proj")}
    engine.close()
    values = dict(model.state_dict())
    return {"losses": losses, "norms": norms, "values": values, "held": held}


@pytest.mark.parametrize(
    ("kind", "zero", "tensor"),
    [
        ("mixtral", 3, 2),
        ("deepseek_v3", 2, 1),
        pytest.param("mixtral", 0, 1, marks=pytest.mark.full),
        pytest.param("qwen2_moe", 1, 1, marks=pytest.mark.full),
        pytest.param("qwen2_moe", 2, 2, marks=pytest.mark.full),
        pytest.param("qwen3_moe", 0, 1, marks=pytest.mark.full),
        pytest.param("olmoe", 2, 1, marks=pytest.mark.full),
        pytest.param("deepseek_v3", 0, 2, marks=pytest.mark.full),
    ],
)
def test_equals_one_process(group, kind, zero, tensor):
    expected = plain(kind)
    settings = {"zero": zero, "sequence_parallel": kind == "qwen2_moe" and tensor > 1}
    for ours in group(2, expert=2, tensor=tensor)(trained, kind, settings):
        assert any(shape[0] == 2 for shape in ours["held"].values()), ours["held"]
        for key in ("losses", "norms", "values"):
            # These routers compute in fp32, also in an fp64 model.
            torch.testing.assert_close(ours[key], expected[key], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["eager", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_compiled_equals_one_process(group, kind, kernel):
    expected = plain(kind)
    settings = {"zero": 2, "compile": True}
    ranks = group(2, expert=2)
    # The module's own loop over the experts that have rows splits the graph.
    options = ONE_GRAPH | {"fullgraph": kernel != "eager"}
    for ours, _ in ranks(compiled, options, trained, kind, settings, kernel, limit=LIMIT):
        for key in ("losses", "norms", "values"):
            torch.testing.assert_close(ours[key], expected[key], rtol=1e-6, atol=1e-6)


def under_the_trainer(world: sw.World, folder: str) -> None:
    """Train Mixtral under our Trainer on all ranks, and under the stock one on each."""
    from tests.distributed import test_transformers_trainer as trainers

    def mixtral() -> nn.Module:
        return build("mixtral", vocab_size=trainers.WORDS).float()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainers, "gpt2", mixtral)
        plain = trainers.stock(folder, 4)
        plain.train()
        expected = trainers.figures(plain)
        trainer = trainers.ours(world, folder, 2, zero=2)
        trainer.train()
    model = trainer.model
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] in (2, 4)
    for mine, theirs in zip(trainers.figures(trainer), expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.full
def test_trainer_equals_the_stock_trainer(group, tmp_path):
    group(2, expert=2)(under_the_trainer, str(tmp_path))


def refused(world: sw.World) -> list[str]:
    """Return the errors of a model with a router loss, and of experts that look at each other."""
    found = []
    models = [build("mixtral", output_router_logits=True), Mixed()]
    for model in models:
        try:
            sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.5), quiet=True)
        except ModelError as error:
            found.append(str(error))
    return found


class Mixed(nn.Module):
    """Experts in one tensor, whose outputs depend on all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim = 4, 3
        self.weight = nn.Parameter(torch.randn(4, 3, 3, dtype=torch.float64))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Return the mean over all experts."""
        return hidden_states @ self.weight.mean(0) * top_k_weights.sum(-1, keepdim=True)


def test_refuses_what_is_not_exact(group):
    for loss, mixed in group(2, expert=2)(refused):
        assert "computes its router loss from one worker's tokens" in loss
        assert "two of its experts compute something else together than one by one" in mixed


def continued(world: sw.World, kind: str, folder: Path) -> None:
    """Load a folder of Transformers, train as in one plain process, and export it in two forms."""
    start, model = build(kind), build(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if world.is_main:
        start.save_pretrained(folder / "hf")
    world.barrier()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.5), quiet=True, zero=2)
    engine.load(folder / "hf")
    for step in range(len(ROWS)):
        engine.backward(loss_of(model, world.share(batch(step))))
        engine.step(max_norm=0.5)
    engine.save(folder / "run")
    if world.is_main:
        expected = plain(kind)["values"]
        for words in ([], ["--map", "experts-split"]):
            out = folder / f"out{len(words)}"
            told = CliRunner().invoke(checkpoint, ["export", f"{folder / 'run'}", f"{out}", *words])
            assert told.exit_code == 0, told.output
            back = type(start).from_pretrained(out, dtype=torch.float64)
            for name, value in back.state_dict().items():
                # DeepSeek-V3 loads its gates in fp32, and all models compute parts in fp32.
                assert torch.allclose(value.double(), expected[name], rtol=1e-6, atol=1e-7), name
        # The names in the second folder are those of Transformers' own files.
        ours, theirs = (load_file(f / "model.safetensors") for f in (out, folder / "hf"))
        assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}
    world.barrier()
    engine.close()


@pytest.mark.parametrize(
    "kind", ["mixtral", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS if k != "mixtral")]
)
def test_loads_and_exports_folders_of_transformers(group, tmp_path, kind):
    group(2, expert=2)(continued, kind, tmp_path)
