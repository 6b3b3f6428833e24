"""Pictures of a step's time and of cost against days."""

from pathlib import Path

import pytest

from shardwise.planning.catalogue import read_catalogue
from shardwise.planning.choice import Estimate
from shardwise.planning.cluster import parse_cluster
from shardwise.planning.cost import cost_of
from shardwise.planning.stages import KINDS
from shardwise.planning.time_plots import COLORS, TimedPlacement, as_html

pytest.importorskip("matplotlib", reason="pictures need matplotlib")


def _placement(label: str, seconds: float, device: str = "8xH100") -> TimedPlacement:
    parts = {"matrix products": seconds * 0.75, "update": seconds * 0.25}
    estimate = Estimate(seconds=seconds, error=0.2, parts=parts, per_rank=(parts, parts))
    cost = cost_of(seconds, 0.2, 1e5, parse_cluster(device, read_catalogue(user=False)))
    return TimedPlacement(label, estimate, cost)


def test_the_page_has_both_pictures_and_the_numbers(tmp_path: Path) -> None:
    assert len(KINDS) == len(COLORS)
    page = as_html([_placement("--zero <3>", 2.0), _placement("--zero 2", 1.5)], tmp_path)
    assert page.count("<img") == 2
    assert "--zero &lt;3&gt;" in page
    assert "<td>2 ±20%</td><td>1.5</td><td>0.5</td>" in page
    for name in ("time.png", "cost.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_without_prices_there_is_no_frontier(tmp_path: Path) -> None:
    page = as_html([_placement("--zero 0", 1.0, "TPU-v5e")], tmp_path)
    assert page.count("<img") == 1
    assert not (tmp_path / "cost.png").exists()
