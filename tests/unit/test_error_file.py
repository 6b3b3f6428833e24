"""Errors that are shown as a sentence, and the process that shows them."""

import multiprocessing
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
import shardwise.horovod as hvd
from shardwise.errors import (
    ConfigError,
    ModelError,
    PlacementError,
    ShardwiseError,
    UsageError,
)
from shardwise.net import environment, error_file
from shardwise.net.error_file import refusal_sentence
from shardwise.world.world import World


class Careless(torch.nn.Linear):
    """A model whose forward raises an error class of ours."""

    def named_modules(self, *args: Any, **options: Any) -> Any:
        raise ConfigError("by the user")


class Failing(torch.optim.SGD):
    """An optimizer that fails once an engine uses it."""

    def step(self, closure: Any = None) -> None:
        raise TypeError("closure is None, says the user")


def engine(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
    sw.Engine(model, optimizer, quiet=True, **settings)


def raised(call: Any, *args: Any, **options: Any) -> ShardwiseError:
    with pytest.raises(ShardwiseError) as caught:
        call(*args, **options)
    return caught.value


def test_invalid_setting_is_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal_sentence(raised(sw.init, exact=0))
    assert said.startswith("the script: exact takes an integer of 1 or more, not 0. [")
    assert said.endswith(": call(*args, **options)]")
    monkeypatch.setenv("SHARDWISE_EXACT", "0")
    assert refusal_sentence(raised(hvd.init)).startswith(
        "variable SHARDWISE_EXACT takes an integer"
    )


def test_error_of_hvd_init_is_refusal(solo: World) -> None:
    assert refusal_sentence(raised(hvd.init, comm=[3])).startswith(
        "hvd.init([3]) is not the list of all 1 ranks"
    )
    try:
        said = refusal_sentence(raised(hvd.init, process_sets=[[7]]))
    finally:
        hvd.shutdown()
    assert said.startswith("ProcessSet([7]) needs at least one rank, and only ranks from 0 to 0")


def test_illegal_row_is_refusal(solo: World) -> None:
    model = torch.nn.Linear(2, 1)
    error = raised(engine, model, torch.optim.SGD(model.parameters()), shard="gradients")
    assert isinstance(error, PlacementError)
    assert refusal_sentence(error).startswith(f"{error} [")


def test_error_in_generated_code_is_refusal() -> None:
    """Its generated __init__ is in no file."""
    code = "import shardwise as sw; sw.init(tensor=2, device='cpu')"
    with pytest.raises(ConfigError) as caught:
        exec(compile(code, "<string>", "exec"), {"__file__": str(Path("train.py").resolve())})
    assert refusal_sentence(caught.value).endswith(" > <string>:1]")


def test_script_run_by_adopt_is_user_code() -> None:
    """`python -m shardwise.adopt` runs a script in the module `__main__` of ours."""
    names: dict[str, Any] = {"sw": sw, "__file__": "train.py"}
    exec(compile("def train():\n    sw.init(exact=0)", "train.py", "exec"), names)
    ours = str(Path(sw.__file__).parent / "adopt.py")
    exec(compile("def main():\n    train()", ours, "exec"), names)
    said = refusal_sentence(raised(names["main"]))
    assert said.endswith(" > train.py:2]")
    assert "adopt.py" not in said


def test_error_of_ours_in_user_code_needs_traceback(solo: World) -> None:
    model, good = Careless(2, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(good.parameters())
    assert refusal_sentence(raised(engine, model, optimizer)) == ""
    error = raised(engine, good, Failing(good.parameters()), zero=1)
    assert isinstance(error, ModelError)
    assert isinstance(error.__cause__, TypeError)
    assert refusal_sentence(error) == ""


def test_earlier_user_error_is_not_hidden(solo: World, tmp_path: Path) -> None:
    """The user's error is the cause; our refusal in the script's cleanup is a consequence."""
    model = torch.nn.Linear(2, 1)
    made = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)

    def train() -> None:
        made.backward(model(torch.ones(3, 2)).square().mean())
        try:
            raise ValueError("label 17 of 10")
        finally:
            made.save(tmp_path)

    error = raised(train)
    assert isinstance(error.__context__, ValueError)
    assert refusal_sentence(error) == ""
    made.step()


def test_an_error_that_is_its_own_cause() -> None:
    error = raised(sw.init, exact=0)
    try:
        raise error from error
    except ShardwiseError:
        assert refusal_sentence(error)


def test_notes_of_exception_are_shown() -> None:
    error = raised(sw.init, exact=0)
    error.add_note("at batch 17")
    assert "not 0. at batch 17 [" in refusal_sentence(error)


def test_refusal_lists_all_lines_of_user(solo: World) -> None:
    """So that two calls of one helper can be told apart, also in an installed project."""
    code = "def update(engine):\n    engine.step()\n\ndef train(engine):\n    update(engine)"
    model = torch.nn.Linear(2, 1)
    made = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    names: dict[str, Any] = {"__file__": "/venv/lib/python3.11/site-packages/project/train.py"}
    exec(compile(code, "train.py", "exec"), names)
    assert " > train.py:5 > train.py:2]" in refusal_sentence(raised(names["train"], made))


@pytest.mark.parametrize(
    ("file", "users"),
    [
        (Path(sys.prefix) / "lib/python3.11/site-packages/project/train.py", True),
        (Path("/usr/lib/python3/dist-packages/project/train.py"), True),
        (Path(sysconfig.get_path("stdlib")) / "site-packages/project/train.py", True),
        (Path(sysconfig.get_path("stdlib")) / "contextlib.py", False),
        (Path("<frozen runpy>"), False),
        (Path("<stdin>"), True),
        (Path(torch.__file__).parent / "optim/optimizer.py", False),
        (Path(sw.__file__).parent / "engine/engine.py", False),
    ],
)
def test_is_users(file: Path, users: bool) -> None:
    assert error_file.is_users(file) == users


def test_other_errors_are_no_refusals() -> None:
    assert refusal_sentence(ValueError("no")) == ""
    assert refusal_sentence(ConfigError("that the user's script raised itself")) == ""


class TestHabits:
    """Mistakes in a training loop are sentences too."""

    @pytest.fixture
    def made(self, solo: World) -> tuple[torch.nn.Module, torch.optim.Optimizer, sw.Engine]:
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters())
        return model, optimizer, sw.Engine(model, optimizer, quiet=True)

    def test_mistake_of_plain_loop_is_refusal(self, made: Any) -> None:
        model, optimizer, _ = made
        loss = model(torch.ones(3, 2)).square().mean()
        said = refusal_sentence(raised(loss.backward))
        assert said.startswith("loss.backward() reached weight without the engine, so")
        assert refusal_sentence(raised(optimizer.step)).startswith("SGD.step() would use gradients")

    def test_mistake_in_our_calls_is_refusal(self, made: Any, tmp_path: Path) -> None:
        model, _, engine = made
        output = model(torch.ones(3, 2))
        assert "takes a scalar loss, not a tensor of shape (3, 1). Take" in refusal_sentence(
            raised(engine.backward, output)
        )
        assert "as a tensor, not float: pass" in refusal_sentence(raised(engine.backward, 1.5))
        assert refusal_sentence(raised(engine.step)).endswith(": call(*args, **options)]")
        assert "none does not exist. " in refusal_sentence(raised(engine.load, tmp_path / "none"))

    def test_wrong_argument_order_is_refusal(self, solo: World) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters())
        said = refusal_sentence(raised(sw.Engine, optimizer, model))
        assert said.startswith(
            "sw.Engine(model, optimizer) takes a torch.nn.Module first, or several, not SGD. ["
        )


class TestShowing:
    """The exception hook that each process has after `sw.init`."""

    REFUSED = "the script: exact takes an integer of 1 or more, not 0. ["

    @pytest.fixture(autouse=True)
    def before(self, monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
        """Return the errors that the previous hook received."""
        given: list[BaseException] = []
        for name in (environment.REPORTS_VARIABLE, environment.RANK_VARIABLE):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: given.append(error))
        return given

    def shown(self, capfd: pytest.CaptureFixture[str]) -> str:
        error = raised(sw.init, exact=0)  # this also sets the hook
        sys.excepthook(type(error), error, error.__traceback__)
        return capfd.readouterr().err

    def test_refusal_without_launcher_is_sentence(
        self, capfd: pytest.CaptureFixture[str], before: list[BaseException]
    ) -> None:
        assert self.shown(capfd).startswith(f"shardwise: {self.REFUSED}")
        other = ValueError("no")
        sys.excepthook(ValueError, other, None)
        assert [type(error) for error in before] == [ConfigError, ValueError]

    def test_hook_of_python_is_replaced(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        assert "Traceback" not in self.shown(capfd)

    def test_sentence_names_rank(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        numbers = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        for name, value in numbers.items() | {("MASTER_ADDR", "x"), ("MASTER_PORT", "1")}:
            monkeypatch.setenv(name, value)
        assert self.shown(capfd).startswith(f"shardwise: rank 1 of 2: {self.REFUSED}")

    @pytest.mark.parametrize("size", [1, 2])
    def test_launcher_shows_common_refusal(
        self,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        size: int,
    ) -> None:
        monkeypatch.setenv(environment.REPORTS_VARIABLE, str(tmp_path))
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "SIZE": size, "LOCAL_SIZE": size}.items():
            monkeypatch.setenv(environment.PREFIX + name, str(value))
        monkeypatch.setenv(environment.PREFIX + "ADDRESS", "x")
        monkeypatch.setenv(environment.PREFIX + "PORT", "1")
        shown, told = self.shown(capfd), error_file.read(tmp_path)[0]
        assert told.text.startswith("Traceback (most recent call last):")
        alone = size == 1
        assert shown.startswith(f"shardwise: {self.REFUSED}" if alone else "")
        assert bool(shown) == alone
        assert told.refusal.startswith("" if alone else self.REFUSED)
        assert bool(told.refusal) != alone


def test_errors_of_children_are_not_reported_for_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "import shardwise\n"
        "helper = 'import shardwise; raise KeyError(1)'\n"
        "subprocess.run([sys.executable, '-c', helper])\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    raise shardwise.errors.UsageError('of a child')\n"
        "os.waitpid(child, 0)\n"
        "names = os.listdir(os.environ['SHARDWISE_LAUNCH_REPORTS'])\n"
        "assert not [name for name in names if name.endswith('.json')]\n"
        "raise ValueError('of the rank')\n"
    )
    reports = tmp_path / "reports"
    reports.mkdir()
    environ = {environment.REPORTS_VARIABLE: str(reports), environment.RANK_VARIABLE: "0"}
    done = subprocess.run(
        [sys.executable, script], env=os.environ | environ, capture_output=True, text=True
    )
    assert "of a child" in done.stderr  # only the child itself shows it
    assert [path.name for path in reports.glob("*.json")] == ["0.json"]
    assert "of the rank" in (reports / "0.json").read_text()


def test_spawned_import_of_script_names_main_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match='Put the training below `if __name__ == "__main__":`'):
        sw.init()
