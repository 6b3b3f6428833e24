"""The rows of nested batches: tensors, arrays and columns, and errors for ambiguous parts."""

from collections import namedtuple

import numpy as np
import pytest
import torch

from shardwise.errors import DataError
from shardwise.world.nested_batch import Rows

Pair = namedtuple("Pair", "x, name")


class Encoding(dict):
    """A container that torch's pytree does not know."""

    __getattr__ = dict.__getitem__


class Sample:
    """An object that holds a tensor."""

    def __init__(self):
        self.x = torch.arange(6)


X = torch.arange(6)


def same(one, two):
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(two) and one.tolist() == two.tolist()
    if isinstance(one, list | tuple):
        return type(one) is type(two) and all(same(*x) for x in zip(one, two, strict=True))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return one == two


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (X, X[2:4]),
        (np.arange(6), np.arange(6)[2:4]),
        ((np.arange(6), X), (np.arange(6)[2:4], X[2:4])),
        ((X, list(range(6))), (X[2:4], [2, 3])),
        ({"x": X, "n": ["a", "b", "c", "d", "e", "f"]}, {"x": X[2:4], "n": ["c", "d"]}),
        (tuple("abcdef"), ("c", "d")),
        ((list("abcdef"), list(range(6))), (["c", "d"], [2, 3])),
        ((X, 6, "train", None), (X[2:4], 6, "train", None)),
        (Pair(X, "train"), Pair(X[2:4], "train")),
        ([X, X + 1], [X[2:4], X[2:4] + 1]),
        ((X, [[1], [2, 3], [4], [], [5], [6]]), (X[2:4], [[4], []])),
        ((X, [tuple("abcdef"), (1, 2, 3, 4, 5, 6)]), (X[2:4], [("c", "d"), (3, 4)])),
        ((X, [{"box": n} for n in range(6)]), (X[2:4], [{"box": 2}, {"box": 3}])),
        ((X, X.size(), ()), (X[2:4], X.size(), ())),
    ],
    ids=str,
)
def test_cuts_parts_with_rows_and_keeps_the_others(batch, rows):
    found = Rows(batch, call="share")
    assert found.total == 6
    assert same(found.taken(2, 4), rows)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((X, [1, 2, 3]), r"share: batch\[1\] is a list of length 3, and the batch has 6 row"),
        ((X, (28, 28)), r"batch\[1\] is a tuple of length 2"),
        ({"x": X, "n": [[1, 2], [3]]}, r"batch\['n'\] is a list of length 2"),
        ((X[:2], [[1, 2], [3, 4]]), r"batch\[1\] is a list of 2 columns, and the batch has the s"),
        ((X, torch.arange(5)), r"not \[5, 6\] \(batch\[1\]: 5, batch\[0\]: 6\)"),
        ((X, np.arange(5)), r"not \[5, 6\]"),
        ((X, Encoding(x=X)), r"cannot determine the rows of batch\[1\], a Encoding"),
        ((X, Sample()), r"cannot determine the rows of batch\[1\], a Sample"),
        (Sample(), "cannot determine the rows of batch, a Sample"),
        ((X, {1, 2, 3, 4, 5, 6}), "a set"),
        ([[1, 2], [3, 4]], "cannot determine the rows of batch, a list"),
        ({"a": 3}, r"not \[\]. numpy"),
        ([torch.tensor(1), torch.tensor(2)], r"not \[0\] \(batch\[0\]: 0\)"),
    ],
    ids=str,
)
def test_refuses_parts_with_ambiguous_rows_by_name(batch, words):
    with pytest.raises(DataError, match=words):
        Rows(batch, call="share")


def samples(count, *shape):
    return [torch.arange(24.0)[: torch.Size(shape).numel()].view(shape) + n for n in range(count)]


@pytest.mark.parametrize(
    "batch",
    [
        samples(6, 8),
        tuple(samples(9, 3, 4)),
        {"images": samples(6, 8)},
        [x.numpy() for x in samples(6, 8)],
        [{"ids": x, "mask": x > 3} for x in samples(7, 8)],
        (samples(8, 8), torch.arange(8)),  # each part has 8 rows
    ],
)
def test_a_list_that_may_be_of_samples_is_refused(batch):
    with pytest.raises(DataError, match=r"items, of shape .* may be \d samples, or columns of"):
        Rows(batch, call="share").refuse_samples(batch)


@pytest.mark.parametrize(
    "batch",
    [
        samples(5, 8),  # ids, mask, types, positions, labels
        dict(enumerate(samples(6, 8))),
        torch.stack(samples(6, 8)),
        (samples(6, 8), torch.arange(8)),
        [*samples(6, 8), torch.arange(8)],
        (torch.arange(6), list("abcdef")),
    ],
)
def test_columns_of_one_shape_are_cut(batch):
    Rows(batch, call="share").refuse_samples(batch)


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_have_rows(layout):
    x = torch.arange(24.0).view(6, 4) % 3
    sparse = x.to_sparse(layout=layout)
    rows = Rows({"x": sparse, "y": torch.arange(6)}, call="share")
    assert rows.total == 6
    mine = rows.taken(2, 5)["x"]
    assert mine.layout is layout
    assert torch.equal(mine.to_dense(), x[2:5])
    assert rows.taken(3, 3)["x"].shape == (1, 4)
    along = Rows(sparse, 1, call="share").taken(1, 3)
    assert torch.equal(along.to_dense(), x[:, 1:3])


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_rows_of_a_nested_tensor_are_its_components(layout):
    components = [torch.randn(length, 2) for length in (3, 1, 4, 1, 5)]
    nested = torch.nested.nested_tensor(components, layout=layout)
    rows = Rows((nested, torch.arange(5)), call="share")
    assert rows.total == 5
    mine = rows.taken(1, 4)[0]
    assert mine.layout is layout
    for one, other in zip(mine.unbind(), components[1:4], strict=True):
        assert torch.equal(one, other)
    assert rows.digest() == Rows(torch.arange(5), call="share").digest()
    with pytest.raises(DataError, match=r"batch cannot be cut along dimension 1: a nested"):
        Rows(nested, 1, call="share")


def test_a_tensor_of_sparse_blocks_is_refused():
    blocks = torch.eye(4).to_sparse_bsr((2, 2))
    with pytest.raises(DataError, match=r"a row would cut the blocks of .* Pass a dense"):
        Rows({"x": blocks}, call="share")


def test_rows_along_another_dimension_are_contiguous_where_the_batch_is():
    x = torch.arange(24).view(4, 6)
    mine, array, names = Rows((x, x.numpy(), list("abcdef")), 1, call="share").taken(2, 4)
    assert mine.tolist() == x[:, 2:4].tolist() == array.tolist()
    assert mine.is_contiguous()
    assert array.flags.c_contiguous
    assert names == ["c", "d"]
    assert not Rows(x.T, 1, call="share").taken(0, 2).is_contiguous()
    assert Rows(x, call="share").taken(1, 2).data_ptr() == x[1].data_ptr()
    image = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert Rows(image, call="share").taken(1, 3).is_contiguous(memory_format=torch.channels_last)


def test_an_empty_range_gives_the_first_row():
    assert Rows((X + 1, list("abcdef")), call="share").taken(3, 3) == (torch.tensor([1]), ["a"])


def test_only_plain_values_of_a_column_are_digested():
    assert (
        Rows([X, [Sample() for _ in X]], call="share").digest() == Rows([X], call="share").digest()
    )
    digests = {Rows([*name], call="share").digest() for name in ("ab", "bb")}
    assert len(digests) == 2
    assert Rows([X, [{1, 2} for _ in X]], call="share").digest() == Rows([X], call="share").digest()
