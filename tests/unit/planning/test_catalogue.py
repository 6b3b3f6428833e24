"""The catalogue of devices and links, and clusters as text."""

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.tools.plan.catalogue import OWN, Curve, read_catalogue, read_file, user_folder
from shardwise.tools.plan.cluster import parse_cluster

GOOD = """
[sources.own]
text = "measured"
date = "2026-11"

[device.Box]
inside = "wire"
between = "wire"
per_host = 2
fp32_tflops = { value = 1, from = "own" }
memory_gib = { value = 4, from = "own" }
memory_tb_per_s = { value = 0.02, from = "own" }

[device.Box.efficiency]
matmul = { value = [[1, 0.5], [100, 1.0]], from = "own" }
memory = { value = [[1, 0.5]], from = "own" }
launch_us = { value = 3, from = "own" }

[link.wire]
gb_per_s = { value = 2, from = "own" }
latency_us = { value = 5, from = "own" }
"""


def _file(folder: Path, text: str) -> Path:
    file = folder / "box.toml"
    file.write_text(text)
    return file


def test_package_catalogue_is_complete_and_sourced() -> None:
    catalogue = read_catalogue(user=False)
    assert {"A100", "H100", "H200", "B200", "TPU-v5e", "TPU-v5p", "TPU-v6e"} <= set(
        catalogue.devices
    )
    for device in catalogue.devices.values():
        assert set(device.sources) == {*device.numbers, *device.curves, "launch_us"}
        assert all(source.text and source.date[:2] == "20" for source in device.sources.values())
        parse_cluster(f"2x{device.per_host}x{device.name}", catalogue)  # its links are there
    h100 = catalogue.device("h100-80gb")
    assert h100.flops("bf16") == 989e12
    assert h100.bandwidth == 3.35e12
    assert h100.is_assumed
    assert not catalogue.device("A100").is_assumed
    assert h100.memory == int(79.1 * 2**30)
    assert catalogue.links["nvlink4"].bandwidth == 370e9
    assert len(list(OWN.glob("*.toml"))) == 7


def test_user_file_adds_and_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    user_folder().mkdir(parents=True)
    _file(user_folder(), GOOD)
    assert read_catalogue().device("box").launch == pytest.approx(3e-6)
    added = _file(tmp_path, GOOD.replace("launch_us = { value = 3", "launch_us = { value = 7"))
    assert read_catalogue([added]).device("Box").launch == pytest.approx(7e-6)
    assert str(parse_cluster("3x2xBox", read_catalogue())) == "3x2xBox"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "memory_gib =",
            "memory_gb =",
            "has no key 'memory_gb'. Did you mean memory_gib",
        ),
        ('value = 4, from = "own"', 'value = 4, from = "owm"', r"there is no \[sources.owm\]"),
        ("value = 4,", "value = -4,", "a number above 0, not -4"),
        ('{ value = 4, from = "own" }', "4", "must be { value = NUMBER"),
        ("[[1, 0.5], [100, 1.0]]", "[[100, 0.5], [1, 1.0]]", "rising sizes"),
        ("[[1, 0.5], [100, 1.0]]", "[[1, 0.5], [100, 1.1]]", "is at most 1"),
        ("[[1, 0.5], [100, 1.0]]", "[1, 2]", "must be points"),
        ("per_host = 2", "per_host = 0", "an integer"),
        ("fp32_tflops = ", "watts = ", "needs a peak"),
        ("latency_us = { value = 5", "delay_us = { value = 5", "has no key 'delay_us'"),
        ("[link.wire]", "[links.wire]", "has no key 'links'. Did you mean link"),
        ('text = "measured"', "text = 3", "needs a text for text"),
        ("per_host = 2", "per_host = ", "cannot be read as TOML"),
        ("per_host = 2", "per_host = " + "[" * 100_000, "nested too deeply"),
        ("per_host = 2", "per_host = " + "9" * 5000, "cannot be read as TOML"),
        ("us = { value = 5", "us = { value = " + "9" * 400, "must be a number above 0"),
    ],
)
def test_error_in_a_file_is_one_sentence(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=says) as caught:
        read_file(_file(tmp_path, GOOD.replace(old, new, 1)))
    assert "box.toml" in str(caught.value)
    assert "\n" not in str(caught.value).split("(at line")[0]


@pytest.mark.parametrize(
    ("text", "hosts", "per_host"),
    [
        ("H100", 1, 1),
        ("8xH100", 1, 8),
        ("4x8xh100", 4, 8),
        ("12500x8xH100", 12500, 8),
        ("16xA100", 2, 8),
        ("4xTPU-v5p", 1, 4),
    ],
)
def test_parses_clusters(text: str, hosts: int, per_host: int) -> None:
    cluster = parse_cluster(text, read_catalogue(user=False))
    assert (cluster.hosts, cluster.per_host) == (hosts, per_host)
    assert cluster.devices == hosts * per_host


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("12xH100", "do not fill hosts of 8"),
        ("8xH10", "Did you mean H100"),
        ("x8", "no device 'x8'"),
        ("8x", "is not a cluster"),
        ("0xH100", "has no devices"),
        ("here", "shardwise plan --calibrate"),
    ],
)
def test_refuses_text_that_is_no_cluster(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_cluster(text, read_catalogue(user=False))


def test_curve_is_linear_in_the_logarithm() -> None:
    curve = Curve(((1.0, 0.2), (100.0, 0.8)))
    assert [curve.at(size) for size in (0.1, 1, 100, 1e6)] == [0.2, 0.2, 0.8, 0.8]
    assert curve.at(10) == pytest.approx(0.5)
