"""The placement table, cell by cell."""

import itertools

import pytest

from shardwise.errors import PlacementError
from shardwise.layout.placement import STATES, Placement, Spread, Tier

LEGAL = {
    (): "ZERO_0",
    ("optimizer",): "ZERO_1",
    ("gradients", "optimizer"): "ZERO_2",
    ("parameters", "gradients", "optimizer"): "ZERO_3",
}
SUBSETS = [subset for count in range(4) for subset in itertools.combinations(STATES, count)]


@pytest.mark.parametrize("sharded", SUBSETS, ids=lambda subset: "+".join(subset) or "none")
def test_every_row_is_legal_or_refused(sharded: tuple[str, ...]) -> None:
    if sharded not in LEGAL:
        with pytest.raises(PlacementError, match="The nearest legal row is ZERO_"):
            Placement.sharding(sharded)
        return
    row = Placement.sharding(sharded)
    assert row.name == LEGAL[sharded]
    assert row.level == len(sharded)
    assert row == Placement.zero(row.level)
    assert [row.is_sharded(state) for state in STATES] == [s in sharded for s in STATES]


@pytest.mark.parametrize(
    ("sharded", "fault", "nearest"),
    [
        (("gradients",), "sharded gradients need a sharded optimizer", "--zero 2"),
        (("parameters",), "sharded parameters need a sharded gradients", "--zero"),
        (("parameters", "optimizer"), "that cell says replicated", "--zero 3"),
        (("parameters", "gradients"), "sharded gradients need a sharded optimizer", "--zero 3"),
    ],
)
def test_error_names_row_cell_and_nearest_row(
    sharded: tuple[str, ...], fault: str, nearest: str
) -> None:
    with pytest.raises(PlacementError) as refused:
        Placement.sharding(sharded)
    message = str(refused.value)
    assert fault in message
    assert nearest in message
    assert all(state in message for state in STATES)


@pytest.mark.parametrize("level", [-1, 4])
def test_there_are_four_rows(level: int) -> None:
    with pytest.raises(PlacementError, match=f"There is no row ZERO_{level}"):
        Placement.zero(level)


def test_cells_in_words() -> None:
    assert Placement.zero(1).cells() == (
        "parameters replicated, gradients replicated, optimizer sharded"
    )
    assert Placement().optimizer is Spread.REPLICATED


# -- tiers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("device", Tier()),
        ("cpu", Tier("cpu")),
        ("nvme:/scratch", Tier("nvme", "/scratch")),
        ("nvme:a:b", Tier("nvme", "a:b")),
    ],
)
def test_parses_tier(text: str, tier: Tier) -> None:
    assert Tier.parse(text) == tier
    assert str(tier) == text


@pytest.mark.parametrize("text", ["", "disk", "nvme", "nvme:", "cpu:/scratch"])
def test_refuses_unknown_tiers(text: str) -> None:
    with pytest.raises(ValueError, match="nvme:FOLDER"):
        Tier.parse(text)


CPU, DISK = Tier("cpu"), Tier("nvme", "/scratch")


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("tier", [CPU, DISK])
def test_states_can_be_on_another_tier_if_sharded(level: int, tier: Tier) -> None:
    row = Placement.zero(level)
    assert row.resting(optimizer=tier).tier("optimizer") == tier
    for state in ("gradients", "parameters"):
        if row.is_sharded(state):
            assert row.resting(**{state: tier}).tier(state) == tier
            continue
        needed = {"gradients": 2, "parameters": 3}[state]
        with pytest.raises(PlacementError, match=f"{state} can be on the tier .* --zero {needed}"):
            row.resting(**{state: tier})


def test_gradients_follow_the_optimizer_by_default() -> None:
    assert Placement.zero(2).resting(optimizer=DISK).tier("gradients") == DISK
    assert Placement.zero(1).resting(optimizer=DISK).tier("gradients") == Tier()
    said = Placement.zero(2).resting(optimizer=DISK, gradients=Tier())
    assert said.tier("gradients") == Tier()
    assert said.cells() == "parameters replicated, gradients sharded, optimizer sharded on nvme"
