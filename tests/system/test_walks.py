"""The walks that ARCHITECTURE.md lists are the functions that run."""

import ast
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.system.lab import PORT, Lab
from tests.system.launcher import Launcher, script
from tests.system.test_hosts import shardwise as on_node1  # noqa: F401

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "shardwise"


def listed(heading: str) -> list[str]:
    """The lines `file: function` below a heading of ARCHITECTURE.md, without their remarks."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    found = re.search(rf"^### {heading}\n.*?^```text\n(.*?)^```", text, re.M | re.S)
    assert found, heading
    return [re.split(r"\s{2,}", line)[0] for line in found[1].splitlines()]


def read(paths: Sequence[Path]) -> tuple[set[str], set[str]]:
    """The lines and the types of walks."""
    lines, types = set[str](), set[str]()
    for path in paths:
        *walk, last = path.read_text().splitlines()
        lines |= set(walk)
        types |= set(last.removeprefix("types:").split())
    return lines, types


def files(lines: Sequence[str] | set[str]) -> set[str]:
    return {line.partition(":")[0] for line in lines}


def functions(file: str) -> set[str]:
    """The functions of a file, and the methods of its classes."""
    tree = ast.parse((SOURCES / file).read_text())
    found = {"<module>"}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return found


def check(heading: str, walk: set[str], most: int) -> None:
    """Compare a walk that ran with the list of the page.

    What ran must be listed. A listed function may have had nothing to do this time, since ranks
    race: it has to exist, and something in its file has to have run.
    """
    lines = listed(heading)
    assert walk - set(lines) == set()
    assert files(walk) == files(lines)
    assert len(files(lines)) <= most
    gone = [x for x in lines if x.partition(": ")[2] not in functions(x.partition(":")[0])]
    assert gone == []


def test_a_gradient_and_a_save_take_the_walks_of_the_page(
    shardwise: Launcher, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
    step, types = set[str](), set[str]()
    # Where a sum is formed depends on which rank is first, so one run may not take every path.
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        ran = shardwise.run("run", "-n", "2", script("walk_step"), str(folder), env=env)
        assert ran.code == 0, ran.out + ran.err
        lines, kinds = read(sorted(folder.glob("step.*.walk")))
        step, types = step | lines, types | kinds
        if files(step) == files(listed("From a gradient to the updated weight")):
            break
    check("From a gradient to the updated weight", step, 14)
    assert len(types) <= 14
    save, _ = read([folder / "save.0.walk"])
    check("From `engine.save` to bytes on disk", save, 12)


@pytest.mark.skipif(sys.platform != "linux", reason="hosts are Linux namespaces")
def test_a_launch_over_hosts_takes_the_walk_of_the_page(
    on_node1: Launcher,  # noqa: F811
    hosts: Lab,
    tmp_path: Path,
) -> None:
    traced = tmp_path / "traced"
    traced.mkdir()
    shutil.copy(script("walk_sitecustomize"), traced / "sitecustomize.py")
    env = {"PYTHONPATH": os.pathsep.join([str(traced), str(ROOT)])}
    words = ["run", "--ssh", hosts.ssh, "--ssh-port", str(PORT), "-x", "PYTHONPATH"]
    ran = on_node1.run(*words, "-H", "node1,node2", script("identity"), env=env)
    assert ran.code == 0, ran.out + ran.err
    walk, _ = read(sorted(traced.glob("*.walk")))
    check("From `shardwise run -H a,b` to the first line of a script", walk, 16)
