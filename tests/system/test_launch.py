"""`sw.launch` in scripts, at a prompt and in a notebook: how it ends, and that nothing is left."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk import wait_until
from tests.system.launcher import LIMIT, Launcher, Ran

WAITS = """\
import os, sys, time
import shardwise as sw

def waits():
    open(f"ready-{os.getpid()}", "w").close()
    time.sleep(600)

if __name__ == "__main__":
    try:
        sw.launch(waits, workers=2, start_method=sys.argv[1], grace=1)
    except KeyboardInterrupt:
        print("interrupted")
        raise
"""

SAVES = """\
import os
import torch
import shardwise as sw

def trains():
    world = sw.init(seed=0, quiet=True)
    model = torch.nn.Linear(2, 1)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.ones(64, 2))
    loader = sw.Loader(data, batch_size=4)
    engine.track(loader=loader)
    engine.resume("saved")
    for epoch in loader.epochs(10**6):
        for (x,) in loader:
            engine.backward(model(x).mean())
            engine.step()
            open(f"ready-{os.getpid()}", "w").close()

sw.launch(trains, workers=2, start_method="fork")
"""

PROMPT = """\
import shardwise as sw
def rank():
    return sw.init(quiet=True).rank

print(sw.launch(rank, workers=2))
"""

UNGUARDED = """\
import shardwise as sw
def rank():
    return sw.init(quiet=True).rank

print(sw.launch(rank, workers=2))
"""

NOTEBOOK = [
    """
import torch, shardwise as sw
data = torch.utils.data.TensorDataset(torch.arange(32.0, dtype=torch.float64).reshape(16, 2) / 32)
torch.ones(300, 300) @ torch.ones(300, 300)

def train():
    world = sw.init(seed=0, quiet=True)
    model = torch.nn.Linear(2, 1).double()
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters()))
    for (x,) in sw.Loader(data, batch_size=8):
        engine.backward(model(x).pow(2).mean())
        loss = engine.step().loss
    print("rank", world.rank, engine.placement.name)
    return round(loss, 10)
""",
    "alone = sw.launch(train, workers=1)",
    "found = sw.launch(train, workers=2, zero=3); print(found == 2 * alone)",
    "sw.launch(lambda: 1 / 0, workers=2)",
    "sw.launch(train, workers=2, zreo=3)",
]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.kill_all()


def start(here: Launcher, text: str, *words: str) -> "subprocess.Popen[str]":
    (here.folder / "script.py").write_text(text)
    settings = {
        "cwd": here.folder,
        "text": True,
        "env": here.environ(),
        "stdin": subprocess.DEVNULL,
    }
    settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": here.environ()}
    return subprocess.Popen([sys.executable, "script.py", *words], **settings)


def wait_for_ranks(here: Launcher, process: "subprocess.Popen[str]") -> None:
    ready = lambda: len(list(here.folder.glob("ready-*"))) == 2  # noqa: E731
    wait_until(lambda: ready() or process.poll() is not None, LIMIT)
    assert ready(), process.communicate()[1]


def ended(here: Launcher, process: "subprocess.Popen[str]") -> Ran:
    """Wait for the end of the caller; nothing may be left of its ranks."""
    ran = here.finish(process)
    assert here.wait_until_gone() == []
    assert here.folders_left() == []
    return ran


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_interrupt_ends_all_ranks_and_is_raised(here: Launcher, method: str) -> None:
    process = start(here, WAITS, method)
    wait_for_ranks(here, process)
    process.send_signal(signal.SIGINT)
    ran = ended(here, process)
    assert "stopping 2 ranks" in ran.err
    assert ran.out == "interrupted\n"
    assert ran.code == -signal.SIGINT


def test_signal_to_end_is_that_of_the_caller_too(here: Launcher) -> None:
    process = start(here, WAITS, "fork")
    wait_for_ranks(here, process)
    process.send_signal(signal.SIGTERM)
    assert ended(here, process).code == -signal.SIGTERM


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_end_with_a_caller_that_is_killed(here: Launcher, method: str) -> None:
    process = start(here, WAITS, method)
    wait_for_ranks(here, process)
    process.kill()
    assert ended(here, process).code == -signal.SIGKILL


def test_ranks_save_when_the_caller_is_asked_to_end(here: Launcher) -> None:
    process = start(here, SAVES)
    wait_for_ranks(here, process)
    process.send_signal(signal.SIGTERM)
    ran = ended(here, process)
    assert ran.code == 75, ran.err
    assert list((here.folder / "saved").iterdir())


def test_script_without_a_guard_says_what_to_write(here: Launcher) -> None:
    ran = ended(here, start(here, UNGUARDED))
    assert ran.code == 1
    assert 'Put the call under `if __name__ == "__main__":`.' in ran.err.splitlines()[-1]


def test_function_of_a_prompt_is_forked(here: Launcher) -> None:
    environ = here.environ()
    process = subprocess.Popen(
        [sys.executable, "-i", "-q"],
        cwd=here.folder,
        env=environ,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(PROMPT, timeout=LIMIT)
    assert out == "[0, 1]\n", err
    assert here.wait_until_gone() == []


@pytest.mark.full  # the notebook in test_recipes.py launches ranks too
def test_cells_of_a_notebook(here: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    for name, value in here.environ().items():
        monkeypatch.setenv(name, value)
    cells = [nbformat.v4.new_code_cell(text) for text in NOTEBOOK]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client.NotebookClient(notebook, timeout=LIMIT, allow_errors=True).execute()
    assert here.wait_until_gone() == []
    _, _, trained, failed, refused = ([dict(each) for each in cell.outputs] for cell in cells)
    lines = sorted("".join(each["text"] for each in trained).splitlines())
    assert lines == ["True", "[0] rank 0 ZERO_3", "[1] rank 1 ZERO_3"]
    assert failed[-1]["ename"] == "RankFailed"
    assert failed[-1]["evalue"].endswith("ZeroDivisionError: division by zero")
    assert "Did you mean zero?" in refused[-1]["evalue"]
