"""Parts of the sequences of a batch, along the dimension that the user has named."""

from collections import UserDict

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.data import Loader
from shardwise.errors import DataError
from shardwise.world.sequence_parts import cut

IDS = torch.arange(3 * 8).view(3, 8)
"""(rows, length)"""
SQUARE = torch.arange(8 * 8).view(8, 8)
"""As many rows as tokens."""


def part(batch, rank=1, **options):
    return cut(batch, rank, 2, call="Loader", **options)


def test_cuts_along_the_first_dimension():
    hidden = torch.randn(8, 3, 5)
    (ids, found), sequences = part((IDS.T, hidden), dim=0)
    assert torch.equal(ids, IDS.T[4:])
    assert torch.equal(found, hidden[4:])
    assert ids.is_contiguous()
    assert (sequences.length, sequences.rows) == (8, 3)


def test_cuts_tensors_by_their_names():
    batch = {"source": IDS.T, "padding": IDS > 3, "image": torch.ones(3, 7), "each": torch.ones(3)}
    found, sequences = part(batch, dim={"source": 0, "image": None})
    assert torch.equal(found["source"], IDS.T[4:])
    assert torch.equal(found["padding"], IDS[:, 4:] > 3)
    assert found["image"] is batch["image"]
    assert found["each"] is batch["each"]
    assert sequences.length == 8


def test_cuts_nested_tensors_and_those_of_one_dimension_by_their_places():
    found, _ = part([IDS.T, {"x": IDS, "y": (IDS,)}], dim={"x": 1, 0: 0, "y": 1})
    assert torch.equal(found[0], IDS.T[4:])
    assert torch.equal(found[1]["x"], IDS[:, 4:])
    assert torch.equal(found[1]["y"][0], IDS[:, 4:])
    tokens, _ = part({"tokens": IDS[0], "labels": IDS[1]}, dim={"tokens": 0, "labels": -1})
    assert torch.equal(tokens["labels"], IDS[1, 4:])


def test_positions_are_those_in_the_batch_itself():
    found, _ = part((SQUARE, (SQUARE, SQUARE)), dim={0: 0})
    assert torch.equal(found[0], SQUARE[4:])
    assert torch.equal(found[1][0], SQUARE[:, 4:])
    assert torch.equal(found[1][1], SQUARE[:, 4:])


def test_names_of_containers_hold_for_their_tensors():
    batch = {"inputs": {"ids": SQUARE, "lengths": torch.ones(8), "n": 5, "y": SQUARE}}
    found = part(batch, dim={"inputs": 0, "y": 1})[0]["inputs"]
    assert torch.equal(found["ids"], SQUARE[4:])
    assert torch.equal(found["y"], SQUARE[:, 4:])
    assert found["lengths"] is batch["inputs"]["lengths"]
    assert found["n"] == 5


@pytest.mark.parametrize("dim", [0, {"inputs": 0}])
def test_square_features_are_no_mask(dim):
    hidden = torch.randn(8, 8, 2, 2)
    found, _ = part({"inputs": [hidden, SQUARE]}, dim=dim)
    assert torch.equal(found["inputs"][0], hidden[4:])


def test_tokens_of_one_dimension_are_one_row():
    _, sequences = part({"ids": IDS[0]}, dim={"ids": 0})
    assert sequences.rows == 1
    assert sequences.dims_of(IDS[0, 4:], 4) == [0]


@pytest.mark.parametrize("first", ["ids", "positions"])
def test_counts_the_rows_of_positions_of_images(first):
    batch = {"ids": IDS[:2], "positions": torch.zeros(3, 2, 8)}
    found, sequences = part({first: batch[first], **batch}, dim={"positions": 2})
    assert found["positions"].shape == (3, 2, 4)
    assert sequences.rows == 2


def test_mappings_of_other_kinds_become_dicts():
    found, _ = part(UserDict(ids=IDS))
    assert torch.equal(found["ids"], IDS[:, 4:])


class Registered:
    """A node of torch's trees without names for its fields."""

    def __init__(self, *fields):
        self.fields = fields


pytree.register_pytree_node(Registered, lambda x: (x.fields, None), lambda x, _: Registered(*x))


def test_numbers_fields_without_names():
    found, _ = part(Registered(IDS, IDS.T), dim={1: 0})
    assert torch.equal(found.fields[0], IDS[:, 4:])
    assert torch.equal(found.fields[1], IDS.T[4:])


def test_fields_without_names_leave_the_names_of_other_tensors():
    found, _ = part({"source": IDS.T, "other": Registered(IDS, IDS)}, dim={"source": 0})
    assert torch.equal(found["source"], IDS.T[4:])
    assert torch.equal(found["other"].fields[1], IDS[:, 4:])
    found, _ = part({"other": Registered(IDS.T, IDS.T), "y": IDS}, dim={"other": 0})
    assert torch.equal(found["other"].fields[1], IDS.T[4:])
    # The number 2 is the place in the tuple, and not in its leaves.
    found, _ = part((SQUARE, Registered(SQUARE, SQUARE), SQUARE), dim={2: 0})
    assert torch.equal(found[1].fields[1], SQUARE[:, 4:])
    assert torch.equal(found[2], SQUARE[4:])


@pytest.mark.parametrize("width", [4, 8])
def test_knows_tensors_that_are_not_split(width):
    image = torch.ones(3, width)
    _, sequences = part({"ids": IDS, "image": image}, dim={"image": None})
    assert sequences.is_uncut(image)
    assert sequences.dims_of(image[:1].double(), 4) == []
    assert sequences.dims_of(IDS[:, 4:], 4) == [1]
    # Of two tensors of one form, the trial decides.
    _, sequences = part({"ids": IDS, "other": IDS[:, 4:]}, dim={"other": None})
    assert not sequences.is_uncut(IDS[:, 4:])


def test_keeps_all_dimensions_of_a_form():
    batch = {"x": IDS.T, "y": IDS}
    for order in (batch, dict(reversed(batch.items()))):
        assert part(order, dim={"x": 0})[1].all_dims == {0, 1}


def test_masks_of_pairs_keep_their_dimension():
    (_, mask), _ = part((IDS.T, torch.ones(3, 1, 8, 8)), dim=0)
    assert mask.shape == (3, 1, 4, 8)


@pytest.mark.parametrize(
    ("batch", "options", "words"),
    [
        ((IDS, torch.ones(3, 5)), {}, "sequence_dim={name: dimension, name: None}"),
        ((IDS.T, IDS), {"dim": 0}, r"sequence_dim=0, but .* one length there"),
        (IDS, {"dim": 2}, r"sequence_dim=2, but batch is \(3, 8\)"),
        ({"a": IDS, "b": 3}, {"dim": {"b": 0}}, r"batch\['b'\] is int"),
        ({"a": IDS}, {"dim": {"c": 0}}, r"names 'c', but the batch has \['a'\]"),
        (IDS.T, {"rows_dim": 1}, r"Loader\(batch, dim=1, sequence_dim=0\)"),
        (IDS.T, {"rows_dim": 1, "dim": 1}, r"Loader\(batch, dim=1, sequence_dim=0\)"),
        (IDS.T, {"rows_dim": 0, "dim": 0}, r"\(8, 3\) would be split .* 0, which are its rows"),
        (IDS.T, {"rows_dim": -1, "dim": 1}, "dimension 1, which are its rows"),
        (IDS.T, {"rows_dim": -2, "dim": 0}, "dimension 0, which are its rows"),
        (
            {"source": SQUARE, "target": SQUARE},
            {"rows_dim": 1, "dim": {"source": 0}},
            r"batch\['target'\] .* dimension 1, which are its rows",
        ),
        (IDS, {"dim": "0"}, "sequence_dim='0' is not a dimension"),
        ({"a": IDS}, {"dim": {"a": "1"}}, "is not a dimension"),
        ({"a": (IDS, IDS)}, {"dim": {1: None}}, r"names 1, but the batch has \['a'\]\[0\]"),
        (IDS.T, {"dim": 1}, "sequences of 3 token"),
    ],
)
def test_refuses_dimensions_that_do_not_fit(batch, options, words):
    with pytest.raises(DataError, match=words):
        part(batch, **options)


@pytest.mark.parametrize(
    ("tensor", "dims"),
    [
        (torch.ones(4, 3), [0]),
        (torch.ones(3, 4), [1]),
        (torch.ones(4, 3, 5), [0]),
        (torch.ones(4), []),
        (torch.ones(3, 2, 4, 8), [2]),
        (torch.ones(4, 7), []),
    ],
)
def test_finds_the_dimension_of_inputs_that_the_script_has_transposed(tensor: Tensor, dims):
    _, sequences = part(IDS)
    assert sequences.dims_of(tensor, 4) == dims
    assert sequences.dim_of(tensor, 4) == (dims[0] if dims else None)


def test_names_all_dimensions_if_a_part_is_as_long_as_there_are_rows():
    _, sequences = cut((IDS[:, :6].T, IDS[:, :6] > 3), 0, 2, call="Loader", dim={0: 0, 1: 1})
    assert sequences.dims_of(torch.ones(3, 3).long(), 3) == [0, 1]
    assert sequences.dims_of(torch.ones(3, 3).bool(), 3) == [1, 0]


def test_one_worker_checks_the_dimensions_too(solo):
    assert torch.equal(solo.share(IDS.T, dim=1, sequence_dim=0), IDS.T)
    with pytest.raises(DataError, match="names 'ids'"):
        solo.share({"words": IDS}, sequence_dim={"ids": 0})
    assert torch.equal(solo.share(IDS[:, :1], sequence_dim=1), IDS[:, :1])
    loader = Loader(IDS, 3, sequence_dim=2)
    with pytest.raises(DataError, match="sequence_dim=2, but batch is"):
        next(iter(loader))
