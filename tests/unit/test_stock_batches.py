"""Batches of several ranks are joined to one, as one process would have got it."""

import json
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shardwise.tools.verify.stock.batches import (
    BatchRecorder,
    BatchReplay,
    LoaderKeys,
    UnjoinableBatches,
    hashes_of_rows,
    join,
)

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
        (torch.ones(2).to_sparse(), torch.ones(2).to_sparse()),
        (np.array(["a"], dtype=object), np.array(["b"], dtype=object)),
        ({"a": 1}, [1]),
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


class Graph:
    """Has keys, as graphs of other libraries do, and cannot be joined along dim 0."""

    def __init__(self, edges: torch.Tensor) -> None:
        self.edges = edges

    def keys(self) -> list[str]:
        return ["edges"]


def test_refuses_objects_that_only_look_like_a_mapping() -> None:
    with pytest.raises(UnjoinableBatches):
        join([Graph(torch.ones(2, 3)), Graph(torch.ones(2, 3))])


def test_refuses_a_dim_0_that_is_not_that_of_the_samples() -> None:
    by_length = [torch.ones(35, 8), torch.ones(35, 8)]  # (tokens, samples)
    with pytest.raises(UnjoinableBatches, match="dim 0 of a tensor has 35 entries"):
        join(by_length, 8)
    assert join(by_length).shape == (70, 8)


def test_appends_lists_with_one_entry_per_sample() -> None:
    images = [torch.ones(3, 4, 5), torch.ones(3, 6, 7)]
    joined = join([(images, [{"box": 1}, {"box": 2}]), (images, [{"box": 3}, {"box": 4}])], 2)
    assert [each.shape[1] for each in joined[0]] == [4, 6, 4, 6]
    assert [each["box"] for each in joined[1]] == [1, 2, 3, 4]
    # A list of fields has as many entries by chance.
    fields = [torch.ones(2, 3), torch.zeros(2)]
    assert join([fields, fields], 2)[0].shape == (4, 3)


def test_joins_arrays_and_user_dicts() -> None:
    batch = UserDict({"x": np.ones((2, 3))})
    joined = join([batch, batch], 2)
    assert isinstance(joined, UserDict)
    assert joined["x"].shape == (4, 3)
    assert len(hashes_of_rows(batch)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_hashes_rows_of_any_dtype(dtype: torch.dtype) -> None:
    one, two = hashes_of_rows(torch.tensor([[1.0, 2.0], [1.0, 4.0]]).to(dtype))
    assert one != two


class Ranks:
    """Records loaders as two ranks do, and replays them, with torch as it was afterwards."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        # Setting an attribute to itself lets the fixture restore it.
        for owner, name in (
            (DataLoader, "__init__"),
            (DataLoader, "__iter__"),
            (DataLoader, "__len__"),
            (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
        ):
            monkeypatch.setattr(owner, name, getattr(owner, name))

    def record(self, rank: int, data: Any, **options: Any) -> None:
        folder = self.folder / f"rank-{rank}"
        folder.mkdir()
        with self._patch.context() as patch:
            for owner, name in ((DataLoader, "__init__"), (DataLoader, "__iter__")):
                patch.setattr(owner, name, getattr(owner, name))
            kind = torch.utils.data.dataloader._BaseDataLoaderIter
            patch.setattr(kind, "__next__", kind.__next__)
            recorder = BatchRecorder(folder)
            LoaderKeys().follow()
            recorder.follow()
            list(DataLoader(data, **options))
        facts = {"tensor_parallel": False, "loaders": recorder.loaders}
        (folder / "stock.facts").write_text(json.dumps(facts))

    def replay(self) -> None:
        LoaderKeys().follow()
        BatchReplay(self.folder).follow()


def test_replays_the_union_in_another_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(8.0)
    ranks = Ranks(tmp_path, monkeypatch)
    for rank in range(2):
        ranks.record(rank, TensorDataset(x), batch_size=2, sampler=range(rank, 8, 2))
    state = torch.get_rng_state()
    list(DataLoader(TensorDataset(x), batch_size=2, sampler=range(0, 8, 2)))
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    ranks.replay()
    # One process makes its loader in another line, as a script does that asks for the world size.
    loader = DataLoader(TensorDataset(x), batch_size=2)
    assert [batch[0].tolist() for batch in loader] == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert len(loader) == 2
    # What the script draws next is what each rank has drawn.
    assert torch.equal(torch.get_rng_state(), drawn)
    with pytest.raises(UnjoinableBatches, match="no rank does"):
        iter(DataLoader(TensorDataset(torch.ones(3))))


def test_batches_that_cannot_be_saved_are_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, monkeypatch)
    ranks.record(0, [1, 2], collate_fn=lambda samples: (number for number in samples))
    ranks.replay()
    with pytest.raises(UnjoinableBatches, match=r"could not be saved: .*cannot pickle"):
        list(DataLoader([1, 2]))  # type: ignore[arg-type]
