"""Export of one plain file: complete or absent, after any interruption."""

import fcntl
import os
import signal

import pytest
import safetensors.torch
import torch

from shardwise.checkpoint import export
from shardwise.checkpoint.export import write_tensors
from shardwise.errors import CheckpointError
from tests.disk import refuse_nameless


@pytest.fixture(params=["nameless", "named"])
def how(request, monkeypatch):
    """Run each test on a file system with files without names, and on one without."""
    if request.param == "named":
        refuse_nameless(monkeypatch)
    return request.param


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_it_takes_the_place_of_an_older_one(tmp_path, how, ending):
    path = tmp_path / f"m.{ending}"
    values = {
        "b": torch.arange(6.0).view(2, 3).t(), "a": torch.tensor(3), "empty": torch.empty(0, 2),
        "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16), "yes": torch.tensor([True]),
    }  # fmt: skip
    mask = os.umask(0o027)
    try:
        for number in range(2):
            write_tensors(values | {"n": torch.tensor(number)}, {"twin": "b"}, {}, path)
    finally:
        os.umask(mask)
    read = torch.load(path) if ending == "pt" else safetensors.torch.load_file(path)
    for name, value in (values | {"n": torch.tensor(1)}).items():
        assert torch.equal(read[name], value)
        assert read[name].dtype == value.dtype
    assert os.listdir(tmp_path) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_failed_export_keeps_the_old_file(tmp_path, how):
    path = tmp_path / "m.safetensors"
    write_tensors({"a": torch.ones(2)}, {}, {}, path)
    with pytest.raises(CheckpointError, match="cannot hold tensors of"):
        write_tensors({"a": torch.ones(2, dtype=torch.complex128)}, {}, {}, path)
    assert safetensors.torch.load_file(path)["a"].tolist() == [1, 1]
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_the_next_export_removes_the_remains_of_a_killed_one(tmp_path, how):
    path = tmp_path / "m.safetensors"
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with export.replace_when_complete(path) as file:
                file.write(bytes(10**6))
                file.flush()
                os.write(told, b"1")
                signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    assert os.read(heard, 1)
    write_tensors({"a": torch.ones(2)}, {}, {}, path)
    left = len(list(tmp_path.glob(".*.partial")))
    assert left == (how == "named"), "one that is being written is left alone"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    write_tensors({"a": torch.ones(2)}, {}, {}, path)
    assert os.listdir(tmp_path) == ["m.safetensors"]
    os.close(heard)


def test_a_partial_file_with_a_lock_is_kept(tmp_path):
    """A partial file without a lock belongs to a killed process."""
    aside = tmp_path / ".m.pt.123.partial"
    other = tmp_path / ".m.pt.x.partial"
    for file in (aside, other):
        file.touch()
    with aside.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_tensors({"a": torch.ones(2)}, {}, {}, tmp_path / "m.pt")
        assert aside.exists()
    write_tensors({"a": torch.ones(2)}, {}, {}, tmp_path / "m.pt")
    assert sorted(os.listdir(tmp_path)) == [".m.pt.x.partial", "m.pt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_torch_save_on_a_full_disk_raises_the_error_of_the_disk():
    """The error must not be torch's own error about positions in its file."""
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(OSError, match="No space left"),
        export.disk_errors(full) as file,
    ):
        torch.save({"weight": torch.ones(100_000)}, file)
