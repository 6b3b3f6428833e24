"""Ranks that `shardwise verify` forks from warm processes behave as ranks that are started anew.

Each test runs a script twice at max_size: as `python script.py`, and as a forked rank.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.tools.verify.runs import Run, ScriptCommand, WarmRanks, command
from tests.system.launcher import Launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no rank is forked")

LIMIT = 60.0

IMPORTS = "import datasets\nimport matplotlib\n"
"""What the script imports for which the processes were made warm; one of the two lies beside it."""


class Ranks:
    """Runs scripts in `folder` as ranks forked from `warm` processes."""

    def __init__(self, warm: WarmRanks, folder: Path) -> None:
        self._warm, self.folder = warm, folder
        self.launcher = Launcher(folder)

    def start(self, text: str, server: int = 0) -> "subprocess.Popen[str]":
        """Start a script as a rank."""
        (self.folder / "script.py").write_text(text)
        return self.started(self.words(server))

    def words(self, server: int = 0) -> list[str]:
        """The words that start it as a rank."""
        script = ScriptCommand(words=("script.py", "its", "arguments"))
        run = Run(script=script, placement=None, steps=1, server=server)
        return command(run, self.folder, self._warm)

    def run(self, text: str, server: int = 0) -> "subprocess.CompletedProcess[str]":
        """Run a script as a rank to its end."""
        return _ended(self.start(text, server))

    def plain(self, text: str) -> "subprocess.CompletedProcess[str]":
        """Run the same as a plain script."""
        (self.folder / "script.py").write_text(text)
        return _ended(self.started([sys.executable, "script.py", "its", "arguments"]))

    def left(self) -> list[int]:
        """Processes that were forked, or started by one that was, and are alive after a while."""
        until = time.monotonic() + 8
        while (alive := self._alive()) and time.monotonic() < until:
            time.sleep(0.02)
        return alive

    def _alive(self) -> list[int]:
        # Of a forked process /proc shows the environment of the warm one.
        lists = (Path(f"/proc/{pid}/task/{pid}/children") for pid in self._warm.pids)
        forked = [int(pid) for each in lists for pid in each.read_text().split()]
        return [*forked, *self.launcher.left()]

    def started(self, words: list[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.launcher.environ() | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _ended(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmRanks]:
    """Two warm processes, which end with the module."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "datasets.py").write_text("")
    (folder / "first.py").write_text(IMPORTS)
    with WarmRanks(ScriptCommand(words=(str(folder / "first.py"),)), max_size=2) as found:
        yield found


@pytest.fixture
def ranks(warm: WarmRanks, tmp_path: Path) -> Iterator[Ranks]:
    """Nothing of a rank may be left when a test ends."""
    found = Ranks(warm, tmp_path)
    yield found
    left = found.left()
    found.launcher.kill_all()
    assert left == []


SEES = """
import sys
print("matplotlib" in sys.modules, "torch" in sys.modules, "datasets" in sys.modules)
import datasets, matplotlib
print(datasets.MINE, __name__, __file__.endswith("script.py"), sys.argv)
"""


def test_modules_beside_the_script_are_the_ones_that_it_imports(ranks: Ranks) -> None:
    (ranks.folder / "datasets.py").write_text("MINE = 'mine'")
    forked, plain = ranks.run(SEES), ranks.plain(SEES)
    assert (forked.returncode, forked.stderr) == (0, "")
    first, second = forked.stdout.splitlines()
    assert first == "True True False"  # so it was forked, and nothing took the name before
    assert second == plain.stdout.splitlines()[1]
    assert "mine __main__ True ['script.py', 'its', 'arguments']" in second


@pytest.mark.full
def test_what_it_sets_before_it_imports_holds(ranks: Ranks) -> None:
    text = """
import os, sys
os.environ["MPLBACKEND"] = "svg"
import matplotlib
print(matplotlib.get_backend())
"""
    # Such a script is started from processes that have imported torch alone.
    (ranks.folder / "script.py").write_text(text)
    with WarmRanks(ScriptCommand(words=(str(ranks.folder / "script.py"),)), max_size=2) as own:
        found = Ranks(own, ranks.folder).run(text)
    assert (found.returncode, found.stdout, found.stderr) == (0, "svg\n", "")


DRAWS = """
import random, numpy, torch, shardwise as sw
world = sw.init(seed=3, quiet=True)
print(torch.initial_seed(), torch.rand(2).tolist(), numpy.random.rand(), random.random())
"""
UNSEEDED = "import random, numpy, torch\nprint(torch.initial_seed(), torch.rand(()).item())\n"
UNSEEDED += "print(numpy.random.rand(), random.random(), hash('a string'))\n"


def test_seeded_it_draws_as_a_plain_start_does(ranks: Ranks) -> None:
    forked, plain = ranks.run(DRAWS), ranks.plain(DRAWS)
    assert forked.returncode == 0, forked.stderr
    assert forked.stdout == plain.stdout


def test_unseeded_each_rank_draws_for_itself(ranks: Ranks) -> None:
    found = [ranks.run(UNSEEDED, server).stdout.split() for server in (0, 0, 1)]
    drawn, hashes = zip(*((each[:4], each[4]) for each in found), strict=True)
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 3, found
    assert hashes[0] == hashes[1] != hashes[2]  # of a process, which is another one in each server


LOADS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(index * index), torch.utils.data.get_worker_info().id

if __name__ == "__main__":
    for context in ("fork", "spawn"):
        loader = DataLoader(Squares(), 4, num_workers=2, multiprocessing_context=context)
        print([(values.tolist(), workers.tolist()) for values, workers in loader])
"""


@pytest.mark.full
def test_workers_of_a_loader_are_started_in_either_way(ranks: Ranks) -> None:
    found = ranks.run(LOADS)
    assert found.returncode == 0, found.stderr
    line = "[([0, 1, 4, 9], [0, 0, 0, 0]), ([16, 25, 36, 49], [1, 1, 1, 1])]"
    assert found.stdout.splitlines() == [line, line]


def test_workers_of_a_loader(ranks: Ranks) -> None:
    found = ranks.run(LOADS.replace(', "spawn"', ","))
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("[1, 1, 1, 1]") == 1


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("import os; print('out', flush=True); os._exit(7)", 7, ""),
        ("import sys; print('out'); sys.exit(3)", 3, ""),
        ("import sys; print('out'); sys.exit('in words')", 1, "in words"),
        ("print('out'); raise ValueError('no such')", 1, "ValueError: no such"),
        ("import os; print('out'); os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; print('out'); os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
        ("import atexit, sys; atexit.register(print, 'out')", 0, ""),
        ("import threading\nthreading.Timer(0.3, lambda: print('out')).start()", 0, ""),
    ],
)
def test_it_ends_as_the_script_ends(ranks: Ranks, line: str, code: int, said: str) -> None:
    # As the launcher sets it: nothing that was printed is lost.
    text = line.replace("print('out')", "print('out', flush=True)")
    found = ranks.run(text)
    assert (found.returncode, found.stdout) == (code, "out\n"), found.stderr
    assert said in found.stderr


THREADS = """
import threading, time, torch
from concurrent.futures import ThreadPoolExecutor
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
with ThreadPoolExecutor(4) as pool:
    parts = pool.map(lambda n: (torch.ones(100, 100) @ torch.ones(100, n)).sum(), range(9))
    total = int(sum(parts))
torch.set_num_threads(2)
x = torch.randn(300, 300, requires_grad=True)
(x @ x).sum().backward()  # autograd starts threads of its own
print(total, x.grad.shape[0], len(threading.enumerate()))
"""


def test_it_may_start_threads(ranks: Ranks) -> None:
    found = ranks.run(THREADS)
    assert (found.returncode, found.stdout) == (0, "360000 300 2\n"), found.stderr


LEAVES = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdout=sys.stderr)
print("left one")
"""


def test_what_it_leaves_behind_is_ended(ranks: Ranks) -> None:
    found = ranks.run(LEAVES)  # it comes to its end when nobody holds its output any more
    assert (found.returncode, found.stdout) == (0, "left one\n"), found.stderr
    assert ranks.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_who_stands_for_it(ranks: Ranks, number: int) -> None:
    process = ranks.start("import time; print('up', flush=True); time.sleep(1000)")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    process.communicate(timeout=LIMIT)
    assert process.returncode == -number
    assert ranks.left() == []


@pytest.mark.full
def test_without_a_warm_process_it_is_the_rank_itself(ranks: Ranks) -> None:
    (ranks.folder / "script.py").write_text("import sys; print('matplotlib' in sys.modules)")
    words = ranks.words()
    words[2] = str(ranks.folder / "nowhere")
    found = _ended(ranks.started(words))
    assert (found.returncode, found.stdout) == (0, "False\n"), found.stderr
