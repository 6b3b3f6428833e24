"""Records the batches that each rank's DataLoaders yield, and replays their union.

A loader's key is the script line that created it and a counter, so that the same loader has the
same key in all processes. FOLDER/rank-R/batch-LOADER-EPOCH-NUMBER.pt is batch NUMBER of the
loader's iteration EPOCH.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, dataloader

from shardwise.layout.fingerprints import can_be_taken
from shardwise.tools.verify import watching

IGNORED = -100
"""The target that cross-entropy ignores. Rows of labels are padded with it."""


class UnjoinableBatches(Exception):
    """Raised if the ranks' batches cannot be combined for one process. The message says why."""


class LoaderKeys:
    """Gives every DataLoader a key that is the same in all processes."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()

    def follow(self) -> None:
        """Patch DataLoader to assign a key to every new loader."""
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
    """Records the batches that one rank's loaders yield.

    The batches are saved to `folder`, unless `keeps` is False. `seen` describes each batch: the
    loader's key and iteration, the step, a hash of each row, and whether gradients were enabled. If
    `widens` is True, the script receives floating-point tensors as fp64.
    """

    def __init__(self, folder: Path, *, keeps: bool = True, widens: bool = False) -> None:
        self._folder, self._keeps, self._widens = folder, keeps, widens
        self.seen: list[dict[str, Any]] = []
        self.loaders: dict[str, dict[str, Any]] = {}
        self.steps = 0
        """Number of optimizer steps so far, which the recorder increments."""
        self._counted = 0
        self.evaluated = 0
        """Number of rows without gradients since the last batch with gradients."""

    def count_since_step(self) -> int:
        """Return the number of batches with gradients enabled since the last call."""
        count = len([each for each in self.seen if each["trains"]]) - self._counted
        self._counted += count
        return count

    def follow(self) -> None:
        """Patch DataLoader to record every batch."""
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
            return widened(batch) if self._widens else batch

        DataLoader.__iter__ = begun  # type: ignore[method-assign]
        dataloader._BaseDataLoaderIter.__next__ = recorded  # type: ignore[method-assign, assignment]

    def _begin(self, iterator: Any, loader: DataLoader[Any]) -> None:
        if not hasattr(loader, "stock_key"):
            return  # created without __init__; the reference refuses it
        key = loader.stock_key
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
        facts["shuffles"] = bool(getattr(loader.sampler, "shuffle", False))
        facts["replaces"] = bool(getattr(loader.sampler, "replacement", False))
        size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
        facts["batch_size"] = size if isinstance(size, int) else None

    def _record(self, iterator: Any, batch: Any) -> None:
        key, epoch, number = iterator.stock
        iterator.stock[2] += 1
        path = self._folder / f"batch-{key}-{epoch}-{number}.pt"
        if self._keeps and "not_saved" not in self.loaders[key]:
            try:
                torch.save(batch, path)
            except Exception as error:  # a class may fail to be pickled in any way
                path.unlink(missing_ok=True)
                # The reference refuses to run on an incomplete union (see BatchReplay).
                self.loaders[key]["not_saved"] = f"{type(error).__name__}: {error}"
        rows = hashes_of_rows(batch)
        self.evaluated = _evaluated(self.evaluated, rows)
        self.seen.append(
            {
                "loader": key,
                "epoch": epoch,
                "step": self.steps,
                "rows": rows,
                "trains": torch.is_grad_enabled(),
            }
        )


def _evaluated(before: int, rows: Sequence[int]) -> int:
    """Return the current evaluation's row count, after a batch that contains `rows`.

    `before` is the count before that batch. The result is 0 if gradients are enabled.
    """
    return 0 if torch.is_grad_enabled() else before + len(rows)


def hashes_of_rows(batch: Any) -> list[int]:
    """Return a hash of each row of a batch, over all tensors of the batch."""
    leaves = torch.utils._pytree.tree_leaves(_plain(batch))
    tensors = [each for each in leaves if isinstance(each, Tensor) and can_be_taken(each)]
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


def _plain(batch: Any) -> Any:
    """Return the batch with mappings as dicts, because pytree does not traverse other types."""
    if isinstance(batch, Mapping):
        return {key: _plain(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_plain(value) for value in batch]
    return torch.from_numpy(batch) if _is_numeric(batch) else batch


def _is_numeric(values: Any) -> bool:
    """Return whether `values` is a NumPy array that torch can convert."""
    return isinstance(values, np.ndarray) and values.dtype.kind in "biufc" and bool(values.ndim)


def _bytes(values: Tensor) -> bytes:
    # Strip trailing padding, because a sample's padded length depends on its batch.
    flat = values.resolve_conj().contiguous().reshape(-1)
    if not (flat.is_floating_point() or flat.is_complex()) and flat.numel() > 1:
        kept = ((flat != 0) & (flat != IGNORED)).nonzero()
        flat = flat[: int(kept[-1]) + 1] if len(kept) else flat[:0]
    # NumPy knows neither bfloat16 nor the 8-bit floats, so read their bytes.
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


class BatchReplay:
    """Makes one process's loaders yield the union of the batches that the ranks recorded.

    Loaders are matched by key. With only one rank, a script or library may create a loader on a
    different line. Such a loader is matched with a recorded loader whose dataset has the same size.
    """

    def __init__(self, folder: Path, widen: bool = False) -> None:
        self._ranks = sorted(folder.glob("rank-*"), key=lambda path: int(path.name[5:]))
        self._widen = widen
        self._loaders: dict[str, dict[str, Any]] = {}
        self._bound: dict[str, str] = {}
        """Maps the key of a loader in this process to its recorded key."""
        self._is_tensor_parallel = False
        self.evaluated = 0
        self.window: int | None = None
        """Number of accumulation steps of DeepSpeed, or None without DeepSpeed."""
        for rank in self._ranks:
            facts = json.loads((rank / "stock.facts").read_text())
            self.window = facts.get("window")
            self._is_tensor_parallel |= facts["tensor_parallel"]
            for key, loader in facts["loaders"].items():
                known = self._loaders.setdefault(key, dict(loader))
                # Ranks may have different numbers of batches. The reference has the largest.
                if known["length"] is not None and loader["length"] is not None:
                    known["length"] = max(known["length"], loader["length"])
                if "not_saved" in loader:
                    known["not_saved"] = loader["not_saved"]

    def follow(self) -> None:
        """Patch DataLoader to replay the recorded batches."""
        begin, length = DataLoader.__iter__, DataLoader.__len__

        @wraps(begin)
        def replayed(loader: DataLoader[Any]) -> Iterator[Any]:
            key = self._key(loader)
            if key is None:
                line = getattr(loader, "stock_key", "an unknown line")
                raise UnjoinableBatches(
                    f"one process iterates over the DataLoader of {line}, and no rank does"
                )
            epoch = loader.stock_epochs  # type: ignore[attr-defined]
            loader.stock_epochs += 1  # type: ignore[attr-defined]
            self._draw(loader, key)
            return self._batches(key, epoch)

        @wraps(length)
        def recorded(loader: DataLoader[Any]) -> int:
            key = self._key(loader)
            known = None if key is None else self._loaders[key]["length"]
            return length(loader) if known is None else int(known)

        DataLoader.__iter__ = replayed  # type: ignore[method-assign, assignment]
        DataLoader.__len__ = recorded  # type: ignore[method-assign]

    def _key(self, loader: DataLoader[Any]) -> str | None:
        """Return the loader's recorded key, or None if no rank has iterated over it."""
        own = str(getattr(loader, "stock_key", ""))
        if own in self._loaders:
            self._bound[own] = own
        elif own not in self._bound:
            try:
                samples = len(loader.dataset)  # type: ignore[arg-type]
            except TypeError:
                samples = None
            for key, facts in self._loaders.items():
                if key not in self._bound.values() and facts["samples"] == samples:
                    self._bound[own] = key
                    break
        return self._bound.get(own)

    def _draw(self, loader: DataLoader[Any], key: str) -> None:
        """Draw the random numbers that a DataLoader draws when an iteration starts.

        Without this, the script's next random numbers would differ from those on the ranks.
        """
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        if self._loaders[key]["sampler"] == "RandomSampler":
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)

    def _batches(self, key: str, epoch: int) -> Iterator[Any]:
        facts = self._loaders[key]
        if "not_saved" in facts:
            raise UnjoinableBatches(
                f"a batch of the DataLoader of {key} could not be saved: {facts['not_saved']}"
            )
        number = 0
        while True:
            paths = [rank / f"batch-{key}-{epoch}-{number}.pt" for rank in self._ranks]
            # Ranks may have different numbers of batches, so join only those that exist.
            found = [_loaded(path) for path in paths if path.exists()]
            if not found:
                return
            if self._is_tensor_parallel or are_copies(found):
                found = without_copies(found)
            batch = join(found, facts["batch_size"])
            # Only evaluations count rows, so training need not hash its batches again.
            rows = [] if torch.is_grad_enabled() else hashes_of_rows(batch)
            self.evaluated = _evaluated(self.evaluated, rows)
            yield widened(batch) if self._widen else batch
            number += 1


def _loaded(path: Path) -> Any:
    """Load a batch, with its GPU tensors on this process's GPU."""

    def place(storage: Any, location: str) -> Any:
        return storage.cuda() if location.startswith("cuda") else storage

    return torch.load(path, map_location=place, weights_only=False)


def widened(batch: Any) -> Any:
    """Return the batch with its floating-point tensors in fp64."""

    def cast(values: Tensor) -> Tensor:
        return values.double() if values.is_floating_point() else values

    return torch.utils._pytree.tree_map_only(Tensor, cast, batch)


def without_copies(batches: Sequence[Any]) -> list[Any]:
    """Return the batches without those that have the same rows as an earlier batch.

    Ranks that share the layers of a model receive the same rows.
    """
    kept: dict[tuple[int, ...], Any] = {}
    for batch in batches:
        kept.setdefault(tuple(hashes_of_rows(batch)), batch)
    return list(kept.values())


def are_copies(batches: Sequence[Any]) -> bool:
    """Return whether every distinct batch occurs equally often, and more than once.

    If so, the ranks share the layers or sequences of a model, and one process needs each batch only
    once. If some batch occurs more often than another, it also has more weight in the training, so
    none of its copies may be dropped.
    """
    counts = Counter(tuple(hashes_of_rows(batch)) for batch in batches)
    return () not in counts and len(set(counts.values())) == 1 < max(counts.values())


def join(batches: Sequence[Any], batch_size: int | None = None) -> Any:
    """Return one batch with the rows of all `batches`, in the same order.

    Tensors and arrays are concatenated along dim 0. Rows of different lengths are padded at the
    end: with -100 if one of the tensors contains -100 (labels), otherwise with 0. Lists with one
    entry per sample are concatenated.

    Args:
        batches: The batches, one per rank.
        batch_size: Largest number of samples per batch, or None if it is not known.

    Raises:
        UnjoinableBatches: If the batches have different structures, if values other than tensors
            and lists differ, or if dim 0 is not the sample dim.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return _joined(batches, batch_size)
    if _is_numeric(first):
        return _joined([torch.from_numpy(each) for each in batches], batch_size).numpy()
    if isinstance(first, Mapping):
        keys = list(first.keys())
        if any(not isinstance(each, Mapping) or list(each.keys()) != keys for each in batches):
            raise UnjoinableBatches("ranks have batches with different keys")
        values = {key: join([each[key] for each in batches], batch_size) for key in keys}
        return values if type(first) is dict else type(first)(values)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        lengths = {len(each) for each in batches}
        if len(lengths) > 1 or _is_of_samples(batches, batch_size):
            return type(first)(sample for each in batches for sample in each)
        parts = [join([each[place] for each in batches], batch_size) for place in range(len(first))]
        is_named = isinstance(first, tuple) and hasattr(first, "_fields")
        return type(first)(*parts) if is_named else type(first)(parts)
    if isinstance(first, str | bytes | int | float | bool | type(None)) and all(
        each == first for each in batches[1:]
    ):
        return first
    raise UnjoinableBatches(
        f"batches of several ranks have different values of type {type(first).__name__}, which "
        "cannot be joined"
    )


def _is_of_samples(batches: Sequence[Sequence[Any]], batch_size: int | None) -> bool:
    """Return whether the lists have one entry per sample, such as strings, not one per field."""
    entries = [entry for each in batches for entry in each]
    if not any(isinstance(each, Tensor | np.ndarray | list | tuple | Mapping) for each in entries):
        return bool(entries)
    # Images of different sizes are a list of tensors, and their boxes a list of mappings. In
    # a list of fields, dim 0 of each tensor is the samples.
    is_even = any(all(isinstance(e, kind) for e in entries) for kind in (Tensor, Mapping))
    leaves = torch.utils._pytree.tree_leaves(_plain(entries))
    tensors = [each for each in leaves if isinstance(each, Tensor) and each.ndim]
    return (
        is_even
        and len(batches[0]) == batch_size
        and not any(len(each) == batch_size for each in tensors)
    )


def _joined(tensors: Sequence[Tensor], batch_size: int | None) -> Tensor:
    first = tensors[0]
    if any(not isinstance(each, Tensor) or not can_be_taken(each) for each in tensors):
        raise UnjoinableBatches("batches of several ranks have tensors that are not dense")
    if first.ndim == 0:
        if all(torch.equal(each, first) for each in tensors[1:]):
            return first
        raise UnjoinableBatches("batches of several ranks have different numbers (0-dim tensors)")
    if len({each.ndim for each in tensors}) > 1:
        raise UnjoinableBatches("batches of several ranks have tensors of different ranks")
    if batch_size is not None and len(first) > batch_size:
        raise UnjoinableBatches(
            f"dim 0 of a tensor has {len(first)} entries in a batch of {batch_size} samples, so "
            "the dim of the samples is not known"
        )
    shapes = {tuple(each.shape[1:]) for each in tensors}
    if len(shapes) == 1:
        return torch.cat(list(tensors))
    longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    integers = not first.is_floating_point() and first.dtype is not torch.bool
    fill = IGNORED if integers and any(bool((t == IGNORED).any()) for t in tensors) else 0
    padded = []
    for each in tensors:
        whole = each.new_full((len(each), *longest), fill)
        whole[tuple(slice(size) for size in each.shape)] = each
        padded.append(whole)
    return torch.cat(padded)
