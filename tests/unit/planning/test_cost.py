"""Days, dollars and energy of a training, and the frontier of both."""

import pytest

from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.cluster import parse_cluster
from shardwise.tools.plan.cost import cost_of, frontier, is_within

CATALOGUE = read_catalogue(user=False)


def test_cost_of_a_training() -> None:
    cluster = parse_cluster("2x8xH100", CATALOGUE)
    cost = cost_of(2.0, 0.2, 43_200, cluster)  # a day
    assert (cost.days, cost.days_low, cost.days_high) == pytest.approx((1, 0.8, 1.2))
    assert cost.dollars_low == pytest.approx(16 * 24 * 1.99 * 0.8)
    assert cost.dollars_high == pytest.approx(16 * 24 * 5.00 * 1.2)
    assert cost.kwh == pytest.approx((16 * 0.7 + 2 * 4.6) * 24)


def test_hosts_are_rented_whole_and_unknown_prices_stay_unknown() -> None:
    cluster = parse_cluster("4x8xH100", CATALOGUE)
    assert cost_of(1.0, 0.0, 3600, cluster, devices=9).kwh == pytest.approx(16 * 0.7 + 2 * 4.6)
    assert cost_of(1.0, 0.0, 3600, cluster, devices=4).kwh == pytest.approx(4 * 0.7 + 4.6)
    unknown = cost_of(1.0, 0.0, 10, parse_cluster("TPU-v5e", CATALOGUE))
    assert (unknown.dollars, unknown.kwh) == (None, None)
    assert is_within(unknown, None, 1.0)


def test_limits_apply_to_the_middle_of_the_band() -> None:
    cost = cost_of(2.0, 0.2, 43_200, parse_cluster("8xH100", CATALOGUE))
    assert is_within(cost, 1.0, None)
    assert not is_within(cost, 0.9, None)
    assert cost.dollars is not None
    assert not is_within(cost, None, cost.dollars - 1)
    assert is_within(cost, None, cost.dollars)


def test_frontier_contains_unbeaten_items() -> None:
    days, dollars = (3.0, 1.0, 2.0, 2.0, 4.0), (10.0, 30.0, 40.0, 20.0, 10.0)
    items = list(zip(days, dollars, "abcde", strict=True))
    assert [item for *_, item in frontier(items)] == ["b", "d", "a"]
