"""Rates and their intervals, what ranks recorded, and what is written of it."""

import csv
import json
import math
import random
import re
import time
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
from shardwise.world.step_log import StepLog
from shardwise.world.world import World

QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 19: 2.093, 100: 1.984}


@pytest.mark.parametrize(("degrees", "expected"), QUANTILES.items())
def test_quantiles_of_student(degrees: int, expected: float) -> None:
    assert student(0.975, degrees) == pytest.approx(expected, abs=5e-3)


def test_a_rate_is_all_samples_over_all_time() -> None:
    found = rate([100, 100, 20], [1.0, 1.0, 0.5])
    assert found.value == 220 / 2.5
    assert rate([64] * 8, [0.5] * 8) == Rate(128, 128, 128)
    alone = rate([64], [0.5])
    assert alone.value == 128
    assert math.isnan(alone.low)


def test_the_interval_holds_the_true_rate_19_times_in_20() -> None:
    """For steps whose lengths are independent of each other."""
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


def test_records_of_all_ranks_are_put_together(tmp_path: Path) -> None:
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


def test_jitter_in_when_ranks_end_a_step_changes_no_rate(tmp_path: Path) -> None:
    for rank in (0, 1):  # by turns, one ends 0.1 s later than the other
        record(tmp_path, rank, [step(n, seconds=1.1 - 0.2 * ((n + rank) % 2)) for n in range(8)])
    assert records.read(tmp_path, ranks=2, warmup=2).rate.value == pytest.approx(16.0)


def test_a_run_of_too_few_steps_says_what_to_do(tmp_path: Path) -> None:
    record(tmp_path, 0, [step(0), step(1)])
    with pytest.raises(TooFew, match="a smaller --warmup"):
        records.read(tmp_path, ranks=1, warmup=5)
    record(tmp_path, 1, [])
    with pytest.raises(TooFew, match="made no step"):
        records.read(tmp_path, ranks=2, warmup=0)


def test_records_that_lie_on_another_host_are_missed(tmp_path: Path) -> None:
    record(tmp_path, 0, [step(0), step(1)])
    with pytest.raises(TooFew, match=r"no record of rank\(s\) 1, 2: .* all of them share"):
        records.read(tmp_path, ranks=3, warmup=0)


def test_a_run_whose_samples_nobody_counted_says_whose_are(tmp_path: Path) -> None:
    record(tmp_path, 0, [step(0), *(step(n, samples=0) for n in range(1, 4))])
    with pytest.raises(TooFew, match=r"no samples were counted.*sw\.Loader"):
        records.read(tmp_path, ranks=1, warmup=1)


OUTCOME = SimpleNamespace(loss=1.0, weight=4.0)


class TestStepLog:
    def train(self, world: World, folder: Path, stop_after: int | None = None) -> list[Any]:
        """What is recorded of 2 epochs of 5 samples, in batches of 2, with evaluations."""
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

    def test_the_run_ends_after_the_steps_that_were_asked_for(
        self, solo: World, tmp_path: Path
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            self.train(solo, tmp_path, stop_after=4)
        assert ended.value.code == 0
        assert records.steps_made(tmp_path) == 4

    def test_a_run_that_resumes_makes_as_many_steps_of_its_own(self, tmp_path: Path) -> None:
        log = StepLog(tmp_path, 0, stop_after=2)
        log.stepped(0, 201, OUTCOME)
        with pytest.raises(SystemExit):
            log.stepped(0, 202, OUTCOME)
        log.close()

    def test_what_lies_between_steps_is_not_of_them(self, tmp_path: Path) -> None:
        log = StepLog(tmp_path, 0)
        log.asked()
        log.closed()  # the epoch was over; now comes an evaluation
        time.sleep(0.5)
        log.asked()
        log.given(4, epoch=1)
        log.stepped(0, 1, OUTCOME)
        log.close()
        row = json.loads((tmp_path / "rank-0.jsonl").read_text())
        assert row["seconds"] < 0.4

    def test_means_of_a_later_training_are_left_out(self, tmp_path: Path) -> None:
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
    def test_a_batch_that_a_break_left_is_not_of_the_next_step(
        self, of: str, solo: World, tmp_path: Path
    ) -> None:
        solo.step_log = StepLog(tmp_path, 0)
        data = torch.utils.data.TensorDataset(torch.ones(6, 2))
        samples = SampleCounter(solo.step_log) if of != "sw.Loader" else None
        loader = torch.utils.data.DataLoader(data, 2) if samples else sw.Loader(data, batch_size=2)
        for _ in loader:
            break
        time.sleep(0.5)
        for steps, _ in enumerate(loader, 1):
            solo.step_log.stepped(0, steps, OUTCOME)
            if steps == 2:
                break
        time.sleep(0.5)
        for _ in loader:
            break
        solo.step_log.stepped(0, 3, OUTCOME)  # of the batch in hand
        if samples:
            samples.close()
        solo.step_log.close()
        rows = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
        assert [row["samples"] for row in rows] == [2, 2, 2]
        assert max(row["seconds"] for row in rows) < 0.4


def test_a_batch_of_each_worker(solo: World) -> None:
    solo.size = 3
    solo.settings = Settings(batch="worker")
    data = torch.utils.data.TensorDataset(torch.ones(60, 2))
    assert sw.Loader(data, batch_size=5).batch_size == 15
    with pytest.raises(sw.errors.DataError, match="--batch worker cannot make larger"):
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


def test_efficiency_is_against_the_smallest_size_that_ran(made: ScalingReport) -> None:
    assert [(row.speedup, row.efficiency) for row in made.rows("strong")] == [(1, 1), (1.5, 0.75)]
    assert [(row.speedup, row.efficiency) for row in made.rows("weak")] == [(2, 1), (3, 0.75)]


def test_what_counts_in_a_horovod_script_is_noted(made: ScalingReport) -> None:
    assert not any("torch.no_grad()" in note for note in made.notes())
    horovod = replace(made.runs[0], measured=measured(100, loss={}))
    assert any("torch.no_grad()" in note for note in replace(made, runs=[horovod]).notes())


def test_it_is_said_which_loss_and_which_accuracy_are_shown(made: ScalingReport) -> None:
    notes = " ".join(made.notes())
    assert "loss is the mean training loss of the last epoch" in notes
    assert "accuracy is the last evaluation accuracy that" in notes
    trained = replace(made.runs[0], measured=measured(9, means={"training Acc": {0: 0.1}}))
    both = replace(made, runs=[*made.runs, trained])
    assert "the last evaluation accuracy or training Acc that" in " ".join(both.notes())
    bare = replace(made, runs=[replace(made.runs[0], measured=measured(9, loss={}))])
    assert not any(note.startswith(("loss is", "accuracy is")) for note in bare.notes())


def test_steps_that_were_dropped_are_not_among_the_measured(
    made: ScalingReport, capsys: pytest.CaptureFixture[str]
) -> None:
    measure._say(made.runs[0], Console(width=200))
    said = capsys.readouterr().out
    assert said.endswith("100 samples/s over 15 steps, after 5 that were dropped\n")


def test_the_table_has_no_column_without_a_figure(made: ScalingReport) -> None:
    def headings(report_: ScalingReport) -> list[object]:
        return [column.header for column in report.table(report_).columns]

    assert headings(made) == list(report.COLUMNS)
    bare = [replace(run, measured=measured(9, loss={})) for run in made.runs if run.measured]
    assert headings(replace(made, runs=bare)) == list(report.COLUMNS)[:-2]


def test_json_and_csv_have_every_run(made: ScalingReport, tmp_path: Path) -> None:
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


def test_the_page_is_in_itself_and_says_what_failed(made: ScalingReport, tmp_path: Path) -> None:
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
def test_losses_are_drawn_by_step_where_there_is_one_epoch(
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
def test_wrong_use_is_explained(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", *words]) == 2
    assert complaint in capsys.readouterr().err


SETTLED = """\
import shardwise as sw
world = sw.init(quiet=True)
print(world.settings.batch)
"""


@pytest.mark.parametrize(("kind", "batch"), [("strong", "total"), ("weak", "worker")])
def test_the_kind_says_what_a_batch_counts_whatever_else_is_set(
    kind: str, batch: str, made: ScalingReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "settled.py"
    script.write_text(SETTLED)
    monkeypatch.setenv("SHARDWISE_BATCH", "worker" if kind == "strong" else "total")
    ended = runs.run(replace(made.plan, words=(str(script),)), kind, 1, lambda steps: None)
    assert ended.log.read_text().splitlines()[-1] == batch


def test_only_what_an_earlier_run_left_is_removed(tmp_path: Path) -> None:
    for name in ("output.txt", "rank-0.jsonl", "rank-0.pt", "notes.txt"):
        (tmp_path / name).write_text("")
    assert runs._folder(tmp_path) == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0.pt", "notes.txt"}


def test_ticks_of_a_narrow_range_of_accuracies_differ(
    made: ScalingReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "accuracy", lambda _: {0: 0.1490, 1: 0.1530})
    picture = plots.draw(made, tmp_path)["accuracy"]
    ticks = re.findall(r">(1[45][.\d]*%)<", picture)
    assert len(ticks) >= 3
    assert len(set(ticks)) == len(ticks)
