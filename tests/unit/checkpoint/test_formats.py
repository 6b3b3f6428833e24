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
from shardwise.checkpoint.formats.comparing import fingerprints
from shardwise.checkpoint.formats.recognise import open_checkpoint
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
        (("export", "SOURCE", "full"), "not an empty folder"),
        (("export", "SOURCE", "out", "--dtype", "int4"), "write one of fp32"),
        (("export", "SOURCE", "out", "--average"), "no moving average"),
        (("import", "SOURCE", "full/file"), "file is in the way"),
        (("show", "nothing"), "does not exist"),
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
    with pytest.raises(CheckpointError, match="could run code"):
        open_checkpoint(tmp_path / "a.pt")
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
        ({"checkpoint_metadata.json": "{}", "model/x": ""}, "of nanotron"),
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


def test_weights_of_megatron_core_are_read(tmp_path):
    """Its documented layout: DCP with stacked layers, and optimizer buffers next to them."""
    weight = torch.randn(2, 6, 4)
    state = {
        "decoder.layers.self_attention.linear_qkv.weight": weight,
        "chained_0.optimizer.state.exp_avg.decoder.x": torch.ones(3),
        "rng_state": torch.ones(1),
    }
    foreign.save_dcp(state, tmp_path / "iter")
    (tmp_path / "iter" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"iteration": 10}, tmp_path / "iter" / "common.pt")
    with open_checkpoint(tmp_path / "iter") as found:
        assert found.format == "Megatron-Core"
        assert list(found.model.specs) == ["decoder.layers.self_attention.linear_qkv.weight"]
        assert "only its weights are read" in found.notes[0]


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
