"""Checkpoints of other libraries: bit-exact round trips, and no code from files."""

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardwise.checkpoint.commands import checkpoint
from shardwise.checkpoint.format import TensorSpec
from shardwise.checkpoint.formats import dcp as our_dcp
from shardwise.checkpoint.formats import exporting
from shardwise.checkpoint.formats.comparing import fingerprints
from shardwise.checkpoint.formats.recognise import open_checkpoint
from shardwise.checkpoint.formats.saved import Checkpoint, MemoryReader
from shardwise.errors import BrokenCheckpoint, CheckpointError
from tests import foreign_checkpoints as foreign

LIGHT = ("torch dict", "ddp dict", "dcp", "torchtitan", "fsdp1 full")
"""Formats whose libraries are imported anyway."""


def run(*words):
    """Run a command of `shardwise checkpoint`, and return its exit code and output."""
    result = CliRunner().invoke(checkpoint, [str(w) for w in words], standalone_mode=False)
    if result.exception is not None:
        return 1, str(getattr(result.exception, "message", result.exception))
    return result.return_value, result.output


@pytest.fixture
def trained():
    """Return a model and its optimizer with one group after some steps."""
    model = foreign.build()
    optimizer = foreign.optimizer_of(model, "one")
    foreign.train(model, optimizer, 0, foreign.STEPS)
    return model, optimizer


def assert_same(state, other):
    """Assert that two nested states have the same bits."""
    if isinstance(state, torch.Tensor):
        assert torch.equal(state, other)
        assert state.dtype == other.dtype
    elif isinstance(state, dict):
        assert state.keys() == other.keys()
        for key in state:
            assert_same(state[key], other[key])
    elif isinstance(state, list | tuple):
        assert len(state) == len(other)
        for one, two in zip(state, other, strict=True):
            assert_same(one, two)
    else:
        assert state == other


@pytest.mark.parametrize("kind", LIGHT)
def test_round_trip_through_torch_is_bit_exact(tmp_path, trained, kind):
    """Import and export again: torch's own load_state_dict gets the same bits."""
    model, optimizer = trained
    path = foreign.WRITERS[kind](tmp_path, model, optimizer)
    assert run("import", path, tmp_path / "run")[0] == 0
    assert run("verify", tmp_path / "run")[0] == 0
    code, told = run("diff", tmp_path / "run", path)
    assert (code, "0 differ" in told) == (0, True), told
    assert run("export", tmp_path / "run", tmp_path / "back.pt", "--with-optimizer")[0] == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    other = foreign.build(seed=9)
    other_optimizer = foreign.optimizer_of(other, "one")
    other.load_state_dict(back["model"])
    other_optimizer.load_state_dict(back["optimizer"])
    assert_same(other.state_dict(), model.state_dict())
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())
    assert back["step"] == foreign.STEPS


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_exported_dcp_loads_in_torch(tmp_path, trained):
    model, optimizer = trained
    path = foreign.torch_dict(tmp_path, model, optimizer)
    assert run("export", path, tmp_path / "dcp", "--to", "dcp", "--with-optimizer")[0] == 0
    other = foreign.build(seed=9)
    other_optimizer = foreign.optimizer_of(other, "one")
    of_model, of_optimizer = get_state_dict(other, other_optimizer)
    state = {"model": of_model, "optim": of_optimizer, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(
        other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    assert_same(other.state_dict(), model.state_dict())
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())
    assert state["step"] == foreign.STEPS


def test_exported_folder_loads_in_transformers(tmp_path, monkeypatch):
    """A split model with a config: import, export, and load with from_pretrained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    assert run("import", tmp_path / "hf", tmp_path / "run")[0] == 0
    tokens = torch.arange(8).view(2, 4)
    for words in ((), ("--dtype", "bf16")):
        out = tmp_path / f"out{len(words)}"
        assert run("export", tmp_path / "run", out, *words)[0] == 0
        loaded = LlamaForCausalLM.from_pretrained(out, dtype="auto").eval()
        wanted = model.to(torch.bfloat16) if words else model
        assert torch.equal(loaded(tokens).logits, wanted(tokens).logits)
        assert fingerprints(loaded) == fingerprints(wanted)
    # To Meta's names and back, with the number of heads from config.json.
    code, told = run("import", tmp_path / "hf", tmp_path / "meta", "--map", "llama-hf-to-meta")
    assert code == 0, told
    back = ("export", tmp_path / "meta", tmp_path / "back", "--map", "llama-meta-to-hf")
    assert run(*back)[0] == 0
    assert run("diff", tmp_path / "back", tmp_path / "hf")[0] == 0


def test_gpt2_map_gives_the_weights_of_linear_layers(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=4))
    model.save_pretrained(tmp_path / "hf")
    code, told = run("import", tmp_path / "hf", tmp_path / "run", "--map", "gpt2-hf-to-linear")
    assert code == 0, told
    with open_checkpoint(tmp_path / "run") as found:
        weight = found.model.whole("transformer.h.0.attn.c_attn.weight")
        assert weight.shape == (24, 8)
        x = torch.randn(3, 8)
        layer = model.transformer.h[0].attn.c_attn
        assert torch.allclose(torch.nn.functional.linear(x, weight, layer.bias), layer(x))


def test_adapter_of_peft_round_trip(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(foreign.build(), LoraConfig(target_modules=["lin"], r=2))
    torch.nn.init.normal_(model.base_model.model.lin.lora_B["default"].weight)
    model.save_pretrained(tmp_path / "adapter")
    assert "PEFT adapter" in run("show", tmp_path / "adapter")[1]
    code, told = run("export", tmp_path / "adapter", tmp_path / "out")
    assert code == 0, told
    loaded = PeftModel.from_pretrained(foreign.build(), tmp_path / "out")
    assert_same(loaded.state_dict(), model.state_dict())


# -- what the commands say ---------------------------------------------------------------------


def test_show_and_diff(tmp_path, trained):
    model, optimizer = trained
    path = foreign.dcp_nested(tmp_path, model, optimizer)
    code, told = run("show", path)
    assert code == 0
    for words in ("torch DCP", "step  3", "5 parameters by name, lr 0.02", "lin.weight", "4 x 4"):
        assert words in told, told
    with torch.no_grad():
        model.lin.weight[0, 0] *= 1 + 1e-6
    (tmp_path / "other").mkdir()
    other = foreign.torch_dict(tmp_path / "other", model, optimizer)
    code, told = run("diff", path, other)
    assert code == 1
    (line,) = [line for line in told.splitlines() if "lin.weight " in line]
    *_, changed, relative = line.split()
    assert changed == "1"
    assert 1e-7 < float(relative) < 1e-5
    assert "1 differ" in told


def test_dry_run_writes_nothing(tmp_path, trained):
    path = foreign.torch_dict(tmp_path, *trained)
    before = sorted(os.listdir(tmp_path))
    words = ("--map", "lin.=layer.", "--map", "emb.weight=a,b;dim=1", "--dry-run")
    code, told = run("import", path, tmp_path / "run", *words)
    assert code == 0
    assert "layer.weight" in told
    assert "split along dim 1" in told
    assert "7 x 2" in told
    assert sorted(os.listdir(tmp_path)) == before


def test_import_says_what_is_missing(tmp_path, trained):
    model, _ = trained
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    _, told = run("import", tmp_path / "weights.pt", tmp_path / "run")
    for words in ("optimizer state is missing", "no step count", "no seed", "no loss scale"):
        assert words in told, told


def test_averaged_weights_are_named_and_can_be_imported(tmp_path, trained):
    model, _ = trained
    average = {name: value + 1 for name, value in model.state_dict().items()}
    torch.save({"state_dict": model.state_dict(), "state_dict_ema": average}, tmp_path / "m.pth")
    assert "state_dict_ema" in run("show", tmp_path / "m.pth")[1]
    words = ("import", tmp_path / "m.pth", tmp_path / "run", "--weights", "state_dict_ema")
    assert run(*words)[0] == 0
    with open_checkpoint(tmp_path / "run") as found:
        assert torch.equal(found.model.whole("lin.bias"), average["lin.bias"])
    code, told = run("import", tmp_path / "m.pth", tmp_path / "two", "--weights", "other")
    assert code == 1
    assert "It has state_dict_ema" in told


def test_fingerprints_prove_the_bits(tmp_path, trained):
    model, optimizer = trained
    path = foreign.torch_dict(tmp_path, model, optimizer)
    code, told = run("fingerprint", path)
    assert code == 0
    assert json.loads(told) == fingerprints(model)
    (tmp_path / "prints.json").write_text(told)
    assert run("fingerprint", path, "--compare", tmp_path / "prints.json")[0] == 0
    with torch.no_grad():
        model.norm.bias[0] += 1
    foreign.torch_dict(tmp_path, model, optimizer)
    code, told = run("fingerprint", path, "--compare", tmp_path / "prints.json")
    assert code == 1
    assert "norm.bias" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "SOURCE", "out", "--to", "onnx"), "no format 'onnx'"),
        (("export", "SOURCE", "out.txt"), "ends in .txt"),
        (("export", "SOURCE", "out", "--with-optimizer"), "holds weights only"),
        (("export", "SOURCE", "out", "--to", "pt"), "ends in nothing"),
        (("export", "SOURCE", "out.pt", "--to", "dcp"), "name of a file"),
        (("export", "SOURCE", "out", "--to", "lightning"), "ends in nothing"),
        (("export", "SOURCE", "out.ckpt", "--to", "accelerate"), "name of a file"),
        (("export", "SOURCE", "full"), "not an empty folder"),
        (("export", "SOURCE", "out", "--dtype", "int4"), "write one of fp32"),
        (("export", "SOURCE", "out", "--average"), "no moving average"),
        (("import", "SOURCE", "full/file"), "file is in the way"),
        (("show", "nothing"), "does not exist"),
        (("inspect", "nothing"), "nothing does not exist"),
        (("inspect", "full/file"), "is a file. For files: `shardwise checkpoint show full/file`"),
        (("show", "full"), "contains no model.safetensors"),
        (("fingerprint", "SOURCE", "--compare", "full/wrong.json"), "not a file of fingerprints"),
    ],
)
def test_wrong_words_have_one_clear_sentence(tmp_path, monkeypatch, trained, words, said):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").touch()
    Path("full/wrong.json").write_text("[1]")
    source = foreign.torch_dict(tmp_path, *trained)
    before = sorted(map(str, Path().rglob("*")))
    code, told = run(*(str(source) if word == "SOURCE" else word for word in words))
    assert code == 1
    assert said in told, told
    assert sorted(map(str, Path().rglob("*"))) == before


# -- files from others are not trusted ---------------------------------------------------------


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def rezip(path, name, data):
    """Replace one record of a zip file."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for record, content in records.items():
            archive.writestr(record, data if record.endswith(name) else content)


def test_no_pickle_runs_code(tmp_path, trained):
    """In a training dict, a Lightning file, and the metadata, values and chunks of DCP."""
    done = tmp_path / "done"
    model, optimizer = trained
    torch.save({"model": model.state_dict(), "x": Harmful(done)}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as found:
        assert list(found.model.specs) == list(model.state_dict())
        assert found.facts["not read"] == f"x ({os.mkdir.__module__}.mkdir)"
    torch.save([model.state_dict(), Harmful(done)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="could run code"):
        open_checkpoint(tmp_path / "list.pt")
    torch.save({"model": {"w": Harmful(done), "b": torch.ones(1)}}, tmp_path / "odd.pt")
    with pytest.raises(CheckpointError, match="contains no state_dict"):
        open_checkpoint(tmp_path / "odd.pt")
    lightning = {"pytorch-lightning_version": "2", "state_dict": model.state_dict()}
    torch.save(lightning | {"hyper_parameters": Harmful(done)}, tmp_path / "b.ckpt")
    open_checkpoint(tmp_path / "b.ckpt").close()
    folder = foreign.dcp_nested(tmp_path, model, optimizer)
    meta = pickle.loads((folder / ".metadata").read_bytes())
    meta.planner_data["x"] = Harmful(done)
    meta.state_dict_metadata["app.model.lin.bias"] = Harmful(done)
    (folder / ".metadata").write_bytes(pickle.dumps(meta))
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)
    state = {"model": model.state_dict(), "x": Harmful(done), "lr_scheduler": Harmful(done)}
    foreign.save_dcp(state, tmp_path / "values")
    open_checkpoint(tmp_path / "values").close()
    assert not done.exists()
    # A chunk with a harmful pickle in place of its own.
    foreign.save_dcp({"model": {"w": torch.ones(2)}}, tmp_path / "one")
    data = (tmp_path / "one" / "__0_0.distcp").read_bytes()
    (tmp_path / "chunk.pt").write_bytes(data)
    rezip(tmp_path / "chunk.pt", "data.pkl", pickle.dumps(Harmful(done)))
    (tmp_path / "one" / "__0_0.distcp").write_bytes((tmp_path / "chunk.pt").read_bytes())
    meta = pickle.loads((tmp_path / "one" / ".metadata").read_bytes())
    size = (tmp_path / "chunk.pt").stat().st_size
    for info in meta.storage_data.values():
        info.length = size
    (tmp_path / "one" / ".metadata").write_bytes(pickle.dumps(meta))
    with open_checkpoint(tmp_path / "one") as found, pytest.raises(BrokenCheckpoint, match="names"):
        found.model.whole("w")
    assert not done.exists()


def chunk(offsets, sizes):
    return our_dcp._Chunk(offsets, sizes, our_dcp._Place("f", 0, 99))


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "interval"),
    [
        ((6,), (2,), (3,), (2, 5)),
        ((4, 3), (1, 0), (2, 3), (3, 9)),
        ((4, 3), (1, 1), (1, 2), (4, 6)),
        ((4, 3), (0, 1), (4, 1), None),
        ((2, 2, 3), (1, 0, 0), (1, 2, 3), (6, 12)),
        ((2, 2, 3), (0, 1, 0), (2, 1, 3), None),
        ((), (), (), (0, 1)),
        ((2, 0), (0, 0), (2, 0), (0, 0)),
    ],
)
def test_intervals_of_chunks(shape, offsets, sizes, interval):
    assert chunk(offsets, sizes).interval(shape) == interval


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([((0, 0), (2, 2))], None),
        ([((0, 0), (2, 1)), ((0, 1), (2, 1))], None),
        ([((0, 0), (1, 2)), ((0, 0), (1, 2))], "overlap"),
        ([((0, 0), (1, 2))], "not all"),
        ([((1, 0), (2, 2))], "outside"),
        ([((0, 0), (2, 2**40))], "outside"),
        ([((0, 0), (2, 1)), ((0, 0), (1, 2))], "overlap"),
    ],
)
def test_chunks_must_cover_a_tensor_once(chunks, said):
    found = [chunk(*box) for box in chunks]
    spec = TensorSpec("w", "F32", (2, 2))
    if said is None:
        our_dcp._check_cover(spec, found)
    else:
        with pytest.raises(ValueError, match=said):
            our_dcp._check_cover(spec, found)


def test_values_of_wrong_types_are_named(tmp_path):
    """An intact file with an optimizer that no library writes."""
    model = foreign.build()
    odd = {"state": {0: {"exp_avg": "text"}}, "param_groups": [{"lr": 1.0}]}
    torch.save({"model": model.state_dict(), "optimizer": odd}, tmp_path / "m.pt")
    with pytest.raises(BrokenCheckpoint, match=r"not what torch.save writes .*params"):
        open_checkpoint(tmp_path / "m.pt")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"checkpoint_metadata.json": "{}", "model/x": ""}, "has no weights"),
        (
            {
                "checkpoint_metadata.json": "{}",
                "model/model_w_pp-rank-0-of-1_tp-rank-0-of-1_exp-rank-0-of-2.safetensors": "",
            },
            "shard of an expert",
        ),
        ({"pytorch_model_fsdp_0_rank0.bin": ""}, "one file of Accelerate per rank"),
        ({"metadata.json": '{"sharded_backend": "zarr"}'}, "in the format zarr"),
        ({"iter_0000010/mp_rank_00/model_optim_rng.pt": ""}, "Megatron-LM in its old format"),
        ({"__0_0.distcp": ""}, r"lacks \.metadata"),
        ({"pytorch_model_fsdp_0/x": ""}, r"fsdp_0 lacks \.metadata"),
    ],
)
def test_unsupported_folders_are_refused_by_name(tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path)


def written_by_megatron(folder):
    model = foreign.build(kind=foreign.Layers)
    optimizer = foreign.optimizer_of(model)
    foreign.train(model, optimizer, 0, foreign.STEPS)
    return foreign.megatron(folder, model, optimizer), model, optimizer


def test_checkpoints_of_megatron_core_are_unstacked(tmp_path):
    path, model, optimizer = written_by_megatron(tmp_path)
    code, told = run("show", path)
    assert code == 0, told
    for words in ("Megatron-Core", "step  3", "decoder.layers.1.mlp.weight", "lr 0.02, 0.03"):
        assert words in told, told
    assert "Megatron's own schedule" in told
    with open_checkpoint(path) as found:
        # Without grouped queries, the number of groups is not used.
        assert found.facts["num_key_value_heads"] == "4"
        assert_same({n: found.model.whole(n) for n in found.model.specs}, dict(model.state_dict()))
        (saved,) = found.optimizers
        weight = model.decoder["layers"][1]["mlp"].weight
        entry = saved.state["decoder.layers.1.mlp.weight"]
        assert torch.equal(entry["exp_avg"].value(), optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda groups: groups[0].pop("wd_mult"), "does not say which parameters"),
        (lambda groups: groups.append(groups[0] | {"lr": 1.0}), "does not say which parameters"),
    ],
)
def test_groups_of_megatron_that_are_not_certain_are_not_guessed(tmp_path, change, said):
    path, _, _ = written_by_megatron(tmp_path)
    common = path / "iter_0000003" / "common.pt"
    content = torch.load(common, weights_only=False)
    groups = content["optimizer"]["optimizer"]["param_groups"]
    groups[0]["wd_mult"], groups[1]["wd_mult"] = 1.0, 1.0
    change(groups)
    torch.save(content, common)
    with open_checkpoint(path) as found:
        assert found.optimizers == []
        assert any(said in note for note in found.notes)


def test_buffers_of_megatrons_distributed_optimizer_are_named(tmp_path):
    state = {
        "output_layer.weight": torch.ones(2, 3),
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg": torch.ones(6),
    }
    foreign.save_dcp(state, tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"iteration": 10}, tmp_path / "common.pt")
    with open_checkpoint(tmp_path) as found:
        assert list(found.model.specs) == ["output_layer.weight"]
        assert "--dist-ckpt-optim-fully-reshardable" in found.notes[0]


def test_shards_of_nanotron_must_fit(tmp_path):
    model = foreign.build(kind=foreign.Layers)
    optimizer = foreign.optimizer_of(model)
    foreign.train(model, optimizer, 0, 1)
    path = foreign.nanotron(tmp_path, model, optimizer)
    assert "10 parameters by name, lr 0.02, 0.03" in run("show", path)[1]
    file = path / "3/optimizer/optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt"
    file.rename(file.with_name("optimizer_pp-0-of-1_dp-0-of-2_tp-0-of-2_exp-0-of-1.pt"))
    assert "split by data-parallel ranks" in run("show", path)[1].replace("\n", " ")
    with open_checkpoint(path) as found:
        assert_same({n: found.model.whole(n) for n in found.model.specs}, dict(model.state_dict()))
    place = path / "3/model/decoder/layers/0/mlp"
    (place / "model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors").unlink()
    with pytest.raises(BrokenCheckpoint, match="not all of its elements"):
        open_checkpoint(path)


# -- averages ----------------------------------------------------------------------------------


def test_averages_lose_what_their_classes_add(tmp_path, trained):
    """AveragedModel of torch, ema_pytorch, and a file that is an average itself."""
    model, _ = trained
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(foreign.build(seed=6))
    average.update_parameters(foreign.build(seed=7))
    wanted = dict(average.module.state_dict())
    torch.save(average.state_dict(), tmp_path / "own.pt")
    with open_checkpoint(tmp_path / "own.pt") as found:
        assert_same({n: found.model.whole(n) for n in found.model.specs}, wanted)
    pytorch = {f"ema_model.{n}": v for n, v in wanted.items()}
    pytorch |= {f"online_model.{n}": v for n, v in model.state_dict().items()}
    pytorch |= {"initted": torch.tensor(True), "step": torch.tensor(3)}
    both = {"model": model.state_dict(), "ema": average.state_dict(), "ema_model": pytorch}
    torch.save(both | {"model_ema": {"shadow_params": [1.0]}}, tmp_path / "both.pt")
    with open_checkpoint(tmp_path / "both.pt") as found:
        for each in found.averages.values():
            assert_same({n: each.whole(n) for n in each.specs}, wanted)
        assert list(found.averages) == ["ema", "ema_model"]
        assert "not supported (under 'model_ema')" in "".join(found.notes)


def test_average_of_lightning_does_not_replace_the_trained_weights(tmp_path, trained):
    """Its callback WeightAveraging stores the average as state_dict."""
    model, optimizer = trained
    average = {name: value + 1 for name, value in model.state_dict().items()}
    state = {"pytorch-lightning_version": "2.6", "global_step": 3, "state_dict": average}
    state |= {"current_model_state": model.state_dict(), "averaging_state": {}}
    torch.save(state | {"optimizer_states": [optimizer.state_dict()]}, tmp_path / "a.ckpt")
    with open_checkpoint(tmp_path / "a.ckpt") as found:
        assert torch.equal(found.model.whole("lin.bias"), model.lin.bias)
        assert torch.equal(found.averages["state_dict"].whole("lin.bias"), average["lin.bias"])
        assert len(found.optimizers) == 1


def test_schedulers_by_class_are_unwrapped(tmp_path, trained):
    path = foreign.composer(tmp_path, *trained)
    with open_checkpoint(path) as found:
        assert found.schedulers["lr_scheduler"]["last_epoch"] == foreign.STEPS


# -- files for other libraries -----------------------------------------------------------------


def exported(tmp_path, trained, to, name):
    """Export a training dict with a scheduler, and return the path, and a new model."""
    model, optimizer = trained
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(state | {"lr_scheduler": {"last_epoch": 3, "_step_count": 4}}, tmp_path / "in.pt")
    code, told = run("export", tmp_path / "in.pt", tmp_path / name, "--to", to)
    assert code == 0, told
    other = foreign.build(seed=9)
    return tmp_path / name, other, foreign.optimizer_of(other, "one")


def test_exported_folder_loads_in_accelerate(tmp_path, trained):
    from accelerate import Accelerator

    path, other, optimizer = exported(tmp_path, trained, "accelerate", "state")
    accelerator = Accelerator(cpu=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    accelerator.prepare(other, optimizer, schedule)
    accelerator.load_state(str(path))
    assert schedule.last_epoch == 3
    assert_same(other.state_dict(), trained[0].state_dict())
    losses = foreign.train(*trained, foreign.STEPS, foreign.MORE)
    assert foreign.train(other, optimizer, foreign.STEPS, foreign.MORE) == losses


@pytest.mark.filterwarnings("ignore")  # Lightning warns about few workers, small data and more
def test_exported_file_continues_in_lightning(tmp_path, trained):
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    path, other, optimizer = exported(tmp_path, trained, "lightning", "x.ckpt")
    ours = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.emb, self.lin, self.norm, self.head = other.emb, other.lin, other.norm, other.head
            self.register_buffer("scale", other.scale)

        def training_step(self, batch, _):
            loss = foreign.loss_of(other, *batch)
            ours.append((self.trainer.global_step, loss.item()))
            return loss

        def configure_optimizers(self):
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]

    trainer = lightning.Trainer(
        max_steps=foreign.STEPS + foreign.MORE,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],
    )
    steps = range(foreign.STEPS, foreign.STEPS + foreign.MORE)
    data = torch.utils.data.DataLoader([foreign.batch(step) for step in steps], batch_size=None)
    trainer.fit(Module(), data, ckpt_path=path)
    losses = foreign.train(*trained, foreign.STEPS, foreign.MORE)
    assert ours == list(zip(steps, losses, strict=True))


def test_folder_of_the_trainer_has_step_and_schedule(tmp_path, trained):
    """The layout of transformers.Trainer: see docs of `Trainer.save_model`, `_save_checkpoint`."""
    model, optimizer = trained
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    with open_checkpoint(tmp_path) as found:
        assert found.format == "Transformers Trainer"
        assert (found.step, found.schedulers) == (3, {"lr_scheduler": {"last_epoch": 3}})
        assert [len(g.keys) for one in found.optimizers for g in one.groups] == [5]
    (tmp_path / "trainer_state.json").write_text('{"global_step": "x"}')
    with pytest.raises(BrokenCheckpoint, match="global_step is 'x'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("names", "bias", "said"),
    [
        (["a.lora_A.default.weight", "b.trainable_tokens_delta.default"], "none", "tokens_delta"),
        (["a.ia3_l.default"], "none", "ia3_l"),
        (["a.lora_A.default.weight", "a.bias"], "all", "bias='all'"),
        (["a.lora_A.default.weight", "a.bias"], "none", None),
        (["a.lora_A.weight"], "none", None),
    ],
)
def test_adapters_are_exported_as_a_whole_or_refused(tmp_path, names, bias, said):
    memory = MemoryReader()
    for name in names:
        memory.add(f"base_model.model.{name}", torch.ones(2))
    config = {"adapter_config.json": json.dumps({"bias": bias}).encode()}
    job = exporting.Export(Checkpoint("test", tmp_path, memory, config=config), tmp_path / "out")
    if said is None:
        kept = exporting.check(job, "transformers").checkpoint.model.specs
        assert list(kept) == ["base_model.model.a.lora_A.weight"]
    else:
        with pytest.raises(CheckpointError, match=said):
            exporting.check(job, "transformers")
