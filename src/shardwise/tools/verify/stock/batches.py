"""Records what the DataLoaders of a rank yield, and replays the union of all ranks.

A loader is known by the line of the script that made it and by a count, so that the same loader
has the same key in all processes. FOLDER/rank-R/batch-LOADER-EPOCH-NUMBER.pt is what its iteration
number EPOCH yielded as number NUMBER.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, dataloader

from shardwise.tools.verify import watching

IGNORED = -100
"""The target that cross-entropy ignores, with which rows of labels are padded."""


class UnjoinableBatches(Exception):
    """Batches of several ranks that cannot be joined to one. The message says why."""


class LoaderKeys:
    """Gives every DataLoader a key that is the same in all processes."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()

    def follow(self) -> None:
        """Give a key to each loader that is made from now on."""
        init: Callable[..., None] = DataLoader.__init__

        @wraps(init)
        def keyed(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            if "stock_key" not in vars(loader):
                line = (watching.user_line() or "library").replace("/", "_")
                object.__setattr__(loader, "stock_key", f"{line}.{self._made[line]}")
                object.__setattr__(loader, "stock_epochs", 0)
                self._made[line] += 1
            init(loader, *args, **kwargs)

        DataLoader.__init__ = keyed  # type: ignore[method-assign, assignment]


class BatchRecorder:
    """Writes what the loaders of one rank yield into `folder`.

    `fingerprints` are kept in memory, too: of each batch the loader's key, its iteration, the
    number of rows and a hash for each row, and whether gradients were enabled.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seen: list[dict[str, Any]] = []
        self.loaders: dict[str, dict[str, Any]] = {}
        self._counted = 0
        self.evaluated = 0
        """Rows that were yielded without gradients since the last batch with gradients."""

    def count_since_step(self) -> int:
        """Return the number of batches with gradients since the last call."""
        count = len([each for each in self.seen if each["trains"]]) - self._counted
        self._counted += count
        return count

    def follow(self) -> None:
        """Record from now on."""
        begin = DataLoader.__iter__
        following = dataloader._BaseDataLoaderIter.__next__

        @wraps(begin)
        def begun(loader: DataLoader[Any]) -> Any:
            iterator = begin(loader)
            self._begin(iterator, loader)
            return iterator

        @wraps(following)
        def recorded(iterator: Any) -> Any:
            batch = following(iterator)
            if hasattr(iterator, "stock"):
                self._record(iterator, batch)
            return batch

        DataLoader.__iter__ = begun  # type: ignore[method-assign]
        dataloader._BaseDataLoaderIter.__next__ = recorded  # type: ignore[method-assign, assignment]

    def _begin(self, iterator: Any, loader: DataLoader[Any]) -> None:
        key = loader.stock_key  # type: ignore[attr-defined]
        iterator.stock = [key, loader.stock_epochs, 0]  # type: ignore[attr-defined]
        loader.stock_epochs += 1  # type: ignore[attr-defined]
        facts = self.loaders.setdefault(key, {})
        try:
            facts["length"] = len(loader)
        except TypeError:  # a stream
            facts["length"] = None
        try:
            facts["samples"] = len(loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            facts["samples"] = None
        facts["sampler"] = type(loader.sampler).__name__
        facts["shuffles"] = getattr(loader.sampler, "shuffle", False)
        facts["batch_size"] = loader.batch_size

    def _record(self, iterator: Any, batch: Any) -> None:
        key, epoch, number = iterator.stock
        iterator.stock[2] += 1
        path = self._folder / f"batch-{key}-{epoch}-{number}.pt"
        try:
            torch.save(batch, path)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            path.unlink(missing_ok=True)
            self.loaders[key]["not_saved"] = str(error)
        rows = hashes_of_rows(batch)
        self.evaluated = _evaluated(self.evaluated, rows)
        trains = torch.is_grad_enabled()
        self.seen.append({"loader": key, "epoch": epoch, "rows": rows, "trains": trains})


def _evaluated(before: int, rows: Sequence[int]) -> int:
    """Return the rows of the current evaluation, after a batch that was yielded now."""
    return 0 if torch.is_grad_enabled() else before + len(rows)


def hashes_of_rows(batch: Any) -> list[int]:
    """Return a hash of each row of a batch, over all of its tensors."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    tensors = [each for each in tensors if each.ndim]
    if not tensors:
        return []
    rows = len(tensors[0])
    parts = [each.detach().cpu() for each in tensors if len(each) == rows]
    hashes = []
    for row in range(rows):
        digest = hashlib.blake2b(digest_size=6)
        for part in parts:
            digest.update(_bytes(part[row]))
        hashes.append(int.from_bytes(digest.digest()))
    return hashes


def _bytes(values: Tensor) -> bytes:
    # Without padding at the end: the same sample is padded to another length in another batch.
    flat = values.contiguous().reshape(-1)
    if flat.dtype is torch.bfloat16:
        flat = flat.float()
    if not flat.is_floating_point() and flat.numel() > 1:
        kept = ((flat != 0) & (flat != IGNORED)).nonzero()
        flat = flat[: int(kept[-1]) + 1] if len(kept) else flat[:0]
    return flat.numpy().tobytes()


class BatchReplay:
    """Makes the loaders of one process yield the union of what `ranks` recorded."""

    def __init__(self, folder: Path, widen: bool = False) -> None:
        self._ranks = sorted(folder.glob("rank-*"), key=lambda path: int(path.name[5:]))
        self._widen = widen
        self._lengths: dict[str, Any] = {}
        self._is_tensor_parallel = False
        self.evaluated = 0
        for rank in self._ranks:
            facts = json.loads((rank / "stock.facts").read_text())
            self._is_tensor_parallel |= facts["tensor_parallel"]
            for key, loader in facts["loaders"].items():
                self._lengths.setdefault(key, loader["length"])

    def follow(self) -> None:
        """Replay from now on. A loader that no rank has iterated over stays as it is."""
        begin, length = DataLoader.__iter__, DataLoader.__len__

        @wraps(begin)
        def replayed(loader: DataLoader[Any]) -> Iterator[Any]:
            key = loader.stock_key  # type: ignore[attr-defined]
            if key not in self._lengths:
                return begin(loader)
            epoch = loader.stock_epochs  # type: ignore[attr-defined]
            loader.stock_epochs += 1  # type: ignore[attr-defined]
            return self._batches(key, epoch)

        @wraps(length)
        def recorded(loader: DataLoader[Any]) -> int:
            known = self._lengths.get(getattr(loader, "stock_key", ""))
            return length(loader) if known is None else int(known)

        DataLoader.__iter__ = replayed  # type: ignore[method-assign, assignment]
        DataLoader.__len__ = recorded  # type: ignore[method-assign]

    def _batches(self, key: str, epoch: int) -> Iterator[Any]:
        number = 0
        while True:
            paths = [rank / f"batch-{key}-{epoch}-{number}.pt" for rank in self._ranks]
            # Ranks may have different numbers of batches; the union is of those that have one.
            found = [torch.load(path, weights_only=False) for path in paths if path.exists()]
            if not found:
                return
            if self._is_tensor_parallel or are_copies(found):
                found = without_copies(found)
            batch = join(found)
            self.evaluated = _evaluated(self.evaluated, hashes_of_rows(batch))
            if self._widen:
                batch = torch.utils._pytree.tree_map_only(Tensor, _widened, batch)
            yield batch
            number += 1


def _widened(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values


def without_copies(batches: Sequence[Any]) -> list[Any]:
    """Return the batches without those whose rows an earlier one has: ranks that share the layers
    of a model are given the same rows."""
    kept: dict[tuple[int, ...], Any] = {}
    for batch in batches:
        kept.setdefault(tuple(hashes_of_rows(batch)), batch)
    return list(kept.values())


def are_copies(batches: Sequence[Any]) -> bool:
    """Return whether each distinct batch occurs equally often, and more than once.

    Ranks that share the layers or the sequences of a model are given the same rows. One process
    needs them once. A batch that occurs more often than others counts more often, so it stays.
    """
    counts = Counter(tuple(hashes_of_rows(batch)) for batch in batches)
    return () not in counts and len(set(counts.values())) == 1 < max(counts.values())


def join(batches: Sequence[Any]) -> Any:
    """Return one batch with the rows of all `batches`, in their order.

    Tensors are concatenated along dim 0. Rows of different lengths are padded at their end: with
    -100 where it occurs in one of the tensors (labels), else with 0.

    Raises:
        UnjoinableBatches: If the batches do not have the same structure, or have values that are
            neither tensors nor lists nor equal.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return _joined(batches)
    if isinstance(first, dict) or hasattr(first, "keys"):
        keys = list(first.keys())
        if any(list(each.keys()) != keys for each in batches):
            raise UnjoinableBatches("ranks have batches with different keys")
        values = {key: join([each[key] for each in batches]) for key in keys}
        return values if type(first) is dict else type(first)(values)
    if isinstance(first, list | tuple):
        if any(len(each) != len(first) for each in batches) or _is_of_samples(first):
            return type(first)(sample for each in batches for sample in each)
        parts = [join([each[place] for each in batches]) for place in range(len(first))]
        is_named = isinstance(first, tuple) and hasattr(first, "_fields")
        return type(first)(*parts) if is_named else type(first)(parts)
    if all(each == first for each in batches[1:]):
        return first
    raise UnjoinableBatches(
        f"batches of several ranks have different values of type {type(first).__name__}, which "
        "cannot be joined"
    )


def _is_of_samples(values: Sequence[Any]) -> bool:
    """Return whether a list has one entry per sample, such as strings, and not one per field."""
    return bool(values) and not any(
        isinstance(each, Tensor | list | tuple | dict) for each in values
    )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if first.ndim == 0:
        if all(torch.equal(each, first) for each in tensors[1:]):
            return first
        raise UnjoinableBatches("batches of several ranks have different numbers (0-dim tensors)")
    shapes = {tuple(each.shape[1:]) for each in tensors}
    if len(shapes) == 1:
        return torch.cat(list(tensors))
    if len({each.ndim for each in tensors}) > 1:
        raise UnjoinableBatches("batches of several ranks have tensors of different ranks")
    longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    integers = not first.is_floating_point() and first.dtype is not torch.bool
    fill = IGNORED if integers and any(bool((t == IGNORED).any()) for t in tensors) else 0
    padded = []
    for each in tensors:
        whole = each.new_full((len(each), *longest), fill)
        whole[tuple(slice(size) for size in each.shape)] = each
        padded.append(whole)
    return torch.cat(padded)
