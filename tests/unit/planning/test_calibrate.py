"""The catalogue file that a calibration writes."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.tools.plan.calibrate import as_toml, rank_counts
from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.cluster import parse_cluster


def _lines(ranks: int) -> list[dict[str, Any]]:
    """Return measurements of a machine with 1 TFLOP/s, and half of that for small products."""
    lines: list[dict[str, Any]] = [
        {"kind": "memory bytes", "value": 2**33},
        {"kind": "launch", "value": 2e-6},
        {"kind": "matmul_fp32", "size": 1e9, "seconds": 2e-3},
        {"kind": "matmul_fp32", "size": 1e10, "seconds": 1e-2},
        {"kind": "matmul_bf16", "size": 1e9, "seconds": 1e-3},
        {"kind": "memory", "size": 1e6, "seconds": 1e-4},
        {"kind": "memory", "size": 1e8, "seconds": 5e-3},
        {"kind": "disk", "size": 1e9, "seconds": 2.0},
    ]
    if ranks > 1:
        lines += [
            {"kind": "all_reduce", "size": 4096.0, "seconds": 20e-6},
            {"kind": "all_reduce", "size": 4096.0 + 1e9, "seconds": 20e-6 + 0.5},
            {"kind": "overlap", "value": 0.25},
        ]
    return lines


def test_catalogue_reads_the_measured_values(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    file.write_text(as_toml({1: _lines(1), 2: _lines(2)}, "2026-11-25"))
    catalogue = read_catalogue([file], user=False)
    one, two = parse_cluster("here", catalogue), parse_cluster("2xhere", catalogue)
    assert one.device.calibrated
    assert (one.device.name, one.devices, two.devices) == ("here", 1, 2)
    assert one.device.flops("fp32") == pytest.approx(1e12)
    assert one.device.curves["matmul_fp32"].at(1.0) == pytest.approx(0.5)
    assert one.device.bandwidth == pytest.approx(2e10)
    assert one.device.memory == 2**33
    assert one.device.launch == pytest.approx(2e-6)
    assert two.inside.bandwidth == pytest.approx(2e9)  # of two ranks, each sends as much once
    assert two.device.numbers["overlap"] == 0.25
    assert two.device.number("disk_gb_per_s") == pytest.approx(5e8)
    with pytest.raises(ConfigError, match="measured as 1xhere, 2xhere"):
        parse_cluster("4xhere", catalogue)


@pytest.mark.parametrize(
    ("accelerators", "cores", "counts"),
    [(0, 2, [1, 2]), (0, 6, [1, 2, 4]), (1, 64, [1]), (8, 64, [1, 2, 4, 8]), (0, 64, [1, 2, 4, 8])],
)
def test_numbers_of_ranks_to_measure(accelerators: int, cores: int, counts: list[int]) -> None:
    assert rank_counts(accelerators, cores) == counts
