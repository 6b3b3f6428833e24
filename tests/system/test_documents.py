"""The commands and code in README.md and the guides work as written.

The comment above a block that a test cannot run gives the reason: <!-- not run: needs two hosts -->
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from shardwise.cli import main as cli
from tests.disk import on_a_disk
from tests.system.documents import DOCUMENTS, LANGUAGES, ROOT, blocks, name, python_of
from tests.system.launcher import Launcher, script

pytestmark = pytest.mark.usefixtures("warm_programs")

WITH_PYTHON = [document for document in DOCUMENTS if python_of(document)]
PARALLEL = ROOT / "docs" / "parallel.md"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
NUMBER = re.compile(r"\d+\.\d+")


def settings() -> dict[str, str]:
    """Return the environment for running programs, with guide.py on PYTHONPATH."""
    folders = [str(Path(script("guide")).parent), os.environ.get("PYTHONPATH", "")]
    return {
        "OMP_NUM_THREADS": "1",
        "SHARDWISE_EMA_DECAY": "0.9",
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }


def with_shell() -> list[Path]:
    """The documents with a command that is run."""
    return [
        document
        for document in DOCUMENTS
        if any(list(block.commands) and not block.why for block in blocks(document))
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_block_says_its_language_and_every_command_is_known(document: Path) -> None:
    found = blocks(document)
    assert document.read_text().count("\n```") == 2 * len(found)
    assert {block.language for block in found} <= LANGUAGES
    for block in found:
        for words in block.commands:
            assert_known(words)


def assert_known(words: list[str]) -> None:
    """A target of make, a program of this repository, or a command of ours with its flags."""
    program, *arguments = words
    if program == "make":
        assert arguments[0] in TARGETS
    elif program == "shardwise":
        assert_flags(arguments)
    elif "shardwise" in arguments:
        assert_flags(arguments[arguments.index("shardwise") + 1 :])
    for path in re.findall(r"(?:examples|benchmarks)/\S+\.\w+", " ".join(words)):
        assert (ROOT / path).exists(), path


def assert_flags(arguments: list[str]) -> None:
    """Parse a command line of ours as `shardwise` does, without its effects."""
    commands = cli._shardwise
    while isinstance(commands, click.Group):
        commands, arguments = commands.commands[arguments[0]], arguments[1:]
    if "--help" not in arguments:
        commands.make_context(str(commands.name), [*arguments])


def programs(documents: list[Path], folder: Path) -> list[Path]:
    """Write the Python blocks of each document to a file in a separate folder."""
    made = []
    for document in documents:
        place = folder / "programs" / document.stem
        place.mkdir(parents=True)
        (place / f"{document.stem}_blocks.py").write_text(python_of(document))
        made.append(place / f"{document.stem}_blocks.py")
    return made


def test_python_blocks_run(tmp_path: Path) -> None:
    paths = programs([each for each in WITH_PYTHON if each != PARALLEL], tmp_path)
    ran = subprocess.run(
        [sys.executable, script("blocks"), *paths],
        env=os.environ | settings(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.full
def test_python_blocks_of_a_plan_run_on_two_workers(shardwise: Launcher, tmp_path: Path) -> None:
    (path,) = programs([PARALLEL], tmp_path)
    run = ("run", "-n", "2", "--tensor", "2", script("blocks"), str(path))
    ran = shardwise.run(*run, env=settings())
    assert ran.code == 0, ran.out + ran.err
    assert "tensor parallel over 2: " in ran.out + ran.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create the files that a reader has: train.py, a package, a settings file, examples."""
    for place in ("train.py", "guide.py", "package/train.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        shutil.copy(script("guide"), tmp_path / place)
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "run.toml").write_text("zero = 2\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@contextmanager
def on_scratch(command: list[str]) -> Iterator[list[str]]:
    """The command with a folder on a disk, if it names /scratch; removed afterwards."""
    if not any("/scratch" in word for word in command):
        yield command
        return
    disk = on_a_disk() / "documents"
    disk.mkdir()
    try:
        yield [word.replace("/scratch", str(disk)) for word in command]
    finally:
        shutil.rmtree(disk)


def start(command: list[str], folder: Path, **variables: str) -> None:
    """Run a command of a document; `shardwise` is the one under test, a disk is a real folder."""
    with on_scratch(command) as words:
        if words[0] == "shardwise":
            words = [sys.executable, "-m", *words]
        ran = subprocess.run(
            words,
            cwd=folder,
            env=os.environ | settings() | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}\n{ran.stderr}"


def test_the_front_page(folder: Path) -> None:
    front = blocks(ROOT / "README.md")
    (loop,) = (block for block in front if block.language == "diff")
    names = "import sys\nfrom guide import Model, dataset, loss_fn\nsys.argv = sys.argv[:1]\n"
    (folder / "train.py").write_text(names + loop.after)
    commands = [words for block in front if not block.why for words in block.commands]
    assert commands[0][:2] == ["shardwise", "run"]
    for words in commands:
        start(words, folder)


@pytest.mark.parametrize("column", [0, pytest.param(1, marks=pytest.mark.full)])
def test_the_losses_that_are_shown(shardwise: Launcher, column: int) -> None:
    (shown,) = (b for b in blocks(ROOT / "docs" / "same_result.md") if "same_losses" in b.text)
    command, *lines = (re.split(r" {3,}", line)[column] for line in shown.text.splitlines())
    words = shlex.split(command.removeprefix("$ shardwise "))
    ran = shardwise.run(*words[:-1], str(ROOT / words[-1]))
    assert ran.code == 0, ran.err
    said = [re.sub(r"^\[0\] ", "", line) for line in ran.out.splitlines()]
    assert NUMBER.sub("", "\n".join(said)) == NUMBER.sub("", "\n".join(lines))
    numbers = [float(number) for number in NUMBER.findall("\n".join(said))]
    assert numbers == pytest.approx(
        [float(number) for number in NUMBER.findall("\n".join(lines))], abs=1e-8
    )


@pytest.mark.full
@pytest.mark.parametrize("document", with_shell()[1:], ids=name)
def test_commands_run(document: Path, folder: Path) -> None:
    if "checkpoint " in " ".join(block.text for block in blocks(document)):
        (path,) = programs([document], folder)
        start([sys.executable, script("blocks"), str(path)], folder)
        (path.parent / "checkpoints").rename(folder / "checkpoints")
    for block in blocks(document):
        for words in () if block.why else block.commands:
            start(words, folder)
