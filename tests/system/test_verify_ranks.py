"""Ranks that `shardwise verify` forks from warm processes behave like freshly started ranks.

Each test runs a script at most twice: as `python script.py`, and as a forked rank.
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.tools.plan.observe import Script, observe, warm_observers
from shardwise.tools.verify.runs import Run, ScriptCommand, command, warm_ranks
from shardwise.tools.warm.warm_ranks import WarmRanks
from tests.system.launcher import Launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no rank is forked")

LIMIT = 60.0

IMPORTS = "import datasets\nimport matplotlib\n"
"""Modules that the warm processes import for the script. One of them is in the script's folder."""


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
        """Return the words that start a rank."""
        script = ScriptCommand(words=("script.py", "its", "arguments"))
        run = Run(script=script, placement=None, steps=1, server=server)
        return command(run, self.folder, self._warm)

    def run(self, text: str, server: int = 0) -> "subprocess.CompletedProcess[str]":
        """Run a script as a rank to its end."""
        return _ended(self.start(text, server))

    def plain(self, text: str) -> "subprocess.CompletedProcess[str]":
        """Run the same script without verify."""
        (self.folder / "script.py").write_text(text)
        return _ended(self.started([sys.executable, "script.py", "its", "arguments"]))

    def left(self) -> list[int]:
        """Return the forked processes, and their children, that are still alive after a while."""
        until = time.monotonic() + 8
        while (alive := self._alive()) and time.monotonic() < until:
            time.sleep(0.02)
        return alive

    def _alive(self) -> list[int]:
        # /proc shows the environment of the warm process for a forked one.
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
    """Two warm processes for all tests of the module. TMPDIR is too long for a socket's name."""
    folder = tmp_path_factory.mktemp("warm" + 100 * "-")
    (folder / "datasets.py").write_text("")
    (folder / "first.py").write_text(IMPORTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        with warm_ranks(ScriptCommand(words=(str(folder / "first.py"),)), max_size=2) as found:
            yield found


@pytest.fixture
def ranks(warm: WarmRanks, tmp_path: Path) -> Iterator[Ranks]:
    """Check that a test leaves no process of a rank."""
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


def test_script_imports_modules_of_its_own_folder(ranks: Ranks) -> None:
    (ranks.folder / "datasets.py").write_text("MINE = 'mine'")
    forked, plain = ranks.run(SEES), ranks.plain(SEES)
    assert (forked.returncode, forked.stderr) == (0, "")
    first, second = forked.stdout.splitlines()
    assert first == "True True False"  # it was forked, and the name was not imported before
    assert second == plain.stdout.splitlines()[1]
    assert "mine __main__ True ['script.py', 'its', 'arguments']" in second


@pytest.mark.full
def test_variables_set_before_an_import_take_effect(ranks: Ranks) -> None:
    text = """
import os, sys
os.environ["MPLBACKEND"] = "svg"
import matplotlib
print(matplotlib.get_backend())
"""
    # Such a script is forked from processes that have imported only torch.
    (ranks.folder / "script.py").write_text(text)
    with warm_ranks(ScriptCommand(words=(str(ranks.folder / "script.py"),)), max_size=2) as own:
        found = Ranks(own, ranks.folder).run(text)
    assert (found.returncode, found.stdout, found.stderr) == (0, "svg\n", "")


DRAWS = """
import random, numpy, torch, shardwise as sw
world = sw.init(seed=3, quiet=True)
print(torch.initial_seed(), torch.rand(2).tolist(), numpy.random.rand(), random.random())
"""
UNSEEDED = "import random, numpy, torch\nprint(torch.initial_seed(), torch.rand(()).item())\n"
UNSEEDED += "print(numpy.random.rand(), random.random(), hash('a string'))\n"


def test_seeded_rank_draws_like_a_plain_start(ranks: Ranks) -> None:
    forked, plain = ranks.run(DRAWS), ranks.plain(DRAWS)
    assert forked.returncode == 0, forked.stderr
    assert forked.stdout == plain.stdout


def test_unseeded_ranks_draw_different_numbers(ranks: Ranks) -> None:
    found = [ranks.run(UNSEEDED, server).stdout.split() for server in (0, 0, 1)]
    drawn, hashes = zip(*((each[:4], each[4]) for each in found), strict=True)
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 3, found
    assert hashes[0] == hashes[1] != hashes[2]  # each warm process has its own seed of hash


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
def test_loader_workers_start_by_fork_and_spawn(ranks: Ranks) -> None:
    found = ranks.run(LOADS)
    assert found.returncode == 0, found.stderr
    line = "[([0, 1, 4, 9], [0, 0, 0, 0]), ([16, 25, 36, 49], [1, 1, 1, 1])]"
    assert found.stdout.splitlines() == [line, line]


def test_loader_workers(ranks: Ranks) -> None:
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
def test_exit_code_is_the_scripts(ranks: Ranks, line: str, code: int, said: str) -> None:
    # As the launcher sets it: no printed line is lost.
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


def test_rank_may_start_threads(ranks: Ranks) -> None:
    found = ranks.run(THREADS)
    assert (found.returncode, found.stdout) == (0, "360000 300 2\n"), found.stderr


LEAVES = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdout=sys.stderr)
print("left one")
"""


def test_processes_left_by_a_rank_are_ended(ranks: Ranks) -> None:
    found = ranks.run(LEAVES)  # returns once no process holds its output open
    assert (found.returncode, found.stdout) == (0, "left one\n"), found.stderr
    assert ranks.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_rank_ends_with_its_client(ranks: Ranks, number: int) -> None:
    process = ranks.start("import time; print('up', flush=True); time.sleep(1000)")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    process.communicate(timeout=LIMIT)
    assert process.returncode == -number
    assert ranks.left() == []


@pytest.mark.full
def test_client_becomes_the_rank_without_a_warm_process(ranks: Ranks) -> None:
    (ranks.folder / "script.py").write_text("import sys; print('matplotlib' in sys.modules)")
    words = ranks.words()
    words[2] = str(ranks.folder / "nowhere")
    found = _ended(ranks.started(words))
    assert (found.returncode, found.stdout) == (0, "False\n"), found.stderr


OBSERVED = """
import os, torch, shardwise as sw
open(os.path.dirname(__file__) + "/parent", "w").write(str(os.getppid()))
sw.init(seed=0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters()))
for (x,) in sw.Loader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=16):
    engine.backward(model(x).square().mean())
    engine.step()
"""


@pytest.mark.full
def test_forked_observations_of_plan_equal_cold_ones(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OBSERVED)
    script = Script((str(tmp_path / "train.py"),))
    with warm_observers(script) as warm:
        forked = observe(script, 8, warm=warm)
        assert int((tmp_path / "parent").read_text()) in warm.pids
        assert forked == observe(script, 8)
        assert int((tmp_path / "parent").read_text()) not in warm.pids
