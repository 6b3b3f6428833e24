"""DeepSpeed checkpoints as files: reads and refusals, and proof that their code never runs."""

import pickle
import shutil
import struct
import zipfile

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from shardwise.checkpoint.commands import checkpoint, zero_to_fp32
from shardwise.checkpoint.deepspeed import inert
from shardwise.checkpoint.deepspeed.as_checkpoint import client_state, fields_of, opened
from shardwise.checkpoint.deepspeed.flat_groups import Cut, each_by_itself, end_to_end
from shardwise.checkpoint.deepspeed.folders import find
from shardwise.checkpoint.formats.recognise import open_checkpoint
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch
from tests import deepspeed_checkpoints as small


def test_end_to_end():
    shapes = {"a": (2, 3), "b": (), "c": (5,)}
    assert end_to_end(shapes, 7, 2) == {
        "a": [Cut(0, 0, 0, 6)],
        "b": [Cut(0, 6, 0, 1)],
        "c": [Cut(1, 0, 0, 5)],
    }
    assert end_to_end(shapes, 4, 3, [2, 0, 0]) == {
        "a": [Cut(0, 0, 0, 4), Cut(1, 0, 4, 2)],
        "b": [Cut(2, 0, 0, 1)],
        "c": [Cut(2, 1, 0, 3)],
    }


def test_each_by_itself():
    assert each_by_itself({"a": (2, 3), "b": (), "c": (5,)}, 2) == {
        "a": [Cut(0, 0, 0, 3), Cut(1, 0, 3, 3)],
        "b": [Cut(0, 3, 0, 1)],
        "c": [Cut(0, 4, 0, 3), Cut(1, 4, 3, 2)],
    }


# -- nothing of theirs runs ------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return eval, ("__import__('pathlib').Path('ran').touch()",)


class Record:
    def __init__(self):
        self.rate = 0.5


def test_loading_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.pt"
    torch.save({"a": Evil(), "b": Record(), "c": torch.ones(3), "d": {1}, "e": b"\xff"}, path)
    loaded = inert.load(path)
    assert not (tmp_path / "ran").exists()
    assert loaded["a"].kind == "builtins.eval"
    assert isinstance(loaded["b"], inert.Inert)
    assert loaded["b"].rate == 0.5
    assert loaded["c"].tolist() == [1, 1, 1]
    assert loaded["d"] == {1}
    assert loaded["e"] == b"\xff"


NOTHING = b"}X\x08\x00\x00\x00functionNs"
"""Return a pickle with a map that sets `function` to None."""


@pytest.mark.parametrize("state", [NOTHING, b"(N" + NOTHING + b"t", b"(N" + NOTHING + b"l"])
def test_builders_cannot_be_changed(tmp_path, state):
    path = tmp_path / "x.pt"
    before = inert.BUILDERS["torch._utils", "_rebuild_tensor_v2"].function
    code = b"ctorch._utils\n_rebuild_tensor_v2\n" + state + b"b."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + code)
        archive.writestr("x/version", "3\n")
        archive.writestr("x/byteorder", "little")
    with pytest.raises(BrokenCheckpoint, match="cannot be read"):
        inert.load(path)
    assert inert.BUILDERS["torch._utils", "_rebuild_tensor_v2"].function is before


def test_numbers_of_numpy(tmp_path):
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "x.pt"
    torch.save({"best": numpy.float64(0.25), "count": numpy.int64(-3)}, path)
    assert inert.load(path) == {"best": 0.25, "count": -3}


@pytest.mark.parametrize("content", [b"", b"no zip", pickle.dumps(3)])
def test_files_that_torch_did_not_write_are_refused(tmp_path, content):
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match="truncated, or was not written by"):
        inert.load(path)


def test_torchscript_that_zipfile_does_not_see(tmp_path, monkeypatch):
    """torch finds the directory through the end record; zipfile takes the one right before it."""
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("it runs as TorchScript"))
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/constants.pkl", pickle.dumps(()))
        start = archive.start_dir
    data = path.read_bytes()
    end = data.rindex(b"PK\5\6")
    directory = data[start:end]
    seen = directory.replace(b"constants.pkl", b"constantz.pkl")
    path.write_bytes(data[:end] + seen + data[end:])
    with zipfile.ZipFile(path) as archive:
        assert not any("constants.pkl" in name for name in archive.namelist())
    with pytest.raises(BrokenCheckpoint, match="was not written by"):
        inert.load(path)


# -- a save ----------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    def make(name):
        shutil.copytree(small.HERE / name, tmp_path / name)
        return tmp_path / name

    return make


def named(model, optimizer):
    """Return all names of each tensor, keyed by the first, and the names by optimizer group."""
    names, first = {}, {}
    for name, value in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        names.setdefault(first.setdefault(id(value), name), []).append(name)
    return names, [[first[id(p)] for p in g["params"]] for g in optimizer.param_groups]


@pytest.mark.parametrize("name", ["stage1", "stage2", "stage2-round-robin", "stage3-groups"])
def test_stages_hold_the_same(name):
    """The parts that each stage saved add up to the full tensors of stage 0."""
    model = small.made()
    names, groups = named(model, small.optimizer_of(model))
    whole, expected = fields_of(opened(small.HERE / "stage0"), names, groups)
    sets, fields = fields_of(opened(small.HERE / name), names, groups)
    assert sets.keys() == whole.keys()
    for kind, tensors in whole.items():
        assert sets[kind].specs == tensors.specs
        for each in tensors.specs:
            torch.testing.assert_close(
                sets[kind].whole(each), tensors.whole(each), rtol=2e-5, atol=1e-6
            )
    assert {n: set(e) for n, e in fields["state"].items()} == {
        n: {"step"} for group in groups for n in group
    }
    theirs, ours = fields["optimizers"][0], expected["optimizers"][0]
    assert [set(g["parameters"]) for g in theirs["groups"]] == [set(g) for g in groups]
    assert [g["options"] for g in theirs["groups"]] == [g["options"] for g in ours["groups"]]
    assert fields["step"] == small.STEPS


def test_other_groups_than_in_a_stage_0_save_are_refused():
    model = small.made()
    names, groups = named(model, small.optimizer_of(model))
    with pytest.raises(CheckpointMismatch, match=r"groups of \[3, 4\].*here they have \[7\]"):
        fields_of(opened(small.HERE / "stage0"), names, [[*groups[0], *groups[1]]])
    with pytest.raises(CheckpointMismatch, match=r"at the position of out\.weight"):
        fields_of(opened(small.HERE / "stage0"), names, [groups[0][::-1], groups[1]])


def test_client_state():
    assert client_state(small.HERE / "stage2") == {"epoch": 1, "best": 0.5, "words": ("a",)}
    with pytest.raises(CheckpointError, match="is not a DeepSpeed checkpoint"):
        client_state(small.HERE)


# -- refusals --------------------------------------------------------------------------------


def test_a_missing_rank_file_is_named(copy):
    folder = copy("stage2")
    (folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(BrokenCheckpoint, match="lacks zero_pp_rank_1_mp_rank_00_optim_states"):
        opened(folder)


def test_a_missing_last_rank_file_is_noticed(copy):
    folder = copy("stage2")
    (folder / "global_step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(BrokenCheckpoint, match="saved by 3 ranks but has 2 files"):
        opened(folder)


def test_missing_optimizer_files_are_noticed(copy):
    folder = copy("stage1")
    for path in folder.glob("*/*_optim_states.pt"):
        path.unlink()
    with pytest.raises(BrokenCheckpoint, match="saved with ZeRO, but all its"):
        opened(folder)


def test_a_missing_model_file_is_named(copy):
    folder = copy("stage2")
    (folder / "global_step3" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"lacks its model_states\.pt"):
        opened(folder)


def test_a_truncated_file_is_named(copy):
    folder = copy("stage3")
    path = folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(BrokenCheckpoint, match=r"rank_1_mp_rank_00_optim_states.pt is truncated"):
        opened(folder)


def test_a_changed_byte_is_found(copy):
    folder = copy("stage3")
    path = folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        at = next(e.header_offset for e in archive.infolist() if "/data/3" in e.filename)
    name, extra = struct.unpack("<HH", data[at + 26 : at + 30])
    data[at + 30 + name + extra] ^= 1
    path.write_bytes(data)
    with open_checkpoint(folder) as found:
        (damage,) = found.damages(0, 1)
    assert "changed after it was written" in damage or "cannot be read" in damage
    result = CliRunner().invoke(checkpoint, ["verify", str(folder)], standalone_mode=False)
    assert result.return_value == 1
    assert "1 changed" in result.output.replace("\n", " ")


def test_export_uses_the_fp32_masters(tmp_path):
    folder = small.HERE / "stage2-bf16"
    for words, dtype in (((), torch.float32), (("--dtype", "bf16"), torch.bfloat16)):
        to = tmp_path / f"{len(words)}.safetensors"
        told = CliRunner().invoke(checkpoint, ["export", str(folder), str(to), *words])
        assert told.exit_code == 0, told.output
        save = opened(folder)
        wanted = save.fp32() if dtype == torch.float32 else save.model
        with open_checkpoint(to) as found:
            for name in found.model.specs:
                value, expected = found.model.whole(name), wanted.whole(name)
                if value.is_floating_point():
                    assert value.dtype == dtype
                    expected = expected.to(dtype)
                assert torch.equal(value, expected), name
    masters, weights = save.fp32(), save.model
    assert any(
        not torch.equal(masters.whole(name), weights.whole(name).to(masters.whole(name).dtype))
        for name in masters.specs
    )


def test_an_unknown_stage_is_refused(copy):
    folder = copy("stage1")
    for path in folder.glob("*/*_optim_states.pt"):
        saved = {"optimizer_state_dict": {"zero_stage": 4, "partition_count": [2, 2]}}
        torch.save(saved, path)
    with pytest.raises(CheckpointError, match="ZeRO stage 4, but only 0 to 3"):
        opened(folder)


SHAPES = [{"first.weight": (2, 3)}]
FLAT = {"zero_stage": 2, "partition_count": [1], "group_paddings": [0]}
ODD = {
    "shapes that are numbers": ({"module": {}, "param_shapes": [{"a": 3}]}, FLAT),
    "shapes of words": ({"module": {}, "param_shapes": [{"a": ("x",)}]}, FLAT),
    "a count that is a word": ({"module": {}, "param_shapes": SHAPES}, {"partition_count": "x"}),
    "flat groups that are a number": (
        {"module": {}, "param_shapes": SHAPES},
        FLAT | {"single_partition_of_fp32_groups": 3},
    ),
    "a group without parameters": (
        {"module": {"first.weight": torch.zeros(2, 3)}, "param_shapes": SHAPES},
        FLAT
        | {
            "single_partition_of_fp32_groups": [torch.zeros(6)],
            "base_optimizer_state": {"param_groups": [{"lr": 1}], "state": {}},
        },
    ),
    "groups that are a number": (
        {"module": {"first.weight": torch.zeros(2, 3)}, "param_shapes": SHAPES},
        FLAT | {"base_optimizer_state": {"param_groups": 3, "state": {}}},
    ),
    "buffers of stage 3 that are not there": (
        {"module": {}, "param_shapes": SHAPES, "buffer_names": ["gone"]},
        {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": [torch.zeros(6)]},
    ),
    "names that are a number": (
        {"module": {}, "param_shapes": SHAPES, "buffer_names": 5},
        {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": [torch.zeros(6)]},
    ),
}
"""Odd contents of intact files: model and optimizer of one rank."""


@pytest.mark.parametrize("name", ODD)
def test_odd_contents_of_intact_files_are_refused(tmp_path, name):
    model, saved = ODD[name]
    stage_3 = "zero_pp_rank_0_" if saved.get("zero_stage") == 3 else ""
    torch.save(model, tmp_path / f"{stage_3}mp_rank_00_model_states.pt")
    torch.save(
        {"optimizer_state_dict": saved}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        fields_of(opened(tmp_path), {"first.weight": ["first.weight"]}, [["first.weight"]])


def test_a_universal_checkpoint_is_refused(copy):
    folder = copy("stage0")
    (folder / "global_step3" / "zero" / "first.weight").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is a universal checkpoint of DeepSpeed"):
        opened(folder)


def test_find_selects_the_tag(copy):
    folder = copy("stage1")
    assert find(folder) == find(folder / "global_step3") == folder / "global_step3"
    (folder / "latest").unlink()
    assert find(folder) == folder / "global_step3"
    shutil.copytree(folder / "global_step3", folder / "best")
    with pytest.raises(CheckpointError, match=r"several DeepSpeed saves \(best, global_step3\)"):
        find(folder)
    (folder / "latest").write_text("best\n")
    assert find(folder) == folder / "best"
    (folder / "latest").write_text("global_step9")
    (folder / "zero_to_fp32.py").touch()
    with pytest.raises(BrokenCheckpoint, match="names global_step9, which is not in"):
        find(folder)
    assert find(folder.parent) is None


@pytest.mark.parametrize(
    "name",
    [
        "layer_00-model_00-model_states.pt",
        "mp_rank_01_model_states.pt",
        "layer_0_expert_1_mp_rank_00_model_states.pt",
    ],
)
def test_other_parallelism_is_refused(copy, name):
    folder = copy("stage1")
    (folder / "global_step3" / name).touch()
    with pytest.raises(CheckpointError, match="pipeline, tensor or expert parallelism"):
        opened(folder)


# -- the command -----------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["m.safetensors", "m.bin", "folder"])
@pytest.mark.parametrize("name", ["stage0", "stage2", "stage3"])
def test_zero_to_fp32(tmp_path, name, ending):
    result = CliRunner().invoke(zero_to_fp32, [str(small.HERE / name), str(tmp_path / ending)])
    assert result.exit_code == 0, result.output
    out = tmp_path / ("folder/model.safetensors" if ending == "folder" else ending)
    assert f"stage {name[-1]} on" in result.output
    assert sorted(tmp_path.rglob("*.*")) == [out]
    model = small.made()
    if out.suffix == ".bin":
        model.load_state_dict(torch.load(out, weights_only=True))
    else:
        safetensors.torch.load_model(model, out)
    save = opened(small.HERE / name)
    for key, value in model.state_dict().items():
        assert torch.equal(value, save.model.whole(key)), key


def test_zero_to_fp32_refuses(tmp_path):
    runner = CliRunner()
    result = runner.invoke(zero_to_fp32, [str(tmp_path), str(tmp_path / "m.bin")])
    assert result.exit_code
    assert "is not a DeepSpeed checkpoint" in result.output
    result = runner.invoke(zero_to_fp32, [str(small.HERE / "stage2"), str(tmp_path / "m.gguf")])
    assert result.exit_code
    assert "ends in .gguf" in result.output


def test_checkpoint_commands_take_deepspeed_checkpoints(tmp_path):
    runner = CliRunner()
    said = runner.invoke(checkpoint, ["inspect", str(small.HERE / "stage3")]).output
    assert "DeepSpeed 0.19.8, ZeRO stage 3 on 2 ranks, step 3" in said
    assert "epoch" in said
    said = runner.invoke(checkpoint, ["verify", str(small.HERE / "stage3")]).output
    assert "4 files, all as written" in said.replace("\n", " ")
    said = runner.invoke(
        checkpoint, ["export", str(small.HERE / "stage3"), str(tmp_path / "m.safetensors")]
    ).output
    assert "11 tensors in fp32" in said
