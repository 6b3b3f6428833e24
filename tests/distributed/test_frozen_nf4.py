"""Adapters on a frozen base in 4 bits (QLoRA), compared with a plain process.

The plain process stores nothing in 4 bits: it rounds the base weights once, with the code below.
"""

import copy
import warnings
from functools import partial
from unittest import mock

import pytest
import torch

import shardwise as sw
from shardwise import config
from shardwise.errors import ConfigError, ModelError, ParameterAccess, ShardwiseError, UsageError
from shardwise.layout.placement import Tier
from shardwise.states.storage.nf4_storage import BLOCK, VALUES, NF4Storage
from tests.distributed.test_context_of_transformers import LLAMA, transformers
from tests.distributed.test_sharded_compile import start_afresh

peft = pytest.importorskip("peft")

STEPS = 4
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def made(dtype=torch.float64):
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(dtype)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a name that Transformers renamed
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide the gradients of lora_A
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def is_base(name):
    return "lora_" not in name and any(f".{layer}." in name for layer in LINEAR)


@torch.no_grad()
def round_to_nf4(weight):
    """Round `weight` in place, one block at a time."""
    values = torch.tensor(VALUES, dtype=torch.float64)
    for block in weight.view(-1).split(BLOCK):
        scale = block.abs().max()
        block.copy_(values[(block.unsqueeze(1) / scale - values).abs().argmin(1)] * scale)


def round_base(model):
    for name, parameter in model.named_parameters():
        if is_base(name):
            round_to_nf4(parameter)


def optimizer_of(model, kind):
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "simple":
        return torch.optim.SGD(trained, lr=0.1)
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(trained, lr=0.02)


def batch(step):
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(LLAMA["vocab_size"], (8, 9), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, rows):
    # Transformers' own loss computes in fp32.
    ids, labels = rows
    logits = model(input_ids=ids).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain(kind):
    model = made()
    round_base(model)
    optimizer = optimizer_of(model, kind)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights_of(model), copy.deepcopy(model).merge_and_unload().state_dict()


def trained(world, kind, settings):
    model = made()
    engine = sw.Engine(model, optimizer_of(model, kind), frozen_weights="nf4", **settings)
    losses = []
    for step in range(STEPS):
        engine.backward(loss_of(model, world.share(batch(step))))
        losses.append(engine.step().loss)
    with engine.full_parameters():
        weights = weights_of(model)
    engine.close()
    return losses, weights, copy.deepcopy(model).merge_and_unload().state_dict()


@pytest.mark.parametrize(
    ("size", "kind", "settings"),
    [
        (1, "sgd", {"zero": 3}),
        (1, "adamw", {"zero": 0}),
        (2, "adamw", {"zero": 3, "bucket_mb": 0.01}),
        (2, "sgd", {"zero": 0, "activations": "recomputed"}),
        (2, "adamw", {"zero": 1, "optimizer_state": "8bit"}),
        (2, "sgd", {"zero": 2, "activations": "recomputed"}),
        (2, "sgd", {"zero": 3, "activations": "recomputed"}),
        (2, "sgd", {"zero": 3, "ema_decay": 0.9}),
        (2, "sgd", {"zero": 2, "context": 2}),
        (2, "sgd", {"zero": 3, "context": 2}),
        # An average of parameters after each simple step is the step of one process.
        (2, "simple", {"zero": 0, "islands": 2, "equal_every": 1}),
        (4, "simple", {"zero": 3, "islands": 2, "equal_every": 1}),
    ],
    ids=str,
)
def test_equals_a_process_with_rounded_weights(group, size, kind, settings):
    losses, weights, merged = plain(kind)
    apart = {key: settings[key] for key in ("context", "islands") if key in settings}
    settings = {key: value for key, value in settings.items() if key not in apart}
    tolerance = {"rtol": 1e-8, "atol": 1e-10}
    if "optimizer_state" in settings:
        tolerance = {"rtol": 1e-2, "atol": 1e-2}
    for ours, whole, together in group(size, **apart)(trained, kind, settings):
        if "islands" not in apart:  # each island reports the loss of its rows
            torch.testing.assert_close(ours, losses, **tolerance)
        torch.testing.assert_close(whole, weights, **tolerance)
        torch.testing.assert_close(together, merged, **tolerance)


def compiled(world, settings):
    """Train with compiled units. Return the results, the number of graphs, and the graph breaks."""
    start_afresh()
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        results = trained(world, "sgd", {**settings, "compile": True})
    counters = torch._dynamo.utils.counters
    return results, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"zero": 0}, {"zero": 3, "activations": "recomputed"}])
def test_compiled_equals_a_process_with_rounded_weights(group, settings):
    losses, weights, merged = plain("sgd")
    for (ours, whole, together), graphs, breaks in group(2)(compiled, settings):
        torch.testing.assert_close(ours, losses, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(whole, weights, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(together, merged, rtol=1e-8, atol=1e-10)
        assert graphs > 0
        assert breaks == {}


def gathered_bytes(world):
    """Return the bytes that the gathers of a forward pass fill, by dtype, and those of the base."""
    model = made(torch.bfloat16)
    engine = sw.Engine(model, optimizer_of(model, "sgd"), frozen_weights="nf4", zero=3)
    group = engine._spec.gather_group
    sent, gather = {}, group.all_gather

    def noted(flat, cuts):
        sent[flat.dtype] = sent.get(flat.dtype, 0) + flat.nbytes
        return gather(flat, cuts)

    group.all_gather = noted
    with torch.no_grad():
        loss_of(model, batch(0))
    del group.all_gather
    numel = sum(b.layout.numel for b in engine._states.parameters.frozen if is_narrow(b))
    engine.close()
    return sent[torch.uint8], numel


def is_narrow(bucket):
    return isinstance(bucket.storage, NF4Storage)


def test_gathers_send_4_bits(group):
    for nbytes, numel in group(2)(gathered_bytes):
        assert nbytes == numel * (4 + 16 / BLOCK) / 8


def saved_and_resumed(world, folder, zero, other):
    """Save after 2 steps with `zero`, and train on with `other`, after a fresh start."""
    engines = []
    for row in (zero, other):
        model = made(torch.float32)
        engine = sw.Engine(model, optimizer_of(model, "adamw"), frozen_weights="nf4", zero=row)
        engines.append((model, engine))
    for step in range(STEPS):
        for number, (model, engine) in enumerate(engines):
            if step == 2 and number == 1:
                with engine.full_parameters(write=True):
                    for parameter in model.parameters():
                        parameter.fill_(7)
                engine.resume(folder)
            if step < 2 and number == 1:
                continue
            engine.backward(loss_of(model, world.share(batch(step))))
            engine.step()
            if step == 1 and number == 0:
                engine.save(folder)
    found = []
    for model, engine in engines:
        with engine.full_parameters():
            found.append(weights_of(model))
    return found


@pytest.mark.parametrize(("size", "zero", "other"), [(2, 0, 3), (2, 3, 0)])
def test_checkpoints_load_in_each_row(group, tmp_path, size, zero, other):
    found = group(size)(saved_and_resumed, str(tmp_path), zero, other)
    for first, second in found:
        for name, value in first.items():
            torch.testing.assert_close(
                second[name], value, rtol=0, atol=0 if is_base(name) else 1e-6
            )


def unfrozen(world, zero):
    """Unfreeze a base weight after the engine was created."""
    model = made(torch.float32)
    optimizer = optimizer_of(model, "sgd")
    engine = sw.Engine(model, optimizer, frozen_weights="nf4", zero=zero)
    engine.describe()
    weight = model.base_model.model.model.layers[0].self_attn.k_proj.weight
    weight.requires_grad_(True)
    optimizer.add_param_group({"params": [weight]})
    ids = world.share(batch(0))
    with pytest.raises(UsageError, match=r"k_proj\.weight is stored in 4 bits .* was unfrozen"):
        loss_of(model, ids)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_weight_that_is_unfrozen_later_is_refused(group, zero):
    group(2)(unfrozen, zero)


def refused(world):
    model = made(torch.float32)
    engine = sw.Engine(
        model,
        optimizer_of(model, "sgd"),
        frozen_weights="nf4",
        zero=1,
        guard=1,
        guard_memory=True,
    )
    weight = model.base_model.model.model.layers[0].self_attn.k_proj.weight
    for use in (lambda: weight + 1, lambda: weight.mul_(2)):
        with pytest.raises(ParameterAccess, match=r"k_proj\.weight .* is stored in 4 bits"):
            use()
    with pytest.raises(UsageError, match=r"engine\.full_parameters"):
        model.state_dict()
    for step in range(2):
        engine.backward(loss_of(model, world.share(batch(step))))
        engine.step()
    # The guard compares the codes and the scales, too.
    storage = engine._state.states.parameters.frozen[0].storage
    storage.codes.numpy()[300] ^= 8  # a write that torch does not count
    engine.backward(loss_of(model, world.share(batch(2))))
    with pytest.raises(ShardwiseError, match=r"\(codes\)"):
        engine.step()
    plain = torch.nn.Linear(8, 8)
    with pytest.raises(ModelError, match=r"no nn\.Linear in it has a frozen weight"):
        sw.Engine(plain, torch.optim.SGD(plain.parameters(), lr=0.1), frozen_weights="nf4")


def test_refuses_reads_damaged_codes_and_models_without_frozen_weights(group):
    group(1)(refused)


@pytest.mark.parametrize(
    "given",
    [
        {"tensor": 2},
        {"pipeline": 2},
        {"expert": 2},
        {"survive": 1},
        {"offload_params": Tier("cpu")},
    ],
)
def test_refuses_settings_that_move_frozen_weights(given):
    given = {"zero": 3} | given if "offload_params" in given else given
    with pytest.raises(ConfigError, match=r"--frozen[-_]weights nf4"):
        config.check_contradictions(config.Settings(frozen_weights="nf4", **given))
