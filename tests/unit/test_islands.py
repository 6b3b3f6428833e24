"""Rules for averaging over islands, as literal tables."""

from types import SimpleNamespace

import pytest

from shardwise.config import Settings, check_contradictions
from shardwise.config.outer_optimizer import IslandRule, Outer, StalenessRule
from shardwise.errors import ConfigError, ModelMismatch, UsageError
from shardwise.islands.parameter_averaging import IslandReport, check_reports
from shardwise.world.mesh import Mesh, mesh_of
from shardwise.world.world import count_groups


def test_islands_are_the_outermost_axis():
    mesh = Mesh(8, tensor=2, islands=2)
    assert mesh.in_words() == "2 islands x 2 data x 2 tensor"
    assert mesh.island_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.peer_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.data_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.stage_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [mesh.island_of(rank) for rank in (0, 3, 4)] == [0, 0, 1]
    assert (mesh.data, mesh.is_flat, Mesh(4, islands=2).is_flat) == (4, False, False)


def test_stages_of_islands():
    mesh = Mesh(8, pipeline=2, islands=2)
    assert mesh.stage_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.data_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(
    ("size", "tensor", "islands", "words"),
    [
        (4, 1, 3, r"--islands 3 does not divide 4 workers.*one of 1, 2, 4"),
        (4, 2, 4, r"--islands 4 does not divide 2 replicas.*one of 1, 2"),
    ],
)
def test_rejects_invalid_islands(size, tensor, islands, words):
    with pytest.raises(ConfigError, match=words):
        Mesh(size, tensor=tensor, islands=islands)


def turns(rule: IslandRule, buckets: int, steps: int) -> list[tuple[str, str]]:
    """Map each step to the buckets that are sent and those that are due."""
    return [
        (
            "".join(str(b) for b in range(buckets) if rule.sends(step, b, buckets)),
            "".join(str(b) for b in range(buckets) if rule.is_due(step, b, buckets)),
        )
        for step in range(1, steps + 1)
    ]


def test_all_buckets_are_due_at_once_without_late():
    assert turns(IslandRule(every=3), 2, 6) == [
        ("", ""), ("", ""), ("01", "01"), ("", ""), ("", ""), ("01", "01")
    ]  # fmt: skip
    assert turns(IslandRule(every=1), 2, 2) == [("01", "01")] * 2


def test_buckets_take_turns_with_late():
    rule = IslandRule(every=4, late=2)
    assert turns(rule, 2, 8) == [
        ("", ""), ("1", ""), ("", ""), ("0", "1"), ("", ""), ("1", "0"), ("", ""), ("0", "1")
    ]  # fmt: skip
    assert [rule.offset(bucket, 6) for bucket in range(6)] == [0, 0, 1, 2, 2, 3]


def test_stage_without_buckets_sends_reports():
    """It has no bucket, and sends its report together with theirs."""
    rule = IslandRule(every=3, late=1)
    assert [step for step in range(1, 8) if rule.sends(step, 0, 0)] == [3, 6]
    assert [step for step in range(1, 8) if rule.is_due(step, 0, 0)] == [4, 7]


def test_rejects_late_beyond_the_next_boundary():
    with pytest.raises(ConfigError, match=r"--late 3 .*--late 2 or less, or --equal-every 4"):
        IslandRule(every=3, late=3)


@pytest.mark.parametrize(
    ("text", "outer"),
    [("mean", Outer()), ("nesterov:0.7,0.9", Outer(0.7, 0.9))],
)
def test_outer(text, outer):
    assert Outer.parse(text) == outer
    assert str(outer) == text


@pytest.mark.parametrize(
    "text", ["", "sum", "mean:1", "nesterov", "nesterov:1", "nesterov:0,0.9", "nesterov:1,1",
             "nesterov:nan,0.5", "nesterov:inf,0.5", "nesterov:1,0.5,2"]
)  # fmt: skip
def test_rejects_invalid_outer(text):
    with pytest.raises(ValueError, match="nesterov:LR,MOMENTUM"):
        Outer.parse(text)


def test_describes_averaging_rules():
    assert IslandRule(every=50).in_words() == "parameters synchronised every 50 steps (mean)"
    late = IslandRule(every=30, outer=Outer(0.7, 0.9), wire="int8", late=5)
    assert late.in_words() == (
        "parameters synchronised every 30 steps (nesterov:0.7,0.9), sent as int8, "
        "used 5 steps later"
    )


def hosts(*keys: str) -> SimpleNamespace:
    """A group whose ranks are on these hosts."""
    return SimpleNamespace(gather_plain=lambda mine: list(keys))


def test_one_island_per_host():
    by_host = Settings(islands="host")
    assert count_groups(by_host, hosts("a", "a", "b", "b")) == 2
    assert count_groups(by_host, hosts("a", "a")) == 1
    assert count_groups(Settings(islands=3), hosts()) == 3


@pytest.mark.parametrize(
    ("keys", "words"),
    [("aab", "these hosts have 2, 1. Start"), ("abab", "2, 2, and their numbers alt")],
)
def test_rejects_hosts_that_cannot_be_islands(keys, words):
    with pytest.raises(
        ConfigError, match=f"--islands host needs the same number of workers on every host.*{words}"
    ):
        count_groups(Settings(islands="host"), hosts(*keys))


def test_exact_mode_rejects_islands():
    with pytest.raises(ConfigError, match="--exact 4 cannot be combined with --islands 2"):
        mesh_of(Settings(exact=4, islands=2), 4, 2)
    assert mesh_of(Settings(exact=4, islands=1), 4, 1).islands == 1


def test_describes_staleness_rules():
    assert StalenessRule(behind=0).in_words() == "gradients synchronised every step"
    late = StalenessRule(behind=1, wire="int4")
    assert late.in_words() == "gradients synchronised every step, sent as int4, used 1 step later"
    assert Settings(islands=2, behind=1, wire="int4").equal_in_words == late.in_words()
    assert Settings(islands=2).equal_in_words == "parameters synchronised every 30 steps (mean)"


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"equal_every": 30}, "--equal-every 30"),
        ({"late": 2}, "--late 2"),
        ({"outer": Outer(0.7, 0.9)}, "--outer nesterov:0.7,0.9"),
        ({"exact": 4}, "--exact 4"),
    ],
)
def test_rejects_settings_that_contradict_behind(given, flag):
    with pytest.raises(ConfigError, match=f"^{flag} cannot be combined with --behind 3: "):
        check_contradictions(Settings(islands=2, behind=3, **given))
    check_contradictions(Settings(islands=2, behind=3, equal_every=1))
    check_contradictions(Settings(islands=2, **given))


@pytest.mark.parametrize(
    ("field", "error", "words"),
    [
        ("step", UsageError, "Island 3 has made 9 steps, but island 1 8\\. "),
        ("anchor", ModelMismatch, "differ between island 3 and island 1, "),
    ],
)
def test_errors_name_islands_by_their_numbers(field, error, words):
    """Islands 0 and 2 are away."""
    fields = dict.fromkeys(IslandReport._fields, 0.0) | {"step": 8.0, "anchor": 8.0}
    first, other = IslandReport(**fields), IslandReport(**fields | {field: 9.0})
    with pytest.raises(error, match=words):
        check_reports([first, other], (1, 3))
