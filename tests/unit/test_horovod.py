"""Horovod's negotiation as tables, and what is seen of steps that a script leaves out."""

import gc

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from shardwise.horovod import adasum, habits
from shardwise.horovod.coordinator import ADD, REMOVE, Coordinator, Verdict
from shardwise.horovod.habits import Comparison
from shardwise.horovod.operations import shares
from shardwise.horovod.requests import JOIN, Request


def reduction(name, members=0, **more):
    return Request(
        name=name, kind="allreduce", members=members, shapes=((2,),), dtypes=("float32",), **more
    )


def said(verdicts):
    return [(one.request.name, one.to, one.error) for one in verdicts]


def test_what_all_have_asked_for_is_done_in_the_order_of_that():
    table = Coordinator(2)
    assert table.ask(0, reduction("a"), 0.0) == []
    assert table.ask(0, reduction("b"), 0.0) == []
    assert said(table.ask(1, reduction("b"), 0.0)) == [("b", (0, 1), "")]
    assert said(table.ask(1, reduction("a"), 0.0)) == [("a", (0, 1), "")]
    assert table.oldest is None


def test_joined_ranks_need_not_ask():
    table = Coordinator(3)
    table.ask(0, reduction("a"), 0.0)
    assert table.ask(1, Request(name=JOIN, kind=JOIN), 0.0) == []
    assert said(table.ask(2, reduction("a"), 0.0)) == [("a", (0, 1, 2), "")]
    gather = Request(name="g", kind="allgather", shapes=((2,),), dtypes=("float32",))
    table.ask(0, gather, 0.0)
    (verdict,) = table.ask(2, gather, 0.0)
    assert verdict.to == (0, 2)
    assert "cannot be done while rank 1 has joined" in verdict.error
    assert table.oldest is None  # who has joined may wait for as long as others have data
    table.ask(0, reduction("b"), 0.0)
    assert said(table.ask(2, Request(name=JOIN, kind=JOIN), 0.0)) == [("b", (0, 1, 2), "")]
    (last,) = table.ask(0, Request(name=JOIN, kind=JOIN), 0.0)
    assert (last.number, last.to) == (0, (0, 1, 2))
    assert table.ask(0, reduction("c"), 0.0) == []  # nobody has joined any more


def test_process_sets_have_tables_of_their_own():
    table = Coordinator(3)
    add = Request(name=ADD, kind=ADD, splits=(0, 2))
    made = [verdict for rank in range(3) for verdict in table.ask(rank, add, 0.0)]
    assert [verdict.number for verdict in made] == [1]
    table.ask(0, reduction("a", 1), 0.0)
    assert table.ask(1, reduction("a"), 0.0) == []
    assert said(table.ask(2, reduction("a", 1), 0.0)) == [("a", (0, 2), "")]
    remove = Request(name=REMOVE, kind=REMOVE, root=1)
    for rank in range(3):
        verdicts = table.ask(rank, remove, 0.0)
    assert (verdicts[0].number, verdicts[0].error) == (1, "")
    assert table.members == {0: (0, 1, 2)}


def test_ranks_that_have_left_and_those_that_do_not_come():
    table = Coordinator(3)
    table.ask(0, reduction("a"), 10.0)
    table.ask(2, reduction("a"), 11.0)
    assert table.stalled(60.0, 60.0) == []
    ((request, missing),) = table.stalled(71.0, 60.0)
    assert (request.name, missing) == ("a", [1])
    assert table.stalled(72.0, 60.0) == []
    (late,) = table.overdue(320.0, 300.0)
    assert late.to == (0, 2)
    assert late.error.startswith("allreduce 'a' waited 300 s for rank 1. Every rank must ask")
    table.ask(0, reduction("b"), 0.0)
    (gone,) = table.leave(1, "rank 1 is gone")
    assert said([gone]) == [("b", (0,), "allreduce 'b' cannot be done: rank 1 is gone")]
    (at_once,) = table.ask(2, reduction("c"), 0.0)
    assert "rank 1 is gone" in at_once.error


def test_verdicts_travel_as_json():
    request = reduction("a", scale=(0.5, 2.0), note={"state": "3"})
    verdict = Verdict(to=(0, 1), request=request, rows=[[1], [2]], number=4)
    assert Verdict.from_json(verdict.as_json()) == verdict


def test_rows_are_dealt_as_evenly_as_can_be():
    assert shares(7, 3) == [3, 2, 2]
    assert shares(1, 4) == [1, 0, 0, 0]


def test_adasum_of_two():
    a, b = torch.tensor([1.0, 0.0]).double(), torch.tensor([1.0, 1.0]).double()
    # a.b = 1, |a|^2 = 1, |b|^2 = 2: half of a, three quarters of b
    assert adasum.pair(a, b).tolist() == [1.25, 0.75]
    assert adasum.pair(a, torch.zeros(2).double()).tolist() == [1.0, 0.0]


NOTE = {"weights": "w", "state": "0", "samples": "", "rate": "", "device": ""}


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ({}, {}, []),
        ({"weights": "other"}, {}, [habits.BROADCAST]),
        ({"state": "2"}, {}, [habits.BROADCAST_STATE]),
        ({"samples": "x"}, {"samples": "y"}, []),
        ({"samples": "x"}, {"samples": "x"}, [habits.SHARD]),
        ({"rate": "unscaled"}, {"rate": "unscaled"}, [habits.SCALE]),
        ({"device": "node1 cuda:0"}, {"device": "node1 cuda:0"}, [habits.PIN]),
        ({"device": "node1 cuda:0"}, {"device": "node2 cuda:0"}, []),
    ],
)
def test_steps_left_out_are_seen_once(first, second, found):
    comparison = Comparison()
    notes = {0: NOTE | first, 1: NOTE | second}
    assert list(comparison.compare(notes)) == found
    assert list(comparison.compare(notes)) == []


def test_a_path_that_several_ranks_of_a_host_write():
    comparison = Comparison()
    assert list(comparison.see(0, ["node1", "/a", "train.py:3"])) == []
    assert list(comparison.see(1, ["node2", "/a", "train.py:3"])) == []
    (line,) = comparison.see(2, ["node1", "/a", "train.py:3"])
    assert line.startswith("ranks 0, 2 all write /a (train.py:3)")
    assert list(comparison.see(3, ["node1", "/a", "train.py:3"])) == []


class Owned(Dataset[int]):
    """A user's own, which may open its files where it is first read."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise AssertionError("a dataset of the user's own is read by the user's loader alone")


def test_only_tensors_are_looked_at():
    gc.collect()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    def samples(dataset):
        reading = iter(DataLoader(dataset))
        found = habits.note(optimizer, averages=True, asked_size=True)["samples"]
        del reading
        return found

    numbers = torch.arange(4.0)
    assert samples(Owned()) == ""
    assert samples(TensorDataset(numbers)) == samples(TensorDataset(numbers.clone())) != ""
    assert samples(numbers + 1) not in ("", samples(numbers))
