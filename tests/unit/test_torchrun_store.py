"""`shardwise run --survive` in torchrun, which starts the command on each host."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.cli import main as cli
from shardwise.errors import LaunchError
from shardwise.net import torchrun_store
from shardwise.net.identity import Identity

VARIABLES = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
}
"""Of the second of two hosts, with one command on each."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    """Start a store as torchrun does, and set its variables."""
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(made.port)}
    for name, value in (VARIABLES | place).items():
        monkeypatch.setenv(name, value)
    return made


def identity(rank: int) -> Identity:
    return Identity(launcher="torchrun", rank=rank, size=2, address="node1")


@pytest.mark.usefixtures("store")
def test_rank_0_sends_a_free_port_until_it_ends() -> None:
    with torchrun_store.shared_port(identity(0), 10) as port:
        assert port > 0
        with torchrun_store.shared_port(identity(1), 10) as received:
            assert received == port
    with (
        pytest.raises(LaunchError, match=r"on the host of rank 0 \(node1\) did not send its port"),
        torchrun_store.shared_port(identity(1), 0.2),
    ):
        pass


@pytest.mark.parametrize(
    ("changed", "words", "message"),
    [
        (
            {"LOCAL_WORLD_SIZE": "2"},
            [],
            "torchrun --nproc-per-node 1 -m shardwise run --nproc-per-node 2 --survive 1 train.py",
        ),
        (
            {"TORCHELASTIC_MAX_RESTARTS": "3"},
            [],
            "--max-restarts 0 for torchrun, and --restarts 3 after shardwise run",
        ),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, [], "shardwise run was started 2 times"),
        ({}, [], "torchrun was started 2 times on this host (MASTER_ADDR=127.0.0.1)"),
        ({}, ["--node-rank", "0"], "--node-rank needs --nnodes"),
        ({}, ["-H", "node1"], "shardwise run was started 2 times"),
    ],
)
@pytest.mark.usefixtures("store")
def test_what_torchrun_cannot_start_is_refused(
    changed: dict[str, str],
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").touch()
    assert cli.main(["run", "--survive", "1", *words, str(tmp_path / "train.py")]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
