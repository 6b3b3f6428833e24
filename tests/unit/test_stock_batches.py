"""Batches of several ranks are joined to one, as one process would have got it."""

from collections import namedtuple

import pytest
import torch

from shardwise.tools.verify.stock.batches import UnjoinableBatches, hashes_of_rows, join

Pair = namedtuple("Pair", "x y")


def test_joins_tensors_in_any_nest() -> None:
    one = {"x": torch.ones(2, 3), "more": [torch.zeros(2), ("a", "b")]}
    two = {"x": torch.zeros(1, 3), "more": [torch.ones(1), ("c",)]}
    joined = join([one, two])
    assert joined["x"].shape == (3, 3)
    assert joined["more"][0].tolist() == [0, 0, 1]
    assert joined["more"][1] == ("a", "b", "c")


def test_keeps_named_tuples() -> None:
    joined = join([Pair(torch.ones(1), torch.ones(1)), Pair(torch.zeros(1), torch.zeros(1))])
    assert isinstance(joined, Pair)
    assert joined.x.tolist() == [1, 0]


def test_pads_labels_with_the_ignored_target_and_ids_with_zero() -> None:
    one = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, -100]])}
    two = {"input_ids": torch.tensor([[8]]), "labels": torch.tensor([[8]])}
    joined = join([one, two])
    assert joined["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert joined["labels"].tolist() == [[5, 6, -100], [8, -100, -100]]


def test_a_rank_that_has_run_out_of_batches_adds_nothing() -> None:
    batch = torch.ones(2)
    assert join([batch]) is batch


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": 1}, {"b": 1}),
        (1, 2),
        (torch.tensor(1), torch.tensor(2)),
        (torch.ones(1, 2), torch.ones(1, 2, 3)),
    ],
)
def test_refuses_what_cannot_be_joined(one: object, two: object) -> None:
    with pytest.raises(UnjoinableBatches):
        join([one, two])


def test_hash_of_a_row_does_not_depend_on_its_padding() -> None:
    short = {"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([[3, 4]])}
    padded = {"input_ids": torch.tensor([[3, 4, 0]]), "labels": torch.tensor([[3, 4, -100]])}
    assert hashes_of_rows(short) == hashes_of_rows(padded)
    assert hashes_of_rows(short) != hashes_of_rows({"input_ids": torch.tensor([[4, 3]])})
