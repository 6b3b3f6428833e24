"""Simulated islands against islands one by one, against formulas, and how they are divided."""

from dataclasses import replace

import numpy as np
import pytest

from shardwise.config.outer_optimizer import IslandRule
from shardwise.tools.simulate.failure_classes import DAY, FailureClass, Topology
from shardwise.tools.simulate.goodput import intervals_around, simulate, stops_per_second
from shardwise.tools.simulate.island_trial import IslandTrial
from shardwise.tools.simulate.run_model import CAUSES, RunModel, young
from shardwise.tools.simulate.slow_links import SlowLinks
from shardwise.tools.simulate.trial import Trial
from tests.unit.simulation.runs import HOSTS, check_goodput, failing, model


def island_by_island(made: RunModel, random: np.random.Generator) -> float:
    """Return the goodput of one run, round by round.

    Each island has a clock, each host fails independently, and each step waits for the slowest
    device of its island.
    """
    islands, (failure,) = range(made.islands), made.failures
    hosts = made.topology.hosts // made.islands
    dies = random.exponential(1 / failure.rate, (made.islands, hosts))
    ready = np.zeros(made.islands)
    away: set[int] = set()
    now = work = kept = 0.0
    rounds = 0

    def redraw(island: int, second: float) -> None:
        old = dies[island]
        old[old <= second] = second + random.exponential(1 / failure.rate, (old <= second).sum())

    def kill(island: int) -> float:
        second = float(dies[island].min())
        ready[island] = second + failure.detect + made.restart
        redraw(island, second)
        return second + failure.detect

    def steps() -> float:
        devices = random.standard_normal((made.every, hosts * made.topology.devices_per_host))
        return float(made.step * (made.every + made.jitter * devices.max(axis=1).sum()))

    while work < made.work * made.islands:
        if len(away) == made.islands:
            now = max(now, ready.min())
        for island in away:
            while dies[island].min() < min(ready[island], now):  # it restarts again
                kill(island)
        still = {island for island in away if ready[island] > now}
        if len(still) < len(away) < made.islands:  # the others save for rejoining islands
            now, kept = now + made.save, work
        away = still
        present = set(islands) - away
        ends = {island: now + steps() for island in present}
        noticed = 0.0
        while present:
            until = max(*(ends[island] for island in present), noticed) + made.boundary
            first = min(present, key=lambda island: dies[island].min())
            if dies[first].min() >= until:
                break
            noticed = max(noticed, kill(first))
            present.remove(first)
            away.add(first)
        if not present:
            work, now, rounds = kept, noticed - failure.detect, 0
            continue
        now, work, rounds = until, work + len(present) * made.every * made.step, rounds + 1
        if rounds == round(made.interval / made.every / made.step):
            now, kept, rounds = now + made.save, work, 0
    return work / made.islands / now


class TestIslands:
    def test_matches_islands_simulated_one_by_one(self) -> None:
        made = model(
            failing(60, "host", detect=90.0),
            work=0.5 * DAY, islands=2, every=10, step=30.0, boundary=15.0, jitter=0.03,
            interval=1200.0, save=20.0, restart=400.0,
        )  # fmt: skip
        random = np.random.default_rng(0)
        one_by_one = [island_by_island(made, random) for _ in range(40)]
        check_goodput(made, 200, one_by_one)

    @pytest.mark.parametrize("seed", range(4))
    def test_parts_add_up_to_the_wall_time(self, seed: int) -> None:
        kinds = (
            replace(failing(12, "host", detect=60.0, repair=DAY / 4), name="host"),
            replace(failing(2, "rack", detect=600.0, repair=DAY / 8), name="rack"),
            replace(failing(2, "job", detect=60.0), name="job"),
            replace(failing(3, "host", planned=True), name="planned"),
            replace(failing(4, "device", slowdown=1.5, lasts=3600.0), name="slow"),
        )
        made = model(*kinds, spares=2, jitter=0.01, background=90.0, islands=8, every=30)
        outcome = IslandTrial(replace(made, boundary=7.0), seed).run()
        assert outcome.whole
        assert outcome.useful + sum(outcome.lost.values()) == pytest.approx(outcome.wall)
        assert outcome.useful == pytest.approx(made.work)
        skipped = ("fewer", "reconnecting")
        assert all(outcome.lost[cause] > 0 for cause in CAUSES if cause not in skipped)
        for kind, seconds in {"useful": outcome.useful, **outcome.lost}.items():
            assert sum(outcome.bins[kind]) == pytest.approx(seconds)
            assert min(outcome.bins[kind]) >= -1e-6

    def test_one_island_equals_a_run_without_islands(self) -> None:
        made = model(failing(20, "device", detect=60.0, repair=DAY / 4), spares=8, jitter=0.01)
        whole = [Trial(made, seed).run().goodput for seed in range(20)]
        one = [IslandTrial(made, seed).run().goodput for seed in range(20)]
        assert np.mean(one) == pytest.approx(np.mean(whole), abs=0.01)

    def test_failure_of_one_island_costs_its_share(self) -> None:
        made = model(failing(4, "host", detect=60.0), restart=600.0, islands=8, every=30)
        found = simulate(made, 10, 0)
        # One of eight islands loses half a round and is absent until the boundary after its start.
        # The others wait at theirs if the failure is not noticed before: a fifth of the time.
        lost = (150 + 60 + 600 + 150 + 7 * 60 * 60 / 300 / 2) / 8 * 4 / DAY
        # All of them save once more for each rejoining island.
        saves = 20 / 1000 + 20 * 4 / DAY
        assert 1 - found.goodput.mean == pytest.approx(lost + saves, rel=0.1)
        whole = simulate(replace(made, islands=1, every=1), 10, 0)
        assert whole.goodput.mean < found.goodput.mean - 0.03

    def test_rejoining_costs_the_others_a_save(self) -> None:
        made = model(failing(4, "host", detect=60.0), islands=8, every=30, interval=10 * DAY)
        outcome = IslandTrial(made, 0).run()
        assert outcome.stops == 0
        returns, saves = outcome.failures["it"], outcome.lost["saves"]
        assert 20 * 0.8 * returns < saves <= 20 * returns

    def test_planned_stop_of_an_absent_island_has_no_effect(self) -> None:
        stops = replace(failing(50, "host", planned=True), name="planned")
        made = model(stops, islands=2, restart=20_000.0, work=2 * DAY)
        outcome = IslandTrial(made, 0).run()
        assert outcome.wall > 2 * made.work
        assert outcome.failures["planned"] < 0.8 * 50 * outcome.wall / DAY

    def test_counts_stops_with_repair_and_racks(self) -> None:
        hosts = replace(HOSTS, hosts=8)  # four islands of two, and two racks of two islands
        failure = FailureClass("it", "it", "rack", 0.5 / DAY, "rack", detect=60.0, repair=DAY / 2)
        made = replace(model(failure, islands=4, work=40 * DAY), topology=hosts)
        away = 0.5 * (0.5 + 360 / DAY)
        # One rack fails while the other is absent. Islands that wait for hosts do not fail.
        expected = 2 * 0.5 / (1 + away) * away / (1 + away) / DAY
        assert stops_per_second(made, 10, 0) == pytest.approx(expected, rel=0.25)
        spared = stops_per_second(replace(made, spares=100), 10, 0)
        assert spared < 0.2 * expected

    def test_best_interval_is_below_the_whole_work(self) -> None:
        made = model(failing(4, "host", detect=60.0), islands=8, every=30)
        tried = intervals_around(made, 0.0)
        assert min(tried) <= made.work / 3
        assert all(each / made.round == pytest.approx(round(each / made.round)) for each in tried)

    def test_youngs_interval_counts_work_without_boundaries(self) -> None:
        made = model(failing(8), boundary=30.0)
        assert made.pace == 4
        tried = intervals_around(made, made.failure_rate)
        expected = young(made.failure_rate, 20.0) / 4
        assert min(tried) == pytest.approx(expected / 4, abs=10)
        assert max(tried) == pytest.approx(expected * 4, abs=10)

    def test_devices_of_one_host_form_islands(self) -> None:
        one = replace(HOSTS, hosts=1)
        failure = FailureClass("it", "it", "device", 1 / DAY, "device", detect=60.0, repair=DAY / 4)
        made = replace(model(failure, islands=2, every=30), topology=one)
        assert made.units_at("device", 5) == range(5, 6)
        assert made.units_at("host", 0) == range(8)
        trial = IslandTrial(made, 0)
        assert all(list(trial._hit(failure).values()) == [1] for _ in range(20))
        outcome = IslandTrial(made, 0).run()
        assert outcome.whole
        assert 0 < outcome.stops < outcome.failures["it"] / 2

    def test_slow_link_costs_the_time_of_its_bytes(self) -> None:
        links = SlowLinks(islands=3, parameters=1e9, megabits=1000)
        rule = IslandRule(every=30)
        assert links.boundary_bytes(rule) == 2 * 4e9
        assert links.boundary_seconds(rule, 10.0) == pytest.approx(64.0)
        assert links.boundary_seconds(IslandRule(every=30, late=5), 10.0) == pytest.approx(14.0)
        assert links.boundary_seconds(IslandRule(every=30, late=9), 10.0) == 0
        assert links.boundary_bytes(IslandRule(wire="int8")) == pytest.approx(2e9 * (1 + 4 / 256))
        assert links.gradient_seconds == pytest.approx(2 * 2 / 3 * 32)

    def test_components_consist_of_neighbouring_hosts(self) -> None:
        topology = Topology(hosts=10, devices_per_host=8, hosts_per_rack=4, racks_per_pod=2)
        assert topology.hosts_at("device", 17) == range(2, 3)
        assert topology.hosts_at("host", 9) == range(9, 10)
        assert topology.hosts_at("rack", 2) == range(8, 10)
        assert topology.hosts_at("pod", 0) == range(8)
