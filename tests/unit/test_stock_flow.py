"""Whatever cannot be compared is not proved, and never equal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import LaunchError
from shardwise.tools.verify.runs import RunFailed
from shardwise.tools.verify.stock import draws, stock_flow
from shardwise.tools.verify.stock.findings import Finding
from shardwise.tools.verify.stock.stock_command import sentences
from shardwise.tools.verify.stock.stock_flow import StockResult
from shardwise.tools.verify.stock.stock_runs import StockRecords
from shardwise.tools.verify.verdicts import TrainingVerdict
from tests.unit.test_stock_recorder import record


def trained(folder: Path, name: str, *, copies: int = 1, scale: float = 1.0) -> StockRecords:
    """Return the record of a training on equal rows, `copies` times in each batch.

    The gradients are multiplied by `scale`.
    """

    def script() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((8 * copies, 4), 2.0**-step)
            model(x).mean().backward()
            for p in model.parameters():
                p.grad.mul_(scale)
            optimizer.step()

    (folder / name).mkdir()
    return record(folder / name, script)


def twice(made: StockRecords) -> StockRecords:
    """Return a record of two ranks that did the same."""
    return replace(made, ranks=[*made.ranks] * 2, steps=[*made.steps] * 2)


class Runs:
    """Returns records that exist already."""

    def __init__(self, made: StockRecords, reference: StockRecords | RunFailed) -> None:
        self._made, self._reference = made, reference

    def ranks(self, words: str, **more: Any) -> StockRecords:
        return self._made

    def reference(self, words: str, **more: Any) -> StockRecords:
        if isinstance(self._reference, RunFailed):
            raise self._reference
        return self._reference


def verify(made: StockRecords, reference: StockRecords | RunFailed) -> StockResult:
    runs: Any = Runs(made, reference)
    return stock_flow.verify(runs)


def test_union_of_the_rows_is_equal(tmp_path: Path) -> None:
    result = verify(twice(trained(tmp_path, "a")), trained(tmp_path, "b", copies=2))
    assert result.verdict is TrainingVerdict.BITS
    assert result.rows == [16, 16, 16]


def test_equal_results_on_other_rows_are_not_proved(tmp_path: Path) -> None:
    # Both ranks train on the same rows, which no DataLoader has made.
    result = verify(twice(trained(tmp_path, "a")), trained(tmp_path, "b"))
    assert result.verdict is TrainingVerdict.UNPROVED
    assert "received 16 rows, and the models of one process 8" in result.why


def test_one_rank_is_not_proved(tmp_path: Path) -> None:
    made = trained(tmp_path, "a")
    result = verify(made, made)
    assert result.verdict is TrainingVerdict.UNPROVED
    assert "one rank only" in result.why


def test_ranks_with_other_numbers_of_steps_are_not_proved(tmp_path: Path) -> None:
    made = twice(trained(tmp_path, "a"))
    made = replace(made, steps=[made.steps[0], made.steps[1][:3]])
    result = verify(made, trained(tmp_path, "b", copies=2))
    assert result.verdict is TrainingVerdict.UNPROVED
    assert "different numbers of steps: 4, 3" in result.why


def test_reference_without_a_step_is_not_proved(tmp_path: Path) -> None:
    made = twice(trained(tmp_path, "a"))
    nothing = replace(made, training=replace(made.training, engines={}))
    assert verify(made, nothing).verdict is TrainingVerdict.UNPROVED


def test_findings_count_also_if_one_process_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = twice(trained(tmp_path, "a"))
    failed = RunFailed("one process", 1, "AssertionError: needs two ranks")
    assert verify(made, failed).verdict is TrainingVerdict.UNPROVED
    assert "needs two ranks" in verify(made, failed).why
    monkeypatch.setattr(stock_flow, "findings", lambda made: [Finding("a mistake", "It is wrong.")])
    assert verify(made, failed).verdict is TrainingVerdict.DIFFERS


def test_missing_ranks_and_other_optimizers_are_refused(tmp_path: Path) -> None:
    made = trained(tmp_path, "a")
    one = replace(made, ranks=[made.ranks[0] | {"world_size": 2}])
    with pytest.raises(LaunchError, match="Only 1 of 2 ranks were recorded"):
        stock_flow.check(one)
    nothing = replace(made, training=replace(made.training, engines={}))
    partitions = replace(nothing, ranks=[made.ranks[0] | {"unnamed": "deepspeed"}])
    with pytest.raises(LaunchError, match="--adopt deepspeed"):
        stock_flow.check(partitions)
    spawns = replace(nothing, ranks=[made.ranks[0] | {"spawns": True}])
    with pytest.raises(LaunchError, match="starts its ranks itself"):
        stock_flow.check(spawns)


@pytest.mark.parametrize("passes_generator", [False, True])
def test_names_the_operation_without_a_seed(tmp_path: Path, *, passes_generator: bool) -> None:
    def script() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        generator = torch.Generator()
        generator.seed()
        if not passes_generator:
            torch.seed()
        for _ in range(2):
            x = torch.rand(4, 4)
            if passes_generator:
                x = torch.randn(4, 4, generator=generator)
            model(x).mean().backward()
            optimizer.step()

    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        found.append(record(tmp_path / name, script, draws=True).ranks[0]["draws"])
    operation = "randn" if passes_generator else "rand"
    assert f"{operation} in test_stock_flow.py:" in str(draws.first_without_seed(*found))
    assert draws.first_without_seed(found[0], found[0]) is None


def test_numbers_without_a_seed_are_named_before_other_inputs(tmp_path: Path) -> None:
    def script() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.seed()
        for _ in range(4):
            model(torch.rand(4, 4)).mean().backward()
            optimizer.step()

    def noisy(name: str, **more: Any) -> StockRecords:
        (tmp_path / name).mkdir()
        return record(tmp_path / name, script, **more)

    class NoisyRuns(Runs):
        asked = 0

        def reference(self, words: str, **more: Any) -> StockRecords:
            self.asked += 1
            return noisy(f"reference-{self.asked}", draws=more.get("notes_draws", False))

    made = twice(noisy("ranks"))
    result = stock_flow.verify(NoisyRuns(made, made))  # type: ignore[arg-type]
    assert result.verdict is TrainingVerdict.UNPROVED
    assert "is not deterministic on one process: two runs differ in step 0." in result.why
    assert "rand in test_stock_flow.py:" in result.why
    assert " Also, in step 1, the models of all ranks received 8 rows" in result.why


@pytest.mark.parametrize("fails", [None, "one process again", "one process, noting draws"])
@pytest.mark.parametrize("hangs", [False, True])
def test_rounding_noise_does_not_replace_other_reasons(
    tmp_path: Path, fails: str | None, *, hangs: bool
) -> None:
    made, reference = twice(trained(tmp_path, "a")), trained(tmp_path, "b")
    noisy = trained(tmp_path, "noisy", scale=1 + 1e-6)
    noted = replace(noisy, ranks=[noisy.ranks[0] | {"draws": []}])
    asked = []

    class NoisyRuns(Runs):
        def reference(self, words: str, **more: Any) -> StockRecords:
            asked.append(words)
            if words == fails:
                raise LaunchError("no step for 300 s") if hangs else RunFailed(words, 1, "killed")
            return noted if "noting" in words else noisy if "again" in words else reference

    result = stock_flow.verify(NoisyRuns(made, reference))  # type: ignore[arg-type]
    assert result.verdict is TrainingVerdict.UNPROVED
    assert result.why.startswith("in step 1, the models of all ranks received 16 rows")
    assert asked[1] == "one process again"
    assert fails is None or fails == asked[-1]


def test_default_generator_is_logged_once() -> None:
    state = torch.get_rng_state()
    try:
        with draws.DrawLog() as log:
            torch.randn(2, generator=torch.default_generator)
            with pytest.raises(TypeError, match="generator"):
                torch.randn(2, generator=np.random.default_rng())  # type: ignore[call-overload]
    finally:
        torch.set_rng_state(state)
    assert [entry[0] for entry in log.entries if entry[2] == "torch"] == ["randn"]


def test_result_without_a_search_does_not_speak_of_its_outcome(tmp_path: Path) -> None:
    made, reference = (
        replace(each, ranks=[each.ranks[0] | {"dtypes": ["float64"]}])
        for each in (trained(tmp_path, "a", scale=1.5), trained(tmp_path, "b", copies=2))
    )
    runs: Any = Runs(twice(made), reference)
    result = stock_flow.verify(runs, finds_causes=False)
    assert result.verdict is TrainingVerdict.DIFFERS
    said = sentences(result)[0]
    assert said == "Differs from one process: the cause was not looked for (--no-causes)."
    assert "no known cause" in sentences(replace(result, finds_causes=True))[0]


class Counting(nn.Module):
    """A layer whose output depends on the number of its forward passes, if `matters`."""

    def __init__(self, matters: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("passes", torch.zeros(()))
        self.matters = matters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        scale = 1 + self.passes if self.matters else 1.0
        return (self.weight * x).exp() * scale


def counting(folder: Path, name: str, case: str, *, copies: int = 1, **request: Any) -> Any:
    """Return the record of a training whose layer counts in evaluations or recomputations."""

    def script() -> None:
        layer = Counting("harmless" not in case)
        model = nn.Sequential(layer, nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((8 * copies, 4), 2.0**-step).double()
            again = "recomputation" in case
            y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            model[1](y).mean().backward()
            optimizer.step()
            if "evaluation" in case:
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()

    (folder / name).mkdir()
    return record(folder / name, script, **request)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("evaluation", "evaluation changes the training"),
        ("recomputation", "buffers change again in recomputation"),
        ("harmless evaluation", None),
        ("harmless recomputation", None),
        ("neither", None),
    ],
)
def test_evaluation_and_recomputation_must_not_change_the_training(
    tmp_path: Path, case: str, name: str | None
) -> None:
    made = twice(counting(tmp_path, "ranks", case))
    asked = []

    class Trials(Runs):
        def reference(self, words: str, **more: Any) -> StockRecords:
            asked.append(more.get("alter"))
            folder = f"reference-{len(asked)}"
            return counting(tmp_path, folder, case, copies=2, alter=more.get("alter") or {})

    result = stock_flow.verify(Trials(made, made))  # type: ignore[arg-type]
    assert [each.name for each in result.findings] == ([] if name is None else [name])
    # The runs agree, because one process has the same mistake.
    assert result.own.within(1e-8)
    assert (result.verdict is TrainingVerdict.DIFFERS) == (name is not None)
    # Only a script whose buffers change needs further runs.
    assert len(asked) == (1 if case == "neither" else 3)


class CastingRuns:
    """Runs of a script whose ranks have a small error, unless its casts have no effect.

    With `casts`, the script also makes a cast to fp32 that the recorder does not undo.
    """

    def __init__(self, folder: Path, *, can_be_promoted: bool, casts: bool) -> None:
        self._folder, self._can_be_promoted, self._made = folder, can_be_promoted, 0
        self._casts = casts
        self.asked: list[str | None] = []

    def _record(self, wide: str | None, error: float) -> StockRecords:
        rounds = wide != "promoted" or not self._can_be_promoted

        narrow = torch.from_numpy(np.zeros(1, np.float32))

        def script() -> None:
            model = nn.Linear(4, 1).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for step in range(4):
                optimizer.zero_grad()
                x = torch.full((8, 4), 2.0**-step).double()
                outputs = model(x)
                if self._casts:
                    outputs = outputs.type_as(narrow).double()
                (outputs.mean() * (1 + error * rounds)).backward()
                optimizer.step()

        self._made += 1
        folder = self._folder / str(self._made)
        folder.mkdir()
        return record(folder, script, wide=wide)

    def ranks(self, words: str, *, wide: str | None = None, **more: Any) -> StockRecords:
        self.asked.append(wide)
        made = self._record(wide, 1e-7)
        steps = [[row | {"fed": row["fed"] | {"hashes": 0}} for row in made.steps[0]]] * 2
        return replace(made, ranks=[*made.ranks] * 2, steps=steps)

    def reference(self, words: str, *, wide: str | None = None, **more: Any) -> StockRecords:
        made = self._record(wide, 0.0)
        steps = [[row | {"fed": row["fed"] | {"hashes": 0}} for row in made.steps[0]]]
        return replace(made, steps=steps)


@pytest.mark.parametrize(
    ("can_be_promoted", "casts", "verdict"),
    [
        (True, True, TrainingVerdict.ROUNDING),
        (False, True, TrainingVerdict.UNPROVED),
        (False, False, TrainingVerdict.DIFFERS),
    ],
)
def test_small_difference_may_be_rounding_only_if_a_cast_was_seen(
    tmp_path: Path, can_be_promoted: bool, casts: bool, verdict: TrainingVerdict
) -> None:
    torch.manual_seed(0)
    runs = CastingRuns(tmp_path, can_be_promoted=can_be_promoted, casts=casts)
    result = stock_flow.verify(runs)  # type: ignore[arg-type]
    assert result.verdict is verdict
    assert runs.asked[:3] == [None, "default", "promoted"]
    is_named = (
        "_to_copy.default in ToCopyBackward0 (float32; called by test_stock_flow" in result.why
    )
    assert is_named is (verdict is TrainingVerdict.UNPROVED)
