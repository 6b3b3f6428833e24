"""The package as users install it: the wheel in a fresh venv, without the checkout."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
SCRIPT = """\
import torch
import shardwise as sw

world = sw.init(seed=0, quiet=True)
model = torch.nn.Linear(2, 1)
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
engine.backward(model(torch.ones(1, 2)).mean())
engine.step()
print(f"rank {world.rank} of {world.size} from {sw.__file__}")
"""


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command that must succeed without access to the checkout, and return its output."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SHARDWISE", "PYTHONPATH", "VIRTUAL_ENV"))
    }
    ran = subprocess.run(
        words,
        cwd=cwd,
        env=environ | {"NO_COLOR": "1", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that `make dist` builds from the sdist that it builds first."""
    folder = tmp_path_factory.mktemp("dist")
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    run(*command, cwd=folder)
    (sdist,) = folder.glob("shardwise-*.tar.gz")
    (found,) = folder.glob("shardwise-*-py3-none-any.whl")
    assert sdist.name.removesuffix(".tar.gz") == found.name.removesuffix("-py3-none-any.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a venv that has the wheel, and sees our dependencies.

    Their folders are lines of a .pth file, so that no .pth file in them is read: an editable
    install of this checkout stays unseen.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    programs = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "--python", programs / "python", "install", "--no-deps", wheel, cwd=folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(ours) + "\n")
    return programs


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as found:
        names = {name for name in found.namelist() if not name.startswith("shardwise-")}
    sources = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == sources


def test_a_run_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    out = run(installed / "shardwise", "run", "-n", "2", "train.py", cwd=tmp_path)
    package = installed.parent / "lib"
    lines = sorted(out.splitlines())
    assert [line.partition(" from ")[0] for line in lines] == [
        f"[{rank}] rank {rank} of 2" for rank in (0, 1)
    ]
    assert all(line.partition(" from ")[2].startswith(str(package)) for line in lines)


@pytest.mark.full  # as the run above, and as tests/unit/test_doctor.py
def test_the_doctor_says_which_torch(installed: Path, tmp_path: Path) -> None:
    out = run(installed / "shardwise", "doctor", cwd=tmp_path)
    rows = {" ".join(line.split()[1:]) for line in out.splitlines()}
    assert f"torch {torch.__version__}" in rows
    assert any(row.startswith("tested torch ") for row in rows)
    assert "Found nothing that would make a run fail." in rows
