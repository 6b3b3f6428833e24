"""Files that are not regular files, and files of other libraries without a model."""

import json
import os
import time

import pytest
import torch

from shardwise.checkpoint import reader
from shardwise.checkpoint.format import MOST_TENSORS, TensorSpec, lay_out
from shardwise.checkpoint.formats import torch_files
from shardwise.checkpoint.formats.recognise import FOREIGN, open_checkpoint
from shardwise.errors import BrokenCheckpoint, CheckpointError


@pytest.mark.parametrize(
    "opened", [reader.SafetensorsReader, lambda paths: torch_files.load(paths[0])]
)
@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a device"])
def test_a_pipe_folder_or_device_is_refused(tmp_path, opened, kind):
    """Opening a pipe without a writer would block forever."""
    path = tmp_path / "m"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(BrokenCheckpoint, match=f"m is {kind}, not a file"):
        opened([path])


def test_an_index_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(BrokenCheckpoint, match=r"index\.json is a pipe"):
        open_checkpoint(tmp_path, FOREIGN)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({0: torch.ones(2)}, "has a tensor under 0, which is not a name"),
        ({"a": torch.eye(2).to_sparse()}, r"has 'a' as a torch\.sparse_coo tensor"),
        ({"a": torch.ones(2, device="meta")}, r"has 'a' as a torch\.strided tensor on meta"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "cannot hold tensors of"),
        ([1, 2], "contains no state_dict"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # since torch 2.15
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # in 2.11
def test_pickles_that_hold_no_model(tmp_path, value, said):
    torch.save(value, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path / "m.pt", FOREIGN)


@pytest.mark.parametrize("cut", [0, 1, 100, 500])
def test_pickles_that_are_not_whole(tmp_path, cut):
    path = tmp_path / "m.pt"
    torch.save({"a": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"m\.pt (cannot be read|is damaged)"):
        open_checkpoint(path, FOREIGN)


def test_a_header_that_is_too_long_is_not_read(tmp_path):
    table = {f"t{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(10)}
    text = json.dumps(table).encode()
    entry = b', "x": {"data_offsets"}'
    text = text[:-1] + entry * 10**6 + b"}"
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    began = time.process_time()
    with pytest.raises(BrokenCheckpoint, match=f"has 1000010 tensors, above {MOST_TENSORS}"):
        open_checkpoint(path, FOREIGN)
    assert time.process_time() - began < 2


def test_more_tensors_than_a_file_may_hold_have_several(monkeypatch):
    monkeypatch.setattr("shardwise.checkpoint.format.MOST_TENSORS", 2)
    files = lay_out("m", [TensorSpec(n, "U8", (1,)) for n in "abcde"], limit=9, aliases={})
    assert [sorted(file.tensors) for file in files] == [["a", "b"], ["c", "d"], ["e"]]
