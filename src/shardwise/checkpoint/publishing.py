"""Publishes a model's weights for inference. Every rank writes or sends its own parts.

    weights/
    ├── weights-120/           a Transformers model: model.safetensors, config.json, and
    │                          fingerprints.json with the fingerprint of every tensor
    ├── .weights-130.partial/  being written; renamed once all ranks have finished
    └── latest ─▶ weights-120  replaced after the rename, so that a reader never sees a mixture

No rank gathers a full tensor. Each range is written directly from a rank's memory to its position
in the file.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import file_system, save_tensors
from shardwise.checkpoint.agreement import agree
from shardwise.checkpoint.checksum import ChecksumPart, combine
from shardwise.checkpoint.engine_view import EngineView
from shardwise.checkpoint.format import (
    TensorFile,
    TensorSpec,
    dtype_name,
    dtype_of,
    index,
    index_name,
    lay_out,
)
from shardwise.checkpoint.save_tensors import SavePlan
from shardwise.checkpoint.tensor_spans import MODEL
from shardwise.checkpoint.tensors import EngineTensors, spec_of
from shardwise.checkpoint.writer import TensorSink, Writer, create
from shardwise.errors import CheckpointNotWritten, UsageError
from shardwise.layout.byte_ranges import Extent
from shardwise.timeline import Row, span

LATEST = "latest"
FINGERPRINTS = "fingerprints.json"

_SPLIT = 5 * 10**9
"""Maximum size in bytes of a file, as in `engine.save`."""

_VERSION = re.compile(r"weights-([0-9]+)(?:\.([0-9]+))?")


@dataclass(frozen=True)
class PublishedPart:
    """Consecutive elements of a published tensor, for the callback of `engine.publish`.

    Args:
        name: Name of the tensor.
        shape: Shape of the full tensor.
        first: Index of the first element, in row-major order.
        values: The elements: a 1-D CPU tensor in the published dtype. Valid only during the call.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    values: Tensor


Callback = Callable[[PublishedPart], None]


class _Converter(TensorSink):
    """TensorSink that converts published tensors to their published dtypes and passes them on."""

    def __init__(
        self,
        stored: Mapping[str, TensorSpec],
        published: Mapping[str, TensorSpec],
        take: Callable[[str, int, Tensor], None],
    ) -> None:
        self._stored, self._published, self._take = stored, published, take

    def write(self, kind: str, ranges: Sequence[Extent], memory: memoryview) -> None:
        del kind
        for extent in ranges:
            if extent.tensor not in self._published:
                continue
            dtype = dtype_of(self._stored[extent.tensor].dtype)
            data = torch.frombuffer(memory[extent.start : extent.end], dtype=torch.uint8)
            # A range may start at any byte of the buffer, and a view needs an aligned one.
            aligned = data if data.data_ptr() % dtype.itemsize == 0 else data.clone()
            values = aligned.view(dtype).to(dtype_of(self._published[extent.tensor].dtype))
            self._take(extent.tensor, extent.offset // dtype.itemsize, values)

    def settle(self) -> None:
        """No-op, because `write` has already used every range."""


class Publisher:
    """Publishes an engine's weights, and stores the fingerprints of the last published version.

    Args:
        claim: Locks a folder for this job. Collective.
    """

    def __init__(self, state: EngineView, claim: Callable[[Path], None]) -> None:
        self._state, self._claim = state, claim
        # The last callback, with the fingerprints that it has received. Another callback, which
        # may serve another receiver, gets everything.
        self._sent: tuple[Callback, dict[str, str]] | None = None
        # Fingerprints of the last version by name, its folder, and the layout of its files.
        self._last: dict[str, str] = {}
        self._home: Path | None = None
        self._layout: list[TensorFile] = []

    def publish(
        self,
        target: str | os.PathLike[str] | Callback,
        dtype: torch.dtype | None,
        keep: int,
        *,
        only_changed: bool,
    ) -> Path | None:
        """See Engine.publish."""
        state, group = self._state, self._state.spec.world_group
        state.refuse_in_step("engine.publish")
        state.refuse_on_waiting_spare("engine.publish")
        if keep < 1:
            raise UsageError(f"keep={keep}: must be the number of versions to keep, 1 or more.")
        if dtype is not None and not dtype.is_floating_point:
            raise UsageError(
                f"dtype={dtype}: weights are published in a floating-point dtype, such as "
                "torch.bfloat16. Leave it out to keep theirs."
            )
        if group.has_changing_ranks:
            raise UsageError(
                "engine.publish cannot be used with --elastic-islands, because a rank that leaves "
                "would leave holes in the files. Publish from a checkpoint instead: "
                "`shardwise checkpoint export`."
            )
        if state.world.settings.trial:
            return None
        state.objects.look_for_changes()
        with span("publish", Row.CHECKPOINT), state.anchored():
            tensors = EngineTensors(state.spec, state.objects.states, state.extra_sets)
            stored = _specs(tensors)
            published = {name: _converted(spec, dtype) for name, spec in stored.items()}
            if callable(target):
                self._send(tensors, stored, published, target, only_changed=only_changed)
                return None
            folder = Path(target)
            self._claim(folder)
            return self._write(tensors, stored, published, folder, keep, only_changed, dtype)

    # -- fingerprints -----------------------------------------------------------------------

    def _fingerprints(
        self,
        tensors: EngineTensors,
        stored: Mapping[str, TensorSpec],
        published: Mapping[str, TensorSpec],
        take: Callable[[str, int, Tensor], None] = lambda *_: None,
    ) -> dict[str, str]:
        """Pass this rank's parts to `take`, and return all tensors' fingerprints. Collective."""
        parts: dict[str, list[ChecksumPart]] = {}

        def add(name: str, first: int, values: Tensor) -> None:
            data = values.view(torch.uint8).numpy().data
            at = first * values.itemsize
            parts.setdefault(name, []).append(ChecksumPart(at, len(data), zlib.crc32(data)))
            take(name, first, values)

        plan = SavePlan(
            # Only the names matter here: `lend` skips tensors that the plan does not have.
            {MODEL: lay_out(MODEL, stored.values(), limit=_SPLIT, aliases={})},
            tensors.trained.reported(),
            {},
            [],
            {},
            None,
        )
        save_tensors.lend(tensors, plan, _Converter(stored, published, add))
        all_parts: dict[str, list[ChecksumPart]] = {}
        for of_rank in self._state.spec.world_group.gather_objects(parts):
            for name, found in of_rank.items():
                all_parts.setdefault(name, []).extend(found)
        # Import here, because every rank imports this module at its start, and few publish weights.
        from shardwise.checkpoint.formats.comparing import format_fingerprint

        prints = {}
        for name, spec in published.items():
            crc = combine(all_parts.get(name, ()), spec.nbytes)
            assert crc is not None, f"the ranks hold {name} whole"
            prints[name] = format_fingerprint(spec, f"{crc:08x}")
        return prints

    # -- to a callback ----------------------------------------------------------------------

    def _send(
        self,
        tensors: EngineTensors,
        stored: Mapping[str, TensorSpec],
        published: Mapping[str, TensorSpec],
        callback: Callback,
        *,
        only_changed: bool,
    ) -> None:
        wanted = dict(published)
        known = self._sent[1] if self._sent is not None and self._sent[0] == callback else {}
        if only_changed and known:
            # Fingerprints are much cheaper than sending, so compute them first.
            now = self._fingerprints(tensors, stored, published)
            wanted = {name: s for name, s in wanted.items() if now[name] != known.get(name)}

        failures: list[str] = []

        def take(name: str, first: int, values: Tensor) -> None:
            # After an error, this rank must still join the collectives. Others wait for it there.
            if not failures:
                try:
                    callback(PublishedPart(name, published[name].shape, first, values))
                except Exception as error:
                    failures.append(f"The callback of engine.publish failed: {error!r:.500}")

        sent = self._fingerprints(tensors, stored, wanted, take)
        agree(self._state.spec.world_group, next(iter(failures), None), CheckpointNotWritten)
        self._sent = callback, {**known, **sent}

    # -- to a folder ------------------------------------------------------------------------

    def _write(
        self,
        tensors: EngineTensors,
        stored: Mapping[str, TensorSpec],
        published: Mapping[str, TensorSpec],
        folder: Path,
        keep: int,
        only_changed: bool,
        dtype: torch.dtype | None,
    ) -> Path:
        group, aliases = self._state.spec.world_group, tensors.inventory.aliases
        # Store frozen weights in separate files, which later versions can share.
        trained = {named.name for named in tensors.states.parameters.named}
        frozen = tensors.inventory.parameters.keys() - trained
        layout = lay_out(
            "model",
            published.values(),
            limit=_SPLIT,
            aliases=aliases,
            group_of=lambda spec: 0 if spec.name in frozen else 1,
        )
        # A version shares the files that have not changed with the one before (hard links). Files
        # with the same header have the same tensors at the same places.
        linked: set[str] = set()
        home = self._home if self._home is not None and self._home.parent == folder else None
        if only_changed and home is not None and self._is_linkable(home):
            now = self._fingerprints(tensors, stored, published)
            before = {file.name: file for file in self._layout}
            linked = {
                file.name
                for file in layout
                if file.name in before
                and before[file.name].header == file.header
                and all(now[name] == self._last.get(name) for name in file.tensors)
            }
        written = {
            name: published[name] for f in layout if f.name not in linked for name in f.tensors
        }
        draft, final = self._begin(folder, layout, linked, home)
        writer = Writer(draft, {MODEL: layout})
        failure = None

        def take(name: str, first: int, values: Tensor) -> None:
            data = values.view(torch.uint8).numpy().data
            writer.write(MODEL, [Extent(name, 0, len(data), first * values.itemsize)], data)
            writer.settle()  # `values` is freed after this call

        try:
            prints = self._fingerprints(tensors, stored, written, take)
            try:
                writer.finish()
            except OSError as error:
                failure = _failure(error, draft)
        finally:
            writer.close()
        try:
            agree(group, failure, CheckpointNotWritten)
        except CheckpointNotWritten:
            if group.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise
        prints = {name: prints.get(name) or self._last[name] for name in published}
        failure = None
        if group.rank == 0:
            try:
                self._finish(draft, final, layout, prints, aliases, dtype)
                _prune(folder, final, keep)
            except OSError as error:
                shutil.rmtree(draft, ignore_errors=True)
                failure = _failure(error, final)
        agree(group, failure, CheckpointNotWritten)
        self._last, self._home, self._layout = prints, final, layout
        return final

    def _is_linkable(self, home: Path) -> bool:
        """Return whether the last version's files can be hard-linked. Collective."""
        known = False
        if self._state.spec.world_group.rank == 0:
            probe = home.parent / ".link.partial"
            try:
                probe.unlink(missing_ok=True)
                os.link(home / FINGERPRINTS, probe)
                probe.unlink()
                known = all((home / file.name).is_file() for file in self._layout)
            except OSError:  # the version was removed, or the disk has no hard links
                known = False
        return bool(self._state.spec.world_group.gather_objects(known)[0])

    def _begin(
        self, folder: Path, layout: Sequence[TensorFile], linked: set[str], home: Path | None
    ) -> tuple[Path, Path]:
        """Create a draft folder with its files. Return its path and its final path. Collective."""
        group, failure, paths = self._state.spec.world_group, None, (folder, folder)
        if group.rank == 0:
            try:
                final = _free_name(folder, self._state.steps)
                draft = folder / f".{final.name}.partial"
                folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
                draft.mkdir()
                for file in layout:
                    if file.name in linked and home is not None:
                        os.link(home / file.name, draft / file.name)
                    else:
                        create(draft, [file])
                paths = draft, final
            except OSError as error:
                failure = _failure(error, folder)
        agree(group, failure, CheckpointNotWritten)
        draft, final = group.gather_objects(paths)[0]
        # The folder may exist on every host but on different disks.
        hidden = None if draft.is_dir() else f"{folder} is not a folder that all hosts share."
        agree(group, hidden, CheckpointNotWritten)
        return draft, final

    def _finish(
        self,
        draft: Path,
        final: Path,
        layout: Sequence[TensorFile],
        prints: Mapping[str, str],
        aliases: Mapping[str, str],
        dtype: torch.dtype | None,
    ) -> None:
        """Write the small files, rename the draft, and point `latest` to it. Called on rank 0."""
        all_prints = {**prints, **{alias: prints[first] for alias, first in aliases.items()}}
        small = {FINGERPRINTS: json.dumps(all_prints, indent=1).encode() + b"\n"}
        if len(layout) > 1:
            small[index_name("model")] = json.dumps(index(layout), indent=1).encode() + b"\n"
        models = self._state.spec.models
        config: Any = getattr(models[0], "config", None)
        if len(models) == 1 and callable(getattr(config, "to_json_string", None)):
            from shardwise.checkpoint.formats.exporting import with_dtype

            text = config.to_json_string().encode()
            small["config.json"] = text if dtype is None else with_dtype(text, dtype)
        for name, data in small.items():
            file_system.write_synced(draft / name, data)
        file_system.sync(draft)
        draft.rename(final)
        aside = final.parent / f".{LATEST}.partial"
        aside.unlink(missing_ok=True)
        aside.symlink_to(final.name)
        aside.replace(final.parent / LATEST)
        file_system.sync(final.parent)


def _specs(tensors: EngineTensors) -> dict[str, TensorSpec]:
    """Return the specs of the model's tensors in their stored dtypes, by name. Collective."""
    inventory = tensors.inventory
    own = {name: spec_of(name, value) for name, value in tensors.own_buffers.items()}
    buffers: dict[str, TensorSpec] = {}
    for of_rank in tensors.spec.world_group.gather_objects(own):
        buffers |= of_rank
    return {n: inventory.parameters.get(n) or buffers[n] for n in inventory.names}


def _converted(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    if dtype is None or not dtype_of(spec.dtype).is_floating_point:
        return spec
    return replace(spec, dtype=dtype_name(dtype))


def _free_name(folder: Path, step: int) -> Path:
    names = itertools.chain(
        [f"weights-{step}"], (f"weights-{step}.{number}" for number in itertools.count(1))
    )
    return next(folder / name for name in names if not os.path.lexists(folder / name))


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all but the newest `keep` versions. Files that a reader has open remain readable."""
    found = [
        (int(named[1]), int(named[2] or 0), path)
        for path in folder.iterdir()
        if (named := _VERSION.fullmatch(path.name))
    ]
    older = [path for *_, path in sorted(found) if path != newest]
    for path in older[: max(0, len(older) + 1 - keep)]:
        shutil.rmtree(path, ignore_errors=True)


def _failure(error: OSError, place: Path) -> str:
    return (
        f"The weights were not published in {error.filename or place}: {error.strerror or error}. "
        "Earlier versions are intact. Make room, or choose a writable folder."
    )
