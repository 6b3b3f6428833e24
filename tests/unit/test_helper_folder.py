"""The sockets of multiprocessing's processes are in the run's folder."""

import multiprocessing
import socket
import tempfile
from multiprocessing import process, util
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from shardwise.net import helper_folder


@pytest.fixture
def config(monkeypatch):
    """Return this process's configuration in multiprocessing, as in a new process."""
    new = {**process.current_process()._config}
    new.pop("tempdir", None)
    monkeypatch.setattr(process.current_process(), "_config", new)
    return new


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_use_the_run_folder(config, monkeypatch, method):
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("SHARDWISE_LAUNCH_REPORTS", folder)
        helper_folder.use_run_folder()
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(util.get_temp_dir) == str(Path(folder, "mp"))


@pytest.mark.parametrize("excess", [0, 1])
def test_a_path_that_is_too_long_for_a_socket_is_not_used(config, tmp_path, monkeypatch, excess):
    length = 107 - len("/mp/listener-XXXXXXXX") + excess
    long = tmp_path / ("x" * (length - len(str(tmp_path)) - 1))
    long.mkdir()
    monkeypatch.setenv("SHARDWISE_LAUNCH_REPORTS", str(long))
    helper_folder.use_run_folder()
    assert ("tempdir" in config) == (excess == 0)
    if excess == 0:
        Listener(family="AF_UNIX").close()
    else:
        with pytest.raises(OSError, match="too long"), socket.socket(socket.AF_UNIX) as made:
            made.bind(f"{long}/mp/listener-XXXXXXXX")


def test_a_folder_that_is_set_stays(config, tmp_path, monkeypatch):
    config["tempdir"] = "/mine"
    monkeypatch.setenv("SHARDWISE_LAUNCH_REPORTS", str(tmp_path))
    helper_folder.use_run_folder()
    assert config["tempdir"] == "/mine"
    assert list(tmp_path.iterdir()) == []
