"""`--context` with language models of Transformers, which get positions and return logits."""

import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.model.varlen_attention import attend
from shardwise.parallel.context import flash_attention, transformers_inputs
from shardwise.parallel.context.token_exchange import gather
from shardwise.parallel.context.transformers_inputs import TransformersInputs
from tests.distributed.test_context_flex import on_cpus

transformers = pytest.importorskip("transformers")
WrappedFlexAttention = pytest.importorskip(
    "transformers.integrations.flex_attention"
).WrappedFlexAttention

SIZES = {"vocab_size": 13, "max_position_embeddings": 32}
TWO_KINDS = {
    "sliding_window": 4,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "use_cache": False,
}
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
    "Mistral": LLAMA,
    "Bert": {
        **SIZES,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
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


DROPPING = {key: value for key, value in CONFIGS["GPT2"].items() if "pdrop" not in key}


def model_of(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**CONFIGS[kind] | changes)
    classes = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}
    model = getattr(transformers, classes.get(kind, f"{kind}ForCausalLM"))(config).train()
    for module in list(model.modules()):
        for name, child in module.named_children():
            # These norms compute in fp32, whose rounding would hide differences.
            if type(child).__name__ in (
                "LlamaRMSNorm",
                "Qwen2RMSNorm",
                "MistralRMSNorm",
            ):
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


# -- labels= and masks that the model would make from the length of its input -----------------


def fp64_loss(logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **_: Any) -> Any:
    """Compute the loss of Transformers without its cast to fp32, which would hide differences."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.view(-1, vocab_size), shift_labels.reshape(-1))


CASES = {
    # kind, fields of a batch besides input_ids and labels, changes of the configuration
    "labels": ("Llama", (), {}),
    "three heads": (
        "Llama",
        (),
        {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "padding": ("GPT2", ("attention_mask",), {}),
    "padding and groups": ("Llama", ("attention_mask",), {}),
    "documents": ("Qwen2", ("position_ids",), {"use_cache": False}),
    # With a cache, Transformers does not look for documents in the positions.
    "positions that restart": ("Qwen2", ("position_ids",), {}),
    "window": ("Mistral", (), {"sliding_window": 4}),
    "two kinds of layers": ("Qwen2", ("position_ids",), TWO_KINDS),
    "two kinds of layers without documents": ("Qwen2", (), TWO_KINDS),
    "no causal mask": ("Bert", ("attention_mask",), {}),
}


FAST = {"labels", "two kinds of layers without documents"}


def labelled_batch(step: int, fields: Sequence[str]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(13, (2, 11), generator=draw)
    labels = ids.clone()
    labels[:, : 3 + step] = -100
    batch = {"input_ids": ids, "labels": labels}
    if "attention_mask" in fields:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, 9 - step :] = 0
        labels[0, 9 - step :] = -100
    if "position_ids" in fields:
        # A document ends where rank 0's part ends, so neither part sees a border.
        batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(6)]).expand(2, 11)
    return batch


def trained_on_labels(world: sw.World | None, name: str) -> dict[str, Any]:
    """Train with `labels=`, with an engine, or without a world in plain PyTorch."""
    kind, fields, changes = CASES[name]
    model = model_of(kind, **changes)
    model.loss_function = fp64_loss
    if kind == "Bert":  # labels are not shifted
        model.loss_function = lambda *args, **kwargs: fp64_loss(
            *args, shift_labels=kwargs["labels"], **kwargs
        )
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    engine = None if world is None else sw.Engine(model, optimizer, zero=1, quiet=True)
    for step in range(3):
        batch = labelled_batch(step, fields)
        if engine is None or world is None:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        else:
            engine.backward(model(**world.share(batch)).loss)
            losses.append(engine.step().loss)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    if engine is not None:
        engine.close()
    return {"losses": losses, "values": values}


@pytest.mark.full
@pytest.mark.parametrize("name", ["labels", "padding"])
def test_split_layers_equal_one_process(group, name):
    expected = trained_on_labels(None, name)
    for ours in group(4, context=2, tensor=2)(trained_on_labels, name):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FAST else pytest.mark.full) for n in CASES],
)
def test_labels_and_masks_equal_one_process(group, name):
    expected = trained_on_labels(None, name)
    for ours in group(2, context=2)(trained_on_labels, name):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)


def trained_with_flex_attention(world: sw.World, name: str) -> dict[str, Any]:
    """Train with flex attention, compiled without kernels, which have no gradients on a CPU."""
    with on_cpus():
        wrapped = transformers.integrations.flex_attention.WrappedFlexAttention
        wrapped._instance = None  # it has a function that another compiler compiled
        # Transformers passes an argument that torch has deprecated.
        warnings.filterwarnings("ignore", "_compile flag on create_block_mask")
        kind, fields, changes = CASES[name]
        flex = {"attn_implementation": "flex_attention"}
        with mock.patch.dict(CASES, {name: (kind, fields, changes | flex)}):
            return trained_on_labels(world, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n == "two kinds of layers" else pytest.mark.full)
        # Transformers has no flex attention in GPT-2.
        for n in CASES
        if n != "padding"
    ],
)
def test_flex_attention_equals_one_process(group, name):
    expected = trained_on_labels(None, name)
    for ours in group(2, context=2)(trained_with_flex_attention, name):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)


def documents() -> list[dict[str, list[int]]]:
    """Return documents of different lengths. Their labels are at the end."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for size in (5, 2, 4, 7, 3, 1, 6, 2, 6):
        ids = torch.randint(13, (size,), generator=draw).tolist()
        found.append({"input_ids": ids, "labels": [-100] * (size // 2) + ids[size // 2 :]})
    return found


def trained_on_documents(world: sw.World | None, kernel: str, rows: int) -> dict[str, Any]:
    """Train on three documents a step, flattened by Transformers, with an engine or without."""
    table = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    model = model_of("Llama", use_cache=False)
    model.loss_function = fp64_loss
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    # The kernels need a GPU. The function in the table is called as they are.
    with mock.patch.dict(table._local_mapping, {kernel: attend} if "flash" in kernel else {}):
        model.config._attn_implementation = kernel
        if world is None:
            for first in range(0, 9, rows):
                loss = model(**collate(documents()[first : first + rows])).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        else:
            engine = sw.Engine(model, optimizer, zero=1, quiet=True)
            with mock.patch.object(flash_attention, "gather", wraps=gather) as gathered:
                for batch in sw.Loader(documents(), batch_size=rows, collate_fn=collate):
                    engine.backward(model(**batch).loss)
                    losses.append(engine.step().loss)
            engine.close()
            # Positions, once in the trial and in each forward pass.
            assert gathered.call_count == (1 + len(losses) if "flash" in kernel else 0)
            assert "flash" not in kernel or table[kernel] is attend
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "values": values}


@pytest.mark.parametrize(
    ("kernel", "size"),
    [
        ("sdpa", 2),
        ("flash_attention_2", 2),
        pytest.param("flash_attention_2", 4, marks=pytest.mark.full),
    ],
)
def test_flattened_documents_equal_one_process(group, kernel, size):
    expected = trained_on_documents(None, kernel, 3)
    by_masks = trained_on_documents(None, "sdpa", 3)
    assert expected["losses"] == pytest.approx(by_masks["losses"], rel=1e-8)
    for ours in group(size, context=size)(trained_on_documents, kernel, 3):
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-8)
        for key, value in expected["values"].items():
            torch.testing.assert_close(ours["values"][key], value, rtol=1e-8, atol=1e-10)


def flash_errors(world: sw.World) -> list[str]:
    table = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    said = []
    for changes in ({}, {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 12}):
        model = model_of("Llama", **changes)
        with mock.patch.dict(table._local_mapping, {"flash_attention_2": attend}):
            model.config._attn_implementation = "flash_attention_2"
            engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
            fields = [] if changes else ["attention_mask"]
            with pytest.raises(ModelError) as caught:
                model(**world.share(labelled_batch(0, fields)))
            said.append(str(caught.value))
            engine.close()
    return said


def test_flash_attention_refuses_padding_and_heads_that_do_not_divide(group):
    for padding, heads in group(2, context=2)(flash_errors):
        assert "takes no padding" in padding
        assert "3 attention heads cannot be spread evenly" in heads


def chunked(world: sw.World) -> str:
    model = model_of("Llama")
    model.config.attention_chunk_size = 4
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    with pytest.raises(ModelError, match="chunks of 4 tokens") as caught:
        model(**world.share(labelled_batch(0, ())))
    engine.close()
    return str(caught.value)


def test_refuses_attention_that_is_not_torchs():
    model = model_of("Llama", attn_implementation="eager")
    with pytest.raises(ModelError, match='attn_implementation="sdpa"'):
        TransformersInputs(model)


def with_default_dropout(world: sw.World, recomputes: bool) -> list[float]:
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**DROPPING)).train()
    if recomputes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the method's name will change
            model.gradient_checkpointing_enable()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
    losses = []
    for step in range(8):
        engine.backward(model(**world.share(labelled_batch(step % 2, ()))).loss)
        losses.append(engine.step().loss)
    engine.close()
    return losses


@pytest.mark.full
@pytest.mark.parametrize("recomputes", [False, True])
def test_trains_with_default_dropout(group, recomputes):
    (losses, others) = group(2, context=2)(with_default_dropout, recomputes)
    assert losses == others
    assert losses[-1] < losses[0]


@pytest.mark.full
def test_refuses_chunks(group):
    group(2, context=2)(chunked)


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


IMAGES = {
    "text_config": LLAMA | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}},
    "vision_config": {"depth": 1, "embed_dim": 8, "hidden_size": 16, "num_heads": 2},
}
IN_FP32 = {
    # The default kernel for experts does not know fp64.
    "Mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 2}),
    # The gradients of these norms are sums over tokens in fp32.
    "Cohere": ("CohereForCausalLM", LLAMA),
    "Qwen2VL": ("Qwen2VLForConditionalGeneration", IMAGES),
}


def first_step(world: sw.World, kind: str, axes: int) -> tuple[float, float]:
    """Make a step of a model that computes in fp32 even during the trial.

    `axes` is the size of dimension 0 of its positions, or 0 to leave them out. With 4, each row has
    two documents.
    """
    torch.manual_seed(3)
    name, options = IN_FP32[kind]
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, name)(config)
    model.config.get_text_config().use_cache = False

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        positions = torch.cat([torch.arange(5), torch.arange(6)]) if axes == 4 else torch.arange(11)
        places = (
            positions.expand(axes, len(rows), 11) // torch.tensor([1, 1, 1, 2])[:axes, None, None]
        )
        return ({"position_ids": places} if axes else {}) | batch

    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    whole = labelled_batch(0, ())
    data = [{key: value[row % 2] for key, value in whole.items()} for row in range(3)]
    dims = {"position_ids": 2} if axes else None
    for batch in sw.Loader(data, batch_size=3, collate_fn=collate, sequence_dim=dims):
        engine.backward(model(**batch).loss)
        stats = engine.step(max_norm=1e9)
    engine.close()
    return stats.loss, stats.grad_norm


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("Mixtral", 0),
        pytest.param("Cohere", 0, marks=pytest.mark.full),
        pytest.param("Qwen2VL", 0, marks=pytest.mark.full),
        pytest.param("Qwen2VL", 3, marks=pytest.mark.full),
        ("Qwen2VL", 4),
    ],
)
def test_models_that_compute_in_fp32_pass_the_trial(group, kind, axes):
    (expected,) = group(1)(first_step, kind, axes)
    for ours in group(2, context=2)(first_step, kind, axes):
        assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "original_max_position_embeddings": 8,
            "short_factor": [1.0, 1.0],
            "long_factor": [3.0, 3.0],
        },
    ],
)
def test_refuses_frequencies_that_depend_on_the_length(scaling):
    model = model_of("Llama", max_position_embeddings=8, rope_scaling=scaling)
    inputs = TransformersInputs(model)
    with pytest.raises(ModelError, match=f"{scaling['rope_type']}.* more than 8 tokens"):
        inputs.complete(((), {"input_ids": torch.zeros(2, 5, dtype=torch.long)}), [5, 4], None)
    inputs._check_frequencies(8)


@pytest.mark.parametrize("is_read", [True, False])
def test_flash_attention_refuses_padding_of_later_batches(solo, monkeypatch, is_read):
    model = model_of("Llama")
    model.config._attn_implementation = "flash_attention_2"
    inputs, mask = TransformersInputs(model), torch.ones(2, 4)
    if not is_read:  # as on a GPU, where reading a mask waits for the kernels
        monkeypatch.setattr(transformers_inputs, "_is_free_to_read", lambda _: False)
    for _ in range(transformers_inputs.CHECKED):
        inputs._check_no_padding(mask, [4], solo.context)
    # A trial in evaluation mode has its masks on the CPU, and does not change what is read later.
    with mock.patch.object(transformers_inputs, "_is_free_to_read", return_value=True):
        inputs._check_no_padding(mask, [4], solo.context)
    with (
        mock.patch.object(transformers_inputs, "gather", wraps=gather) as gathered,
        pytest.raises(ModelError if is_read else RuntimeError, match="takes no padding"),
    ):
        inputs._check_no_padding(mask.tril(2), [4], solo.context)
    assert gathered.call_count == is_read
