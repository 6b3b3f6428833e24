"""Which checkpoints are complete after a save was killed at any moment, and the commands."""

import errno
import itertools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shardwise.checkpoint import document, reader
from shardwise.checkpoint.atomic_folders import (
    Draft,
    StepFolder,
    complete,
    end_removals,
    incomplete_checkpoints,
    lacks_document,
)
from shardwise.checkpoint.commands import checkpoint
from shardwise.checkpoint.export import write_model
from shardwise.checkpoint.format import TensorSpec, lay_out
from shardwise.checkpoint.formats.recognise import FOREIGN, open_checkpoint
from shardwise.checkpoint.writer import Writer, create
from shardwise.cli.main import main
from shardwise.errors import BrokenCheckpoint, CheckpointError
from shardwise.layout.byte_ranges import Extent
from tests.unit.checkpoint.test_document import FIELDS


def saved(folder: Path, step: int, keep: int | None = None, mark: str = "") -> None:
    draft = Draft(folder, step, 0)
    draft.begin()
    draft.finish({"checkpoint.json": mark.encode()})
    if keep is not None:
        draft.prune(keep)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_only_folders_with_a_document_are_complete(tmp_path):
    assert complete(tmp_path / "none") == []
    saved(tmp_path, 9)
    saved(tmp_path, 10)
    Draft(tmp_path, 11, 0).begin()
    (tmp_path / "step-12").mkdir()  # empty
    (tmp_path / "step-x").mkdir()
    assert complete(tmp_path) == [
        StepFolder(9, tmp_path / "step-9"),
        StepFolder(10, tmp_path / "step-10"),
    ]
    saved(tmp_path, 13)
    assert names(tmp_path) == ["step-10", "step-12", "step-13", "step-9", "step-x"]


def test_prune_keeps_the_newest_and_later_steps(tmp_path):
    for step in (1, 2, 3, 9):
        saved(tmp_path, step)
    saved(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-3", "step-4", "step-9"]


def test_a_dangling_link_as_folder_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for folder in (tmp_path / "link", tmp_path / "link" / "deeper"):
        with pytest.raises((FileExistsError, NotADirectoryError)) as caught:
            Draft(folder, 5, 0).begin()
        said = Draft(folder, 5, 0).describe_error(caught.value)
        assert f"{tmp_path}/link links to {tmp_path}/absent, which does not exist" in said
        assert "in the way" not in said


def test_a_file_in_the_way_is_not_reported_as_a_full_disk(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises((FileExistsError, NotADirectoryError)) as caught:
            Draft(folder, 5, 0).begin()
        said = Draft(folder, 5, 0).describe_error(caught.value)
        assert "A file is in the way: name a folder" in said
    Draft(tmp_path, 5, 0).begin()
    with pytest.raises(FileExistsError) as caught:
        (tmp_path / ".step-5.partial").mkdir()
    assert "Another run may be saving there" in Draft(tmp_path, 5, 0).describe_error(caught.value)
    denied = Draft(tmp_path, 5, 7).describe_error(PermissionError(errno.EACCES, "no", "it"))
    assert denied.startswith(
        "The checkpoint of step 5 was not written: no (it). Name a folder that"
    )
    full = Draft(tmp_path, 5, 7).describe_error(OSError(errno.ENOSPC, "full"))
    assert "It needs 7 bytes, and " in full


def test_a_save_succeeds_although_old_folders_cannot_be_removed(tmp_path, monkeypatch):
    for step in (1, 2):
        saved(tmp_path, step)
    Draft(tmp_path, 3, 0).begin()  # the partial save of a killed run
    (tmp_path / ".step-3.partial" / "x").touch()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", not_empty)
        for step in (3, 3, 4, 5):
            draft = Draft(tmp_path, step, 0)
            draft.begin()
            draft.finish({"checkpoint.json": b"{}"})
            draft.prune(1)
            assert all(
                "could not be removed (Directory not empty). The next" in w for w in draft.warnings
            )
            assert draft.warnings
            assert [found.step for found in complete(tmp_path)] == [step]
    saved(tmp_path, 6)
    assert names(tmp_path) == ["step-5", "step-6"], "now all of it could be removed"


def not_empty(path):
    raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))


def test_removing_a_link_keeps_its_target(tmp_path):
    saved(tmp_path / "far", 1)
    folder = tmp_path / "near"
    folder.mkdir()
    (folder / "step-1").symlink_to(tmp_path / "far" / "step-1")
    (folder / ".step-0.gone").symlink_to(tmp_path / "far")
    for step in (2, 3):
        saved(folder, step, keep=1)
        assert names(folder) == [f"step-{step}"]
    assert names(tmp_path / "far" / "step-1") == ["checkpoint.json"]


def test_interrupted_removals_are_finished(tmp_path):
    saved(tmp_path, 3)
    for name in (".step-1.gone", ".step-2.gone.1", ".step-4.partial", ".step-5.replaced"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step-1.gone" / "model.safetensors").touch()
    end_removals(tmp_path)
    assert names(tmp_path) == [".step-4.partial", ".step-5.replaced", "step-3"]
    end_removals(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["link", "file"])
def test_remains_with_the_name_of_a_new_draft_are_replaced(tmp_path, kind):
    path = tmp_path / "step-1"
    path.symlink_to("nowhere") if kind == "link" else path.touch()
    assert complete(tmp_path) == []
    assert incomplete_checkpoints(tmp_path) == [StepFolder(1, path)]
    saved(tmp_path, 1)
    assert complete(tmp_path) == [StepFolder(1, path)]
    assert names(tmp_path) == ["step-1"]


def test_checkpoints_without_a_document_are_recognised(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "checkpoint.json").unlink()
        assert not lacks_document(tmp_path / f"step-{step}")
    (tmp_path / "step-2" / "model.safetensors").touch()
    assert incomplete_checkpoints(tmp_path) == [StepFolder(2, tmp_path / "step-2")], (
        "an empty folder is nothing"
    )
    assert lacks_document(tmp_path / "step-2")
    os.mkfifo(tmp_path / "step-1" / "checkpoint.json")
    assert [found.step for found in incomplete_checkpoints(tmp_path)] == [1, 2]
    assert not lacks_document(tmp_path / "step-1"), "reading it tells more"
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").touch()
    assert not lacks_document(tmp_path / "hub"), "as Hugging Face writes them"


def test_saving_the_same_step_again_replaces_it(tmp_path):
    saved(tmp_path, 5, mark="old")
    saved(tmp_path, 5, mark="new")
    assert names(tmp_path) == ["step-5"]
    assert (tmp_path / "step-5/checkpoint.json").read_text() == "new"


def test_killed_between_the_two_renames(tmp_path):
    saved(tmp_path, 5, mark="old")
    (tmp_path / "step-5").rename(tmp_path / ".step-5.replaced")
    assert complete(tmp_path) == [StepFolder(5, tmp_path / ".step-5.replaced")]
    saved(tmp_path, 6)
    assert names(tmp_path) == ["step-5", "step-6"]


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def whole_save(folder: Path, step: int, value: int) -> None:
    """Save one tensor filled with `value`, in the way of an engine; keep the newest two."""
    draft = Draft(folder, step, 3)
    sets = {"model": lay_out("model", [TensorSpec("w", "U8", (3,))], limit=9, aliases={})}
    draft.begin()
    create(draft.path, sets["model"])
    writer = Writer(draft.path, sets)
    writer.write("model", [Extent("w", 0, 3, 0)], memoryview(bytes([value] * 3)))
    try:
        writer.finish()
    finally:
        writer.close()
    draft.finish({"model.safetensors.index.json": b"{}", "checkpoint.json": b"{}"})
    draft.prune(2)


def killed_at(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise Killed at call number `moment` of those that change the disk."""
    calls = itertools.count()

    def watched(real):
        def call(*args, **options):
            if next(calls) == moment:
                raise Killed
            return real(*args, **options)

        return call

    for name in ("pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))


@pytest.mark.parametrize("step", [3, 4])
def test_killed_at_any_moment(tmp_path, step):
    """Save step 3, which exists, or step 4: the newest checkpoint is intact, old or new."""
    for moment in range(1000):
        folder = tmp_path / str(moment)
        for earlier in (1, 2, 3):
            whole_save(folder, earlier, earlier)
        with pytest.MonkeyPatch.context() as patch:
            killed_at(moment, patch)
            try:
                whole_save(folder, step, 9)
                break
            except Killed:
                pass
        newest = complete(folder)[-1]
        held = reader.open_set(newest.path, ["model.safetensors"]).whole("w").tolist()
        assert held in ([3, 3, 3], [9, 9, 9])
        assert held == [3, 3, 3] or newest.step == step
        whole_save(folder, 5, 5)
        assert [found.step for found in complete(folder)][-1:] == [5]
        assert not [name for name in names(folder) if name.startswith(".")]
    assert moment > 15


def test_a_disk_that_is_too_small(tmp_path):
    draft = Draft(tmp_path / "new" / "er", 1, 10**18)
    with pytest.raises(OSError, match="No space left") as raised:
        draft.begin()
    said = draft.describe_error(raised.value)
    assert re.search(r"needs 1,000,000,000,000,000,000 bytes, and [\d,]+ are free", said)
    assert names(tmp_path / "new" / "er") == []


def test_a_file_system_without_writes_at_an_offset(tmp_path, monkeypatch):
    """Simulates an object store, where files can only be appended to."""
    real = os.pwrite

    def pwrite(fd, data, offset):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path / "store")):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    draft = Draft(tmp_path / "store", 7, 0)
    draft.begin()
    assert draft.path.parent == tmp_path
    sets = {"model": lay_out("model", [TensorSpec("w", "U8", (3,))], limit=9, aliases={})}
    create(draft.path, sets["model"])
    writer = Writer(draft.path, sets)
    writer.write("model", [Extent("w", 0, 3, 0)], memoryview(b"abc"))
    assert [part.nbytes for part in writer.finish()["model", "w"]] == [3]
    draft.finish({"checkpoint.json": b"{}"})
    assert names(tmp_path) == ["store"]
    assert names(tmp_path / "store/step-7") == ["checkpoint.json", "model.safetensors"]
    assert open_checkpoint(tmp_path / "store/step-7", FOREIGN).model.whole("w").tolist() == [
        97,
        98,
        99,
    ]


# -- what stands in one -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", ".", 3])
def test_file_names_must_stay_inside_the_folder(tmp_path, name):
    with pytest.raises(BrokenCheckpoint, match="not a file in the same folder"):
        reader.open_set(tmp_path, [name])
    index = {"weight_map": {"w": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenCheckpoint, match="not a file in the same folder"):
        open_checkpoint(tmp_path, FOREIGN)


def test_a_file_of_a_split_set_is_missing(tmp_path):
    files = lay_out("model", [TensorSpec(n, "F32", (2,)) for n in "ab"], limit=8, aliases={})
    create(tmp_path, files)
    index = {"weight_map": {"a": files[0].name, "b": files[1].name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(open_checkpoint(tmp_path, FOREIGN).model.whole("b"), torch.zeros(2))
    (tmp_path / files[1].name).unlink()
    with pytest.raises(BrokenCheckpoint, match=r"model-00002-of-00002\.safetensors.*No such file"):
        open_checkpoint(tmp_path, FOREIGN)


@pytest.mark.parametrize("name", ["", "nothing.safetensors", "model.onnx"])
def test_nothing_to_load(tmp_path, name):
    (tmp_path / "model.onnx").touch()
    with pytest.raises(CheckpointError, match=r"contains no|does not exist|ends in \.onnx"):
        open_checkpoint(tmp_path / name, FOREIGN)


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path):
    """Return a folder with one checkpoint of one tensor of zeros."""
    folder = tmp_path / "run"
    draft = Draft(folder, 3, 0)
    files = lay_out("model", [TensorSpec("w", "F32", (2, 3))], limit=10**9, aliases={"twin": "w"})
    draft.begin()
    create(draft.path, files)
    sums = {"model": {"w": reader.open_set(draft.path, ["model.safetensors"]).checksum("w")}}
    draft.finish({"checkpoint.json": document.dump(FIELDS | {"checksums": sums})})
    return folder


def ran(*words):
    done = CliRunner().invoke(checkpoint, [str(word) for word in words], standalone_mode=False)
    return done.return_value, done.output, done.exception


def test_without_a_command_the_help_is_shown(capsys):
    assert main(["checkpoint"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("Usage: shardwise checkpoint [OPTIONS] COMMAND [ARGS]...")
    names = ["accept", "diff", "export", "fingerprint", "import", "inspect", "show", "verify"]
    lines = [line.split(maxsplit=1) for line in told.partition("Commands:\n")[2].splitlines()]
    assert [name for name, help in lines if help.endswith(".")] == names


def test_inspect(whole):
    code, told, _ = ran("inspect", whole)
    assert code == 0
    assert all(word in told for word in ("step  3", "SGD", "2 x 3", "1 tensors, 24 bytes"))


def test_verify(whole):
    code, told, _ = ran("verify", whole)
    assert (code, "all as written" in told) == (0, True)
    file = whole / "step-3/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    code, told, _ = ran("verify", whole)
    assert (code, "1 wrong, 0 missing" in told) == (1, True)


def test_accept_takes_an_edit_and_says_what_it_cannot_take(whole):
    """A deliberate edit of a small file counts as written, but a lost file does not."""
    config = whole / "step-3" / "config.json"
    config.write_text('{"edited": true}')
    ran("accept", whole)
    config.write_text('{"edited": 2}')
    code, told, _ = ran("verify", whole)
    assert (code, "changed     config.json" in told) == (1, True)
    code, told, _ = ran("accept", whole)
    assert (code, told.strip()) == (0, f"{whole / 'step-3'}: accepted as it is, at step 3")
    assert ran("verify", whole)[0] == 0
    file = whole / "step-3/model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"\1")
    ran("accept", whole)
    # The values of tensors keep the checksums of the run that wrote them.
    assert ran("verify", whole)[0] == 1
    file.write_bytes(data)
    assert ran("verify", whole)[0] == 0
    assert "nothing" in ran("accept", whole / "nothing")[2].message


def test_verify_reads_the_small_files_too(whole):
    document.accept(whole / "step-3")
    assert ran("verify", whole)[0] == 0
    (whole / "step-3" / "config.json").write_text("{}")
    assert ran("accept", whole)[1].endswith("step-3: accepted as it is, at step 3\n")
    assert ran("verify", whole)[0] == 0
    for damage in (lambda path: path.write_text("[]"), Path.unlink):
        damage(whole / "step-3" / "config.json")
        code, told, _ = ran("verify", whole)
        assert (code, "changed     config.json" in told) == (1, True)


@pytest.mark.parametrize("name", ["[lr=0.1]", "[/x]", "a\x1b[31mb", ":smile:"])
def test_brackets_in_names_are_not_markup(tmp_path, name):
    files = lay_out("model", [TensorSpec(name, "U8", (1,))], limit=9, aliases={})
    folder = tmp_path / "[/x] [bold]"
    draft = Draft(folder, 3, 0)
    draft.begin()
    create(draft.path, files)
    draft.finish(
        {"checkpoint.json": document.dump(FIELDS | {"checksums": {"model": {name: "0" * 8}}})}
    )
    for command, code in (("inspect", 0), ("verify", 1)):
        found, told, error = ran(command, folder)
        assert (found, error) == (code, None)
        assert name.replace("\x1b", "\\x1b") in told
        assert "\x1b" not in told
    assert str(folder) in told


def test_export(whole, tmp_path):
    assert ran("export", whole, tmp_path / "m.pt")[0] == 0
    assert ran("export", whole, tmp_path / "m.safetensors")[0] == 0
    pickled = torch.load(tmp_path / "m.pt", weights_only=True)
    assert sorted(pickled) == ["twin", "w"]
    assert torch.equal(
        open_checkpoint(tmp_path / "m.safetensors", FOREIGN).model.whole("w"), pickled["w"]
    )
    for words in (("m.onnx",), ("m.pt", "--average")):
        _, _, error = ran("export", whole, tmp_path / words[0], *words[1:])
        assert "ends in .onnx" in str(error) or "has no averaged weights" in str(error)


class Counting(torch.nn.Linear):
    """A module whose extra state is not a tensor."""

    seen = 3

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@pytest.mark.parametrize("ending", ["pt", "pth", "bin"])
def test_an_exported_pt_file_has_the_extra_state(tmp_path, ending):
    model, other = Counting(2, 2), Counting(2, 2)
    model.seen = 4
    write_model(model, tmp_path / f"m.{ending}")
    other.load_state_dict(torch.load(tmp_path / f"m.{ending}", weights_only=True))
    assert other.seen == 4
    assert torch.equal(other.weight, model.weight)


def test_export_creates_the_folder(whole, tmp_path):
    for name in ("m.pt", "m.safetensors"):
        assert ran("export", whole, tmp_path / "new" / name / name)[0] == 0
        assert (tmp_path / "new" / name / name).exists()
    (tmp_path / "file").touch()
    _, _, error = ran("export", whole, tmp_path / "file" / "m.pt")
    assert "m.pt cannot be written" in str(error)
    (tmp_path / "folder.pt").mkdir()
    _, _, error = ran("export", whole, tmp_path / "folder.pt")
    assert "folder.pt cannot be written" in str(error)
    assert not list(tmp_path.glob(".*.partial"))


def test_a_missing_step_is_reported_with_the_existing_ones(whole):
    (whole / ".step-9.partial").mkdir()
    (whole / ".step-9.partial" / "checkpoint.json").touch()
    _, _, error = ran("verify", whole / "step-7")
    assert str(error).endswith(f"{whole} contains step-3.")
