"""Simulated runs against formulas and against each device simulated alone, and bad files."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shardwise.cli.main import main
from shardwise.config.values import duration
from shardwise.errors import ConfigError
from shardwise.tools.simulate.failure_classes import DAY, Topology, names, read_failures
from shardwise.tools.simulate.flags import command
from shardwise.tools.simulate.goodput import best_interval, simulate
from shardwise.tools.simulate.run_model import CAUSES, RunModel, daly, largest_of, young
from shardwise.tools.simulate.trial import Trial
from tests.unit.simulation.runs import check_goodput, failing, model


class TestWithoutFailures:
    def test_only_saves_cost_time_without_failures(self) -> None:
        outcome = Trial(model(), 0).run()
        assert outcome.whole
        assert outcome.useful == pytest.approx(10 * DAY, rel=1e-12)
        # One save after each thousand seconds of work, except after the last.
        assert outcome.lost["saves"] == pytest.approx(20 * (10 * DAY / 1000 - 1), abs=20.1)
        assert sum(outcome.lost.values()) + outcome.useful == pytest.approx(outcome.wall)

    def test_slowest_device_sets_the_pace(self) -> None:
        outcome = Trial(model(save=0.0, jitter=0.02), 0).run()
        assert outcome.goodput == pytest.approx(1 / (1 + 0.02 * largest_of(1024)[0]))

    @pytest.mark.parametrize(("count", "expected"), [(2, 0.56419), (10, 1.53875), (1000, 3.24144)])
    def test_mean_of_the_largest_normal_number(self, count: int, expected: float) -> None:
        # Expected values of the largest order statistic: Harter (1961), table 1.
        assert largest_of(count)[0] == pytest.approx(expected, abs=2e-4)


class TestBooks:
    """The parts of the time add up to the total."""

    @pytest.mark.parametrize("seed", range(5))
    def test_parts_add_up_to_the_wall_time(self, seed: int) -> None:
        kinds = (
            replace(failing(6, "host", detect=60.0, repair=DAY / 4), name="host"),
            replace(failing(2, "rack", detect=600.0, repair=DAY / 8), name="rack"),
            replace(failing(3, planned=True), name="planned"),
            replace(failing(4, "device", slowdown=1.5, lasts=3600.0), name="slow"),
        )
        made = model(*kinds, spares=2, least=100, jitter=0.01, background=90.0)
        outcome = Trial(made, seed).run()
        assert outcome.whole
        assert outcome.useful + sum(outcome.lost.values()) == pytest.approx(outcome.wall)
        assert outcome.useful == pytest.approx(made.work)
        spent = set(CAUSES) - {"waiting", "boundaries", "rejoining", "reconnecting"}
        assert all(outcome.lost[cause] > 0 for cause in spent)
        for kind, seconds in {"useful": outcome.useful, **outcome.lost}.items():
            assert sum(outcome.bins[kind]) == pytest.approx(seconds)
            assert min(outcome.bins[kind]) >= 0
        assert len(outcome.moments) == sum(outcome.failures.values())

    def test_equal_seeds_give_equal_runs(self) -> None:
        made = model(failing(10))
        first, again, other = (Trial(made, seed).run() for seed in (1, 1, 2))
        assert first == again
        assert first.wall != other.wall


class TestFailures:
    def test_number_of_failures_matches_the_rate(self) -> None:
        made = model(failing(20, "device"), restart=0.0, save=0.0)
        found = simulate(made, 20, 0)
        expected = 20 * found.wall.mean / DAY
        assert found.failures["it"] == pytest.approx(expected, abs=4 * math.sqrt(expected / 20))

    def test_run_without_spares_waits_for_repair(self) -> None:
        waits = Trial(model(failing(1, "host", repair=DAY / 2)), 3).run()
        spared = Trial(model(failing(1, "host", repair=DAY / 2), spares=20), 3).run()
        assert waits.lost["waiting"] > DAY
        assert spared.lost["waiting"] == 0

    def test_run_continues_slower_on_fewer_hosts(self) -> None:
        outcome = Trial(model(failing(2, "host", repair=DAY / 2), least=64), 3).run()
        assert outcome.lost["waiting"] == 0
        assert 0 < outcome.lost["fewer"] < 0.05 * outcome.wall

    def test_background_checkpoint_counts_once_complete(self) -> None:
        at_once = simulate(model(failing(40)), 10, 0)
        later = simulate(model(failing(40), background=900.0), 10, 0)
        assert later.lost["lost"] > at_once.lost["lost"] + 0.1

    def test_earlier_detection_costs_less(self) -> None:
        slow = simulate(model(failing(10, detect=1800.0)), 10, 0)
        fast = simulate(model(failing(10, detect=1800.0), detect=30.0), 10, 0)
        assert slow.lost["detection"] == pytest.approx(60 * fast.lost["detection"], rel=0.2)

    def test_planned_stop_loses_no_work(self) -> None:
        outcome = Trial(model(failing(5, planned=True)), 0).run()
        assert outcome.failures["it"] > 10
        assert outcome.lost["lost"] == 0

    def test_lost_host_costs_the_step_in_progress(self) -> None:
        made = model(failing(5, "host", detect=30.0, repair=1e9), reconnect=2.0, spares=200)
        assert made.failure_rate == 0
        outcome = Trial(made, 0, [15.0, 2047.0]).run()
        # A step takes 10 s, so the first loss is 5 s after the start of the second step. After the
        # detection, the reconnection and the admission, the run continues at 69 s. It works for
        # 1,000 s, saves for 20 s and works for 958 s, so the second loss is 8 s after a start.
        assert outcome.failures == {"it": 2}
        assert outcome.stops == 0
        assert outcome.lost["detection"] == pytest.approx(60)
        assert outcome.lost["reconnecting"] == pytest.approx(2 * (2 + 22))
        assert outcome.lost["lost"] == pytest.approx(5 + 8)
        assert outcome.lost["fewer"] == outcome.lost["restart"] == 0

    def test_run_without_spares_continues_with_fewer_hosts(self) -> None:
        made = model(failing(5, "host", repair=1e9), reconnect=2.0)
        outcome = Trial(made, 0, [15.0]).run()
        assert outcome.lost["restart"] == outcome.lost["waiting"] == 0
        assert outcome.lost["reconnecting"] == pytest.approx(2)
        assert outcome.lost["fewer"] == pytest.approx((made.work - 10) / 127, rel=1e-6)

    @pytest.mark.parametrize("scope", ["rack", "pod", "job"])
    def test_other_failures_stop_the_run(self, scope: str) -> None:
        made = model(failing(5, scope, repair=100.0), reconnect=2.0)
        assert made.failure_rate == pytest.approx(5 / DAY)
        outcome = Trial(made, 0, [1500.0]).run()
        assert outcome.stops == 1
        assert outcome.lost["restart"] == pytest.approx(300)

    def test_run_that_never_ends_is_stopped(self) -> None:
        found = simulate(model(failing(2000), interval=5000.0, work=DAY), 1, 0)
        assert found.unfinished == 1
        assert found.goodput.mean < 0.05


def test_rare_failures_match_the_formula() -> None:
    """If failures are far apart, each costs half an interval, its save, and the restart."""
    made = model(failing(0.5), interval=2000.0, save=10.0, work=200 * DAY)
    found = simulate(made, 20, 0)
    gap = DAY / 0.5
    expected = 1 - 10 / 2010 - (1000 + 5 + 300) / gap
    assert found.goodput.mean == pytest.approx(expected, abs=0.002)


def test_best_interval_is_near_youngs() -> None:
    made = model(failing(8), save=30.0, work=40 * DAY)
    best, tried = best_interval(made, 10, 0)
    assert young(made.failure_rate, 30.0) / 1.5 < best < young(made.failure_rate, 30.0) * 1.5
    assert max(tried, key=lambda each: each[1].mean)[0] == best
    assert daly(made.failure_rate, 30.0) == young(made.failure_rate, 30.0) - 30.0


def device_by_device(made: RunModel, random: np.random.Generator) -> float:
    """Return the goodput of one run where each device has its own clock and step times.

    A failure stops the run at the end of a second.
    """
    count = made.topology.devices
    (failure,) = made.failures
    dies = random.exponential(1 / failure.rate, count)
    now = work = kept = 0.0
    unsaved = 0
    while work < made.work:
        step = made.step * (1 + made.jitter * random.standard_normal(count).max())
        ends = now + step
        saves = unsaved + 1 == round(made.interval / made.step) and work + made.step < made.work
        if (first := dies.min()) < ends + (made.save if saves else 0.0):
            work, unsaved = kept, 0
            now = max(first, now) + failure.detect
            while True:  # a failure during a restart starts it over
                dies = np.where(
                    dies <= now, now + random.exponential(1 / failure.rate, count), dies
                )
                if dies.min() > now + made.restart:
                    now += made.restart
                    break
                now = dies.min() + failure.detect
            continue
        now, work, unsaved = ends, work + made.step, unsaved + 1
        if saves:
            now, kept, unsaved = now + made.save, work, 0
    return work / now


@pytest.mark.full  # simulates the failures of every device
def test_one_poisson_process_matches_1024_devices() -> None:
    made = model(
        failing(30, "device", detect=60.0), work=0.5 * DAY, jitter=0.03, interval=500.0, save=15.0
    )
    random = np.random.default_rng(0)
    one_by_one = [device_by_device(made, random) for _ in range(60)]
    check_goodput(made, 400, one_by_one)


class TestCatalogue:
    def test_llama3_rates_match_its_paper(self) -> None:
        failures = read_failures("llama3")
        topology = Topology(2048, 8, failures.hosts_per_rack, failures.racks_per_pod)
        per_second = {each.name: each.rate_over(topology) for each in failures.classes}
        assert sum(per_second.values()) * 54 * DAY == pytest.approx(466)
        assert per_second["gpu"] * 54 * DAY == pytest.approx(148)

    def test_every_class_of_llama_3_fails_less_often_on_fewer_devices(self) -> None:
        """The paper counts 466 stops of one job on 16,384 devices; 32 devices have 1/512."""
        failures = read_failures("llama3")
        few = Topology(4, 8, failures.hosts_per_rack, failures.racks_per_pod)
        per_run = {each.name: each.rate_over(few) * 54 * DAY for each in failures.classes}
        assert per_run["software"] == pytest.approx(54 / 512)
        assert per_run["planned"] == pytest.approx(47 / 512)
        assert sum(per_run.values()) == pytest.approx(466 / 512)

    def test_job_failures_do_not_depend_on_size(self, tmp_path: Path) -> None:
        path = tmp_path / "own.toml"
        path.write_text(
            "title='x'\n[sources.log]\ntext='log'\ndate='2026-10'\n[class.a]\ntitle='a'\n"
            "scope='job'\nper_1000_days = { value = 1000, from = 'log' }\n"
        )
        (only,) = read_failures(str(path)).classes
        rates = [only.rate_over(Topology(hosts, 8, 1, 1)) * DAY for hosts in (1, 1000)]
        assert rates == pytest.approx([1, 1])

    @pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.80), (131_072, 0.23)])
    def test_rsc1_rates_match_their_paper(self, gpus: int, hours: float) -> None:
        made = model(*read_failures("rsc1").classes)
        made = replace(made, topology=Topology(gpus // 8, 8, 1, 1))
        assert 1 / made.failure_rate / 3600 == pytest.approx(hours, abs=0.006)

    @pytest.mark.parametrize("name", names())
    def test_reads_every_file_of_the_package(self, name: str) -> None:
        assert all(each.rate > 0 for each in read_failures(name).classes)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("title = 'x'", "it has no [class.NAME]"),
            ("titel = 'x'", "Did you mean title?"),
            (
                "title = 'x'\n[class.a]\ntitle='a'\nscope='galaxy'",
                "scope must be one of device, host",
            ),
            (
                "title = 'x'\n[sources.s]\ntext='s'\ndate='1'\n[class.a]\ntitle='a'\n"
                "scope='host'\nper={value='device', from='s'}",
                "per must be one of device, host, rack, pod, job, and needs scope job",
            ),
            (
                "title = 'x'\n[class.a]\ntitle='a'\nscope='host'",
                "needs either count or per_1000_days",
            ),
            (
                "title = 'x'\n[class.a]\ntitle='a'\nscope='host'\ncount={value=1,from='s'}",
                "there is no [sources.s]",
            ),
            (
                "title = 'x'\n[sources.s]\ntext='t'\ndate='2026'\n"
                "[class.a]\ntitle='a'\nscope='host'\ncount={value=1,from='s'}",
                "[observed] needs days",
            ),
            (
                "title = 'x'\n[sources.s]\ntext='t'\ndate='2026'\n"
                "[class.a]\ntitle='a'\nscope='host'\nper_1000_days={value=-1,from='s'}",
                "must be a number above 0",
            ),
            ("title = ", "cannot be read as TOML"),
        ],
    )
    def test_error_in_a_file_is_one_sentence(self, tmp_path: Path, text: str, words: str) -> None:
        file = tmp_path / "mine.toml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"mine\.toml") as raised:
            read_failures(str(file))
        assert words in str(raised.value)

    def test_suggests_the_nearest_name(self) -> None:
        with pytest.raises(ConfigError, match=r"Did you mean llama3\?"):
            read_failures("lama3")


class TestCommand:
    def test_command_writes_page_plot_and_json(self, tmp_path: Path) -> None:
        words = [
            *("--on", "16x8xH100", "--days", "5", "--spares", "1", "--trials", "4"),
            *("--json", str(tmp_path / "found.json"), "--out", str(tmp_path / "out")),
        ]
        done = CliRunner().invoke(command(), words)
        assert done.exit_code == 0, done.output
        assert done.output.startswith("5 days of steps on 16x8xH100 take ")
        found = json.loads((tmp_path / "found.json").read_text())
        assert 0.5 < found["goodput"]["mean"] < 1
        assert sum(found["lost"].values()) + found["goodput"]["mean"] == pytest.approx(1, abs=0.01)
        assert "<svg" in (tmp_path / "out" / "simulate.html").read_text()
        assert (tmp_path / "out" / "simulate.png").stat().st_size > 10_000

    def test_islands_are_compared_with_a_run_that_stops_as_a_whole(self, tmp_path: Path) -> None:
        words = [
            *("--on", "16x8xH100", "--days", "5", "--islands", "host", "--trials", "4"),
            *("--parameters", "1e9", "--between", "1000", "--wire", "int8"),
            *("--json", str(tmp_path / "found.json"), "--out", str(tmp_path / "out")),
        ]
        done = CliRunner().invoke(command(), words)
        assert done.exit_code == 0, done.output
        assert "16 islands of 1 host synchronise parameters every 30 steps" in done.output
        assert done.output.count("shardwise run supports less than this so far") == 1
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["boundary_seconds"] == pytest.approx(15 * 8.125, rel=1e-3)
        assert found["goodput"]["mean"] > found["goodput_without_islands"]["mean"]

    def test_prints_the_interval_that_it_simulated(self, tmp_path: Path) -> None:
        words = [
            *("--on", "1x8xH100", "--days", "2", "--islands", "2", "--trials", "2", "--step", "10"),
            *("--save-every", "60s", "--json", str(tmp_path / "found.json")),
            *("--out", str(tmp_path / "out")),
        ]
        done = CliRunner().invoke(command(), words)
        assert done.exit_code == 0, done.output
        assert "2 islands of 4 devices" in done.output
        assert "checkpoints are 300 s of steps apart" in done.output
        assert json.loads((tmp_path / "found.json").read_text())["interval_seconds"] == 300

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("--on 4x8xH100 --min-hosts 5", "the run has only 4 hosts"),
            ("--on 4x8xH1000", "no device"),
            ("--on 4x8xH100 --save-every soon", "--save-every takes a duration"),
            ("--on 4x8xH100 --days 0", "--days takes a duration above 0"),
            ("--on 4x8xH100 --failures nil", "no such file"),
            ("--on 4x8xH100 --islands 3", "4 hosts cannot be divided"),
            ("--on 4x8xH100 --islands 2 --min-hosts 3", "Leave --min-hosts out"),
            ("--on 4x8xH100 --islands 2 --between 100", "needs --parameters"),
            ("--on 4x8xH100 --between 100 --parameters 1e9", "--between, --parameters without"),
            (
                "--on 4x8xH100 --equal-every 9 --wire int8",
                "--equal-every, --wire without --islands",
            ),
            ("--on 4x8xH100 --islands 2 --late 3", "--late without --between MBITS"),
            ("--on 4x8xH100 --islands 2 --wire int8 --parameters 1e9", "--parameters, --wire"),
            ("--on 1x8xH100 --islands 3", "8 devices cannot be divided"),
            ("--on 1x8xH100 --islands 2 --spares 1", "Leave --spares out"),
            ("--on 4x8xH100 --islands 2 --late 40", "--late 29 or less"),
            ("", "Missing option"),
        ],
    )
    def test_bad_input_is_one_sentence(
        self, words: str, said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["simulate", *words.split()]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error

    @pytest.mark.parametrize(
        ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("4d", 345600), ("7", 7)]
    )
    def test_parses_durations(self, text: str, seconds: float) -> None:
        assert duration("s")(text) == seconds
