"""Rates and their intervals, records of ranks, and the report."""

import csv
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

import shardwise as sw
from shardwise.cli.main import main
from shardwise.config import Settings
from shardwise.horovod.context import SampleCounter
from shardwise.tools.scale import measure, plots, records, report, runs
from shardwise.tools.scale.estimates import Rate, rate, student
from shardwise.tools.scale.records import Measured, TooFew
from shardwise.tools.scale.report import ScalingReport
from shardwise.tools.scale.runs import MeasuredRun, ScalingPlan
from shardwise.world import step_log
from shardwise.world.step_log import StepLog
from shardwise.world.world import World

QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 19: 2.093, 100: 1.984}


@pytest.mark.parametrize(("degrees", "expected"), QUANTILES.items())
def test_quantiles_of_student(degrees: int, expected: float) -> None:
    assert student(0.975, degrees) == pytest.approx(expected, abs=5e-3)


def test_rate_is_all_samples_over_all_time() -> None:
    found = rate([100, 100, 20], [1.0, 1.0, 0.5])
    assert found.value == 220 / 2.5
    assert rate([64] * 8, [0.5] * 8) == Rate(128, 128, 128)
    alone = rate([64], [0.5])
    assert alone.value == 128
    assert math.isnan(alone.low)


def test_interval_contains_the_true_rate_19_times_in_20() -> None:
    """For steps whose lengths are independent."""
    draw = random.Random(0)
    held = 0
    for _ in range(400):
        found = rate([10] * 40, [draw.uniform(0.5, 1.5) for _ in range(40)])
        held += found.low <= 10 <= found.high
    assert 0.91 <= held / 400 <= 0.99


def record(folder: Path, rank: int, rows: list[dict[str, Any]], end: str = "") -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"rank-{rank}.jsonl").write_text(text + end)


def step(number: int, **changed: Any) -> dict[str, Any]:
    row = {"step": number, "epoch": number // 4, "between": 0.0, "seconds": 1.0, "samples": 8}
    return row | {"loss": 2.0 - number / 8, "weight": 16.0} | changed


def test_merges_records_of_all_ranks(tmp_path: Path) -> None:
    mean = {"epoch": 1, "training": False, "means": {"accuracy": 0.75}}
    record(tmp_path, 0, [step(n, between=1.0) for n in range(8)] + [mean])
    waiting = [step(n, seconds=2.0, samples=4) for n in range(9)]
    record(tmp_path, 1, waiting, end='{"step": 9, "ep')
    found = records.read(tmp_path, ranks=2, warmup=2)
    assert (found.steps, found.dropped, found.batch, found.seconds) == (8, 2, 12, 1.0)
    assert found.rate == Rate(12.0, 12.0, 12.0), "12 samples in the 1 s since rank 0 asked too"
    assert found.loss == {0: 1.8125, 1: 1.3125}
    assert found.means == {"evaluation accuracy": {1: 0.75}}
    assert records.steps_made(tmp_path) == 8


def test_jitter_between_ranks_does_not_change_the_rate(tmp_path: Path) -> None:
    for rank in (0, 1):  # in turn, one ends 0.1 s later than the other
        record(tmp_path, rank, [step(n, seconds=1.1 - 0.2 * ((n + rank) % 2)) for n in range(8)])
    assert records.read(tmp_path, ranks=2, warmup=2).rate.value == pytest.approx(16.0)


def test_too_few_steps_raise_with_a_remedy(tmp_path: Path) -> None:
    record(tmp_path, 0, [step(0), step(1)])
    with pytest.raises(TooFew, match="a smaller --warmup"):
        records.read(tmp_path, ranks=1, warmup=5)
    record(tmp_path, 1, [])
    with pytest.raises(TooFew, match="no step was recorded"):
        records.read(tmp_path, ranks=2, warmup=0)


def test_missing_records_of_other_hosts_raise(tmp_path: Path) -> None:
    record(tmp_path, 0, [step(0), step(1)])
    with pytest.raises(TooFew, match=r"no record of rank\(s\) 1, 2\. .* all of them share"):
        records.read(tmp_path, ranks=3, warmup=0)


def test_steps_without_samples_raise_with_a_remedy(tmp_path: Path) -> None:
    record(tmp_path, 0, [step(0), *(step(n, samples=0) for n in range(1, 4))])
    with pytest.raises(TooFew, match=r"steps have no samples.*sw\.Loader"):
        records.read(tmp_path, ranks=1, warmup=1)


OUTCOME = SimpleNamespace(loss=1.0, weight=4.0)


class Clock:
    """Stands in for the module `time`. Its clock stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(step_log, "time", made)
    return made


class TestStepLog:
    def train(self, world: World, folder: Path, stop_after: int | None = None) -> list[Any]:
        """Return the record of 2 epochs of 5 samples, in batches of 2, with evaluations."""
        world.step_log = StepLog(folder, 0, stop_after)
        model = torch.nn.Linear(2, 1)
        engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
        data = torch.utils.data.TensorDataset(torch.ones(5, 2))
        loader, held_out = sw.Loader(data, batch_size=2), sw.Loader(data, batch_size=5)
        metrics = sw.Metrics()
        try:
            for _ in loader.epochs(2):
                for (x,) in loader:
                    engine.backward(model(x).mean())
                    engine.step()
                with torch.no_grad():
                    for _ in held_out:
                        metrics.add(accuracy=1.0)
                metrics.compute()
        finally:
            engine.close()
            world.step_log.close()
        return [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]

    def test_steps_samples_and_means(self, solo: World, tmp_path: Path) -> None:
        rows = self.train(solo, tmp_path)
        steps = [row for row in rows if "step" in row]
        assert [row["step"] for row in steps] == list(range(6))
        assert [row["samples"] for row in steps] == [2, 2, 1, 2, 2, 1]
        assert [row["epoch"] for row in steps] == [0, 0, 0, 1, 1, 1]
        assert all(row["seconds"] > 0 for row in steps)
        assert [row for row in rows if "means" in row] == [
            {"epoch": epoch, "training": False, "means": {"accuracy": 1.0}} for epoch in (0, 1)
        ]

    def test_run_ends_after_the_requested_steps(self, solo: World, tmp_path: Path) -> None:
        with pytest.raises(SystemExit) as ended:
            self.train(solo, tmp_path, stop_after=4)
        assert ended.value.code == 0
        assert records.steps_made(tmp_path) == 4

    def test_resumed_run_counts_only_its_own_steps(self, tmp_path: Path) -> None:
        log = StepLog(tmp_path, 0, stop_after=2)
        log.stepped(0, 201, OUTCOME)
        with pytest.raises(SystemExit):
            log.stepped(0, 202, OUTCOME)
        log.close()

    def test_rank_that_joins_counts_the_steps_of_the_others(self, tmp_path: Path) -> None:
        (tmp_path / "rank-3.jsonl").write_text("{}\n")  # of the same rank, before it was lost
        log = StepLog(None, 0, stop_after=7)
        log.join(str(tmp_path), 3, 5)
        log.stepped(0, 6, OUTCOME)
        with pytest.raises(SystemExit):
            log.stepped(0, 7, OUTCOME)
        log.close()
        rows = [json.loads(line) for line in (tmp_path / "rank-3.jsonl").read_text().splitlines()]
        assert [row.get("step") for row in rows] == [None, 5, 6]

    def test_rank_that_joins_continues_without_a_log(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        log = StepLog(None, 0)
        log.join(str(tmp_path / "file"), 3, 5)
        log.stepped(0, 6, OUTCOME)
        assert "shardwise: rank 3: --record" in capsys.readouterr().err

    def test_time_between_steps_does_not_count(self, clock: Clock, tmp_path: Path) -> None:
        log = StepLog(tmp_path, 0)
        log.asked()
        log.closed()  # the epoch is over; now an evaluation follows
        clock.now = 5.0
        log.asked()
        log.given(4, epoch=1)
        clock.now = 6.0
        log.stepped(0, 1, OUTCOME)
        log.close()
        row = json.loads((tmp_path / "rank-0.jsonl").read_text())
        assert row["seconds"] == 1.0

    def test_means_of_a_later_training_are_ignored(self, tmp_path: Path) -> None:
        log = StepLog(tmp_path, 0)
        for engines, accuracy in ([0, 1], 0.5), ([1, 0, 1, 1], 0.6), ([1], 0.1), ([2], 0.2):
            log.began()
            for engine in engines:
                log.given(4)
                log.stepped(engine, 1, OUTCOME)
            log.closed()
            log.measured({"accuracy": accuracy}, training=True)
            log.measured({"accuracy": accuracy}, training=False)
        log.close()
        rows = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
        found = [row["means"]["accuracy"] for row in rows if "means" in row]
        assert found == [0.5, 0.5, 0.6, 0.6]

    @pytest.mark.parametrize("of", ["sw.Loader", "torch's DataLoader"])
    def test_batch_before_a_break_does_not_count_for_the_next_step(
        self, of: str, solo: World, clock: Clock, tmp_path: Path
    ) -> None:
        solo.step_log = StepLog(tmp_path, 0)
        data = torch.utils.data.TensorDataset(torch.ones(6, 2))
        samples = SampleCounter(solo.step_log) if of != "sw.Loader" else None
        loader = torch.utils.data.DataLoader(data, 2) if samples else sw.Loader(data, batch_size=2)
        for _ in loader:
            break
        clock.now = 5.0
        for steps, _ in enumerate(loader, 1):
            clock.now += 1.0
            solo.step_log.stepped(0, steps, OUTCOME)
            if steps == 2:
                break
        clock.now = 20.0
        for _ in loader:
            break
        clock.now = 21.0
        solo.step_log.stepped(0, 3, OUTCOME)  # for the current batch
        if samples:
            samples.close()
        solo.step_log.close()
        rows = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
        assert [row["samples"] for row in rows] == [2, 2, 2]
        assert [row["seconds"] for row in rows] == [1.0, 1.0, 1.0]


def test_batch_per_worker(solo: World) -> None:
    solo.size = 3
    solo.settings = Settings(batch="worker")
    data = torch.utils.data.TensorDataset(torch.ones(60, 2))
    assert sw.Loader(data, batch_size=5).batch_size == 15
    with pytest.raises(sw.errors.DataError, match="so --batch worker cannot be applied"):
        sw.Loader(data, batch_sampler=[[0, 1, 2], [3, 4, 5]])


def measured(value: float, **changed: Any) -> Measured:
    known: dict[str, Any] = {"steps": 20, "dropped": 5, "batch": 64, "seconds": 0.1}
    known |= {"rate": Rate(value, value - 2, value + 2), "loss": {0: 2.0, 1: 1.0}}
    return Measured(**known | changed)


@pytest.fixture
def made(tmp_path: Path) -> ScalingReport:
    plan = ScalingPlan(
        words=("<train>.py",),
        flags=(),
        sizes=(1, 2, 4),
        kinds=("strong", "weak"),
        warmup=5,
        steps=None,
        out=tmp_path,
    )
    curves = {"training accuracy": {0: 0.1}, "evaluation accuracy": {0: 0.5, 1: 0.9}}
    runs = [
        MeasuredRun(kind="strong", workers=1, log=tmp_path, wall=1.0, measured=measured(100)),
        MeasuredRun(
            kind="strong", workers=2, log=tmp_path, wall=1.0, measured=measured(150, means=curves)
        ),
        MeasuredRun(kind="strong", workers=4, log=tmp_path, wall=1.0, error="exit code 1: <boom>"),
        MeasuredRun(kind="weak", workers=2, log=tmp_path, wall=1.0, measured=measured(160)),
        MeasuredRun(kind="weak", workers=4, log=tmp_path, wall=1.0, measured=measured(240)),
    ]
    return ScalingReport(plan=plan, runs=runs)


def test_efficiency_is_relative_to_the_smallest_measured_size(made: ScalingReport) -> None:
    assert [(row.speedup, row.efficiency) for row in made.rows("strong")] == [(1, 1), (1.5, 0.75)]
    assert [(row.speedup, row.efficiency) for row in made.rows("weak")] == [(2, 1), (3, 0.75)]


def test_notes_explain_horovod_scripts(made: ScalingReport) -> None:
    assert not any("torch.no_grad()" in note for note in made.notes())
    horovod = replace(made.runs[0], measured=measured(100, loss={}))
    assert any("torch.no_grad()" in note for note in replace(made, runs=[horovod]).notes())


def test_notes_explain_loss_and_accuracy(made: ScalingReport) -> None:
    notes = " ".join(made.notes())
    assert "loss is the mean training loss of the last epoch" in notes
    assert "accuracy is the last evaluation accuracy that" in notes
    trained = replace(made.runs[0], measured=measured(9, means={"training Acc": {0: 0.1}}))
    both = replace(made, runs=[*made.runs, trained])
    assert "the last evaluation accuracy or training Acc that" in " ".join(both.notes())
    bare = replace(made, runs=[replace(made.runs[0], measured=measured(9, loss={}))])
    assert not any(note.startswith(("loss is", "accuracy is")) for note in bare.notes())


def test_dropped_steps_are_not_measured(
    made: ScalingReport, capsys: pytest.CaptureFixture[str]
) -> None:
    measure._say(made.runs[0], Console(width=200))
    said = capsys.readouterr().out
    assert said.endswith("100 samples/s over 15 steps, without the first 5\n")


def test_table_has_no_empty_column(made: ScalingReport) -> None:
    def headings(report_: ScalingReport) -> list[object]:
        return [column.header for column in report.table(report_).columns]

    assert headings(made) == list(report.COLUMNS)
    bare = [replace(run, measured=measured(9, loss={})) for run in made.runs if run.measured]
    assert headings(replace(made, runs=bare)) == list(report.COLUMNS)[:-2]


def test_json_and_csv_contain_every_run(made: ScalingReport, tmp_path: Path) -> None:
    report.write(made, tmp_path)
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert [each["error"] for each in found["results"]] == [None] * 2 + [
        "exit code 1: <boom>",
        None,
        None,
    ]
    assert found["results"][1]["final_accuracy"] == 0.9
    assert found["results"][1]["low"] == 148
    rows = list(csv.DictReader((tmp_path / "scaling.csv").read_text().splitlines()))
    assert [row["efficiency"] for row in rows] == ["1.0", "0.75", "", "1.0", "0.75"]


def test_page_is_self_contained_and_shows_failures(made: ScalingReport, tmp_path: Path) -> None:
    pictures = plots.draw(made, tmp_path)
    assert list(pictures) == ["throughput", "efficiency", "loss", "accuracy"]
    for name in pictures:
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    plots.write_report_page(made, pictures, tmp_path / "scaling.html")
    html = (tmp_path / "scaling.html").read_text()
    assert html.count("<svg") == 4
    assert "The last evaluation accuracy of each epoch." in html
    assert "&lt;boom&gt;" in html
    assert "<boom>" not in html
    assert "&lt;train&gt;.py" in html
    for fetched in ("src=", "<script", "@import", 'href="http'):
        assert fetched not in html.replace('xlink:href="#', "")
    assert "#2563a8" not in html.split("</style>")[1], "colors are those of the page"


@pytest.mark.parametrize(("epochs", "unit"), [(1, "step"), (2, "epoch")])
def test_losses_of_a_single_epoch_are_drawn_by_step(
    made: ScalingReport, epochs: int, unit: str
) -> None:
    loss = {epoch: 2.0 - epoch for epoch in range(epochs)}
    found = measured(100, loss=loss, losses={0: 2.5, 1: 2.0, 2: 1.5})
    axes = Figure().subplots()
    plots._loss(axes, replace(made, runs=[replace(made.runs[0], measured=found)]))
    (line,) = axes.get_lines()
    assert axes.get_xlabel() == unit
    assert list(line.get_ydata()) == [[2.5, 2.0, 1.5], [2.0, 1.0]][unit == "epoch"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["-n", "2,x", "train.py"], "numbers of workers such as 1,2,4,8"),
        (["-n", "0", "train.py"], "numbers of workers"),
        ([], "No script given. Example: shardwise scale"),
        (["--zero", "7", "train.py"], "zero"),
    ],
)
def test_refuses_wrong_arguments_with_a_remedy(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_removes_only_files_of_an_earlier_run(tmp_path: Path) -> None:
    for name in ("output.txt", "rank-0.jsonl", "rank-0.pt", "notes.txt"):
        (tmp_path / name).write_text("")
    assert runs._folder(tmp_path) == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0.pt", "notes.txt"}


def test_ticks_of_a_narrow_accuracy_range_differ(
    made: ScalingReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "accuracy", lambda _: {0: 0.1490, 1: 0.1530})
    picture = plots.draw(made, tmp_path)["accuracy"]
    ticks = re.findall(r">(1[45][.\d]*%)<", picture)
    assert len(ticks) >= 3
    assert len(set(ticks)) == len(ticks)
