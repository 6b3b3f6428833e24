"""Command lines of DeepSpeed's launcher become `shardwise run`, or are rejected by flag."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwise.cli import main as cli
from shardwise.errors import LaunchError
from shardwise.launch import deepspeed_flags, start
from shardwise.launch.deepspeed_flags import DeepSpeedCommand, adopts, run_words, with_local_rank
from shardwise.net.hosts import from_file

HOSTS = "node1 slots=4\nalice@node2 slots=4\n"


def translated(hostfile="", **flags):
    hosts = from_file(hostfile, "hostfile") if hostfile else []
    return " ".join(run_words(DeepSpeedCommand(flags, ["train.py"], hosts)))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ""),
        ({"num_gpus": 2}, "-n 2"),
        ({"num_gpus": 2, "master_port": 5000}, "--port 5000 -n 2"),
        ({"master_addr": "127.0.0.1", "num_nodes": 1}, ""),
        ({"include": "localhost:0,1"}, "-n 2"),
        ({"include": "localhost:1,3"}, "-x CUDA_VISIBLE_DEVICES=1,3 -n 2"),
        ({"module": True, "enable_each_rank_log": "logs"}, "-m --log-dir logs"),
        ({"launcher": "PDSH"}, ""),
    ],
)
def test_translates_run_on_this_host(flags, expected):
    assert translated(**flags) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "-H node1:4,alice@node2:4"),
        ({"num_nodes": 1}, "-H node1:4"),
        ({"num_gpus": 2, "ssh_port": 22}, "--ssh-port 22 -H node1:2,alice@node2:2"),
        ({"include": "alice@node2:0"}, None),
        ({"include": "node1:0,1"}, "-H node1:2"),
        ({"include": "node1:1"}, "-x CUDA_VISIBLE_DEVICES=1 -H node1:1"),
        ({"exclude": "node1"}, "-H alice@node2:4"),
        ({"exclude": "node1:2,3"}, "-H node1:2,alice@node2:4"),
        ({"master_addr": "node1"}, "-H node1:4,alice@node2:4"),
        (
            {"no_ssh": True, "node_rank": 1, "master_addr": "node1"},
            "--nnodes 2 --node-rank 1 --rdzv-endpoint node1:29500 --nproc-per-node 4",
        ),
    ],
)
def test_translates_hostfile(flags, expected):
    if expected is None:
        with pytest.raises(LaunchError, match="alice is not in the hostfile"):
            translated(HOSTS, **flags)
    else:
        assert translated(HOSTS, **flags) == expected


def test_localhost_in_hostfile_needs_no_ssh():
    assert translated("localhost slots=3", num_gpus=2) == "-n 2"


@pytest.mark.parametrize(
    ("hostfile", "flags", "said"),
    [
        ("", {"num_nodes": 2}, "--num_nodes 2 needs the names of the hosts"),
        ("", {"include": "node1"}, "only localhost is known"),
        ("", {"exclude": "node1"}, "give --hostfile FILE"),
        ("", {"master_addr": "node9"}, "ranks meet on the first host, localhost"),
        ("", {"node_rank": 1}, "--node_rank needs --no_ssh"),
        ("", {"no_ssh": True}, "--no_ssh needs --node_rank N and --master_addr"),
        (HOSTS, {"num_nodes": 3}, "the hostfile has 2 hosts"),
        (HOSTS, {"num_gpus": 5}, "node1 has 4 slots"),
        (HOSTS, {"include": "node3"}, "node3 is not in the hostfile"),
        (HOSTS, {"include": "node1:4"}, "slots 0 to 3, not 4"),
        (HOSTS, {"include": "node1:a"}, "is not a host with its slots"),
        (HOSTS, {"include": "node1", "exclude": "node1"}, "contradict each other"),
        (HOSTS, {"include": "node1", "num_gpus": 2}, "give one"),
        (HOSTS, {"exclude": "node1:0"}, "different GPUs on each host"),
        ("node1 slots=2", {"exclude": "node1"}, "leaves no slot"),
        ("", {"module": True, "no_python": True}, "contradict each other"),
        ("", {"launcher": "slurm"}, "srun -n N python SCRIPT"),
        ("", {"launcher": "ray"}, "--launcher ray is not known"),
        *[("", {name: "1"}, f"--{name} of DeepSpeed") for name in deepspeed_flags.REFUSED],
    ],
)
def test_refuses_flags(hostfile, flags, said):
    with pytest.raises(LaunchError) as raised:
        translated(hostfile, **flags)
    assert said in str(raised.value)


def test_local_rank_is_inserted_after_script(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    name = str(script)
    module = "shardwise.launch.local_rank"
    assert with_local_rank((name, "--x"), module=False) == (
        module,
        "2",
        sys.executable,
        name,
        "--x",
    )
    assert with_local_rank(("shardwise.adopt", "deepspeed", name, "--x"), module=True) == (
        *(module, "6", sys.executable, "-P", "-m", "shardwise.adopt", "deepspeed", name, "--x"),
    )
    assert with_local_rank(("json.tool", "--x"), module=True)[:2] == (module, "3")


def test_command_runs_translated_line(tmp_path, monkeypatch, capsys):
    """The command runs the same request as `shardwise run`, with the given settings."""
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    asked = []
    monkeypatch.setattr(start, "run", lambda request: asked.append(request) or 0)
    assert cli.main(["deepspeed", "--num_gpus", "2", "--zero", "3", str(script), "--lr", "1"]) == 0
    assert asked[0].size == 2
    assert asked[0].settings == {"zero": "3"}
    assert asked[0].words[0] == "shardwise.launch.local_rank"
    assert asked[0].words[-3:] == (str(script), "--lr", "1")
    assert f"shardwise run -n 2 --zero 3 {script} --lr 1" in capsys.readouterr().err
    assert cli.main(["deepspeed", "--no_local_rank", str(script)]) == 0
    assert asked[1].words == (str(script),)
    assert cli.main(["deepspeed", "--bind_core_list", "0-3", str(script)]) == 2
    assert "taskset" in capsys.readouterr().err
    assert CliRunner().invoke(cli._shardwise, ["deepspeed", "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("import deepspeed\n", (), True),
        ("import argparse, torch, deepspeed\n", (), True),
        ("    from deepspeed.ops.adam import FusedAdam\n", (), True),
        ("import train_utils\n", ("--deepspeed_config", "ds.json"), True),
        ("import train_utils\n", ("--deepspeed=ds.json",), True),
        ("import train_utils\n", ("--name", "deepspeed"), False),
        ("import torch  # no deepspeed here\n", (), False),
        ("import mydeepspeed\n", (), False),
        ("import shardwise.deepspeed as deepspeed\n", ("--deepspeed",), False),
    ],
)
def test_adopts_script_that_uses_deepspeed(
    tmp_path: Path, text: str, arguments: tuple[str, ...], expected: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert adopts((str(script), *arguments), {}) == expected
    assert not adopts((str(script), *arguments), {"no_python": True})
