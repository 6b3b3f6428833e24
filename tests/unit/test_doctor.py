"""`shardwise doctor`: findings about hosts and ranks."""

import io
import resource
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.config import Settings
from shardwise.layout.placement import Tier
from shardwise.net import identity
from shardwise.net.launchers import detection as launcher_detection
from shardwise.tools.doctor import checks, findings
from shardwise.tools.doctor.checks import Check
from shardwise.tools.doctor.network import Speed

HOSTS = {
    "node1": [Check("torch", "2.9.0"), Check("open files", "256", fault="too few: raise it.")],
    "node2": [Check("torch", "2.13.0"), Check("clock", "+9 s", advice="wrong: set it.")],
}


def test_table_has_a_column_per_host() -> None:
    console = Console(width=60)
    with console.capture() as shown:
        console.print(findings.table(HOSTS))
    rows = [line.split() for line in shown.get().splitlines()]
    assert rows == [
        ["node1", "node2"],
        ["torch", "2.9.0", "2.13.0"],
        ["open", "files", "256"],
        ["clock", "+9", "s"],
    ]


def test_lists_faults_and_advice() -> None:
    assert findings.faults(HOSTS) == [
        "node1: open files: too few: raise it.",
        "torch differs: 2.9.0 on node1, 2.13.0 on node2. Install the same version on all hosts.",
    ]
    assert findings.advice(HOSTS) == ["node2: clock: wrong: set it."]
    assert findings.faults({"node1": HOSTS["node2"]}) == []


def test_small_clock_offset_is_accepted() -> None:
    assert findings.clock(-0.9).advice == ""
    assert "start chrony or ntpd" in findings.clock(-1.1).advice
    assert findings.clock(None).shown == "unknown: rank 0 did not answer"


def test_speeds_are_printed_with_units() -> None:
    assert findings.speeds({"of 2 ranks": Speed(latency=5e-5, bandwidth=1.7e9)}) == [
        "all-reduce of 2 ranks: 0.05 ms for 4 KB, 1.70 GB/s for 16 MB"
    ]


@pytest.mark.parametrize(
    ("installed", "inside"),
    [
        (checks.OLDEST_TORCH, True),
        (checks.NEWEST_TORCH + "+cu130", True),
        ("2.13.0+cpu", True),
        ("2.9.0", True),
        ("2.8.3", False),
        ("2.100.0.dev20270101", False),
        ("3.0.0a0+gitb1", False),
    ],
)
def test_compares_torch_with_the_tested_range(installed: str, inside: bool) -> None:
    found = checks.tested(installed)
    assert found.shown.endswith("in the range" if inside else "outside")
    assert found.advice == "" if inside else f"torch {installed} is outside" in found.advice


def test_checks_offload_folders(tmp_path: Path) -> None:
    settings = Settings(
        offload_optimizer=Tier("nvme", str(tmp_path)),
        offload_params=Tier("nvme", f"{tmp_path}/none"),
        offload_gradients=Tier("cpu"),
        offload_activations=Tier("nvme", str(tmp_path)),
    )
    found = {check.name: check for check in checks.of_host(settings)}
    assert found[str(tmp_path)].fault == ""
    assert found[f"{tmp_path}/none"].fault.endswith("Create it.")
    assert [name for name in found if name.startswith("/")].count(str(tmp_path)) == 1


def test_low_limit_of_open_files_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 512))
    found = {check.name: check for check in checks.of_host(Settings())}
    assert found["open files"].fault.startswith("a rank may open only 256 files: run `ulimit -n")


def test_names_the_variables_that_identify_a_rank() -> None:
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }
    assert identity.described(launcher_detection.detect(environ), environ).splitlines() == [
        "started by torchrun",
        "  rank        1     RANK=1",
        "  size        2     WORLD_SIZE=2",
        "  local rank  0     LOCAL_RANK=0",
        "  local size  1     LOCAL_WORLD_SIZE=1",
        "  node        1     GROUP_RANK=1",
        "  meeting     rank 0 listens at n1, port 29500",
    ]
    assert identity.described(launcher_detection.detect({}), {}).splitlines()[-1] == (
        "  meeting     there are no other ranks"
    )


def test_host_names_are_not_read_as_markup():
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    console.print(findings.table({"[/x]": [Check("a", "[lr=0.1]\x1b[2J")], "b": []}))
    exchanged = console.file.getvalue()
    assert "[/x]" in exchanged
    assert "[lr=0.1]\\x1b[2J" in exchanged
