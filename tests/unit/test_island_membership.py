"""Membership of islands in exchanges, as tables of arrivals."""

import random

import pytest

from shardwise.islands.elastic.membership import BOUNDARY, Answer, Arrival, Membership, admission

HERE, THERE = Arrival(label=f"{BOUNDARY} after step 4"), Arrival(label="a barrier")


def come(membership: Membership, *ranks: int, arrival: Arrival = HERE) -> list[Answer]:
    return [answer for rank in ranks for answer in membership.arrive(rank, arrival)]


def seen(answers: list[Answer]) -> dict[int, tuple[list[int], tuple[int, ...]]]:
    """Map each rank to the islands that took part, and the ranks whose messages it gets."""
    return {each.rank: (each.words["islands"], each.sources) for each in answers}


def test_exchange_completes_when_all_have_arrived() -> None:
    membership = Membership(count=2, size=2)
    assert come(membership, 0, 1, 2) == []
    assert membership.missing(0) == [3]
    expected = {0: ([0, 1], (2,)), 1: ([0, 1], (3,)), 2: ([0, 1], (0,)), 3: ([0, 1], (1,))}
    assert seen(come(membership, 3)) == expected
    assert membership.has_begun


def test_exchange_of_peers_only() -> None:
    membership = Membership(count=2, size=2)
    alone = Arrival(label="a broadcast", alone=True)
    assert come(membership, 2, arrival=alone) == []
    assert set(seen(come(membership, 0, arrival=alone))) == {0, 2}
    assert not membership.has_begun


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_failed_island_is_excluded_for_all(lost: int) -> None:
    """This holds even if some or all of its ranks had arrived."""
    membership = Membership(count=3, size=2)
    left = [rank for rank in range(6) if rank // 2 != lost]
    come(membership, 2 * lost, *left[:-1])
    assert membership.lose(lost) == []
    found = seen(come(membership, left[-1]))
    assert set(found) == set(left)
    assert {tuple(islands) for islands, _ in found.values()} == {tuple({0, 1, 2} - {lost})}


def test_failure_completes_exchanges_that_waited_for_the_island() -> None:
    membership = Membership(count=2, size=2)
    come(membership, 0, 1, 2)
    assert seen(membership.lose(1)) == {0: ([0], ()), 1: ([0], ())}


def test_island_returns() -> None:
    membership = Membership(count=2, size=2)
    membership.lose(0)
    membership.request_return(0)
    answers = come(membership, 2, 3)
    assert [each.words["waiting"] for each in answers] == [[], []]  # rank 1 has not asked yet
    membership.request_return(1)
    assert [each.words["waiting"] for each in come(membership, 2, 3)] == [[0], [0]]
    admit = Arrival(label=admission([0], 16))
    answers = come(membership, 2, 3, arrival=admit)
    assert {each.rank: each.sources for each in answers} == {2: (), 3: (), 0: (2,), 1: (2,)}
    assert all(each.words["members"] == [0, 1] for each in answers)
    assert membership.admitted == {0: 16}
    assert come(membership, 2, 3, 0) == []
    assert set(seen(come(membership, 1))) == {0, 1, 2, 3}


def test_island_that_fails_while_returning_is_not_admitted() -> None:
    membership = Membership(count=2, size=1)
    membership.lose(1)
    membership.request_return(1)
    come(membership, 0)
    membership.lose(1)
    (answer,) = come(membership, 0, arrival=Arrival(label=admission([1], 16)))
    assert (answer.rank, answer.words["members"], membership.admitted) == (0, [0], {})


def test_refuses_different_calls() -> None:
    membership = Membership(count=2, size=1)
    come(membership, 0)
    answers = come(membership, 1, arrival=THERE)
    assert [each.rank for each in answers] == [0, 1]
    assert answers[0].words == {"refused": [[0, HERE.label], [1, THERE.label]]}


def test_refuses_wrong_call_of_a_returning_island() -> None:
    """The other islands wait until it has exited."""
    membership = Membership(count=2, size=1)
    membership.lose(0)
    membership.request_return(0)
    come(membership, 1, arrival=Arrival(label=admission([0], 16)))
    come(membership, 1)
    (answer,) = come(membership, 0, arrival=THERE)
    assert (answer.rank, answer.words["refused"]) == (0, [[1, HERE.label], [0, THERE.label]])
    assert seen(membership.lose(0)) == {1: ([1], ())}


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_agree_after_random_failures(seed: int) -> None:
    """Every remaining rank gets the same islands for each exchange, and reaches the last one."""
    draw = random.Random(seed)
    membership = Membership(count=3, size=2)
    known: dict[int, list[list[int]]] = {rank: [] for rank in range(6)}
    living = {0, 1, 2}
    waiting: set[int] = set()

    def take(answers: list[Answer]) -> None:
        for each in answers:
            known[each.rank].append(each.words["islands"])
            waiting.discard(each.rank)

    while len(known[min(living) * 2]) < 30:
        if len(living) > 1 and draw.random() < 0.02:
            island = draw.choice(sorted(living))
            living.discard(island)
            waiting -= set(membership.ranks(island))
            take(membership.lose(island))
            continue
        free = [r for each in sorted(living) for r in membership.ranks(each) if r not in waiting]
        rank = draw.choice(free)
        waiting.add(rank)
        take(membership.arrive(rank, Arrival(label=f"number {len(known[rank])}")))
    shortest = min(len(known[rank]) for each in living for rank in membership.ranks(each))
    for island in range(3):
        for rank in membership.ranks(island):
            first = known[min(living) * 2][: min(shortest, len(known[rank]))]
            assert known[rank][: len(first)] == first
