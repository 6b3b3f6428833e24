"""`sw.ParquetRows`: the rows of Parquet files, decoded once and then memory-mapped."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardwise.data.files.indexed_files import FileDataset, locked, replacement_of
from shardwise.errors import DataError

ROWS = 1024
"""Maximum number of rows per batch of the decoded file."""
STAMP = b"shardwise"
"""Metadata key for the size and modification time of the Parquet file."""


class ParquetRows(FileDataset):
    """A map-style dataset of the rows of Parquet files. A sample is a dict of Python values.

    A Parquet file is compressed in groups of thousands of rows, so reading rows in random order
    would require decoding a whole group for each row. The first run therefore decodes each file
    once into an Arrow file in the folder `decoded`, and all ranks of a host map this file into
    memory. Requires the package pyarrow.

    Args:
        files: A path, a pattern such as `data/*.parquet`, or a list of these. The files that match
            a pattern are sorted by name.
        decoded: Folder for the decoded files. It needs space for the uncompressed columns.
        columns: Names of the columns to read. Default: all.
        transform: Function that converts a sample. The Loader seeds its random numbers by (seed,
            epoch, index).

    Raises:
        DataError: If pyarrow or a file is missing, or a file is empty or not a Parquet file.

    Example:
        ```python
        dataset = sw.ParquetRows("data/*.parquet", "decoded", columns=["input_ids"])
        loader = sw.Loader(dataset, batch_size=256, shuffle=True, collate_fn=collate)
        ```
    """

    def __init__(
        self,
        files: str | Path | Iterable[str | Path],
        decoded: str | Path,
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        try:
            self._arrow: Any = import_module("pyarrow")
        except ImportError:
            raise DataError("ParquetRows needs pyarrow: run `pip install pyarrow`.") from None
        super().__init__(files, transform)
        self._columns = None if columns is None else list(columns)
        self._copies = [
            self._decoded(path, stamp, Path(decoded)) for path, stamp in self._with_reports()
        ]
        self._tables: dict[int, _Table] = {}
        self.counts = [_Table(self._arrow, copy).rows for copy in self._copies]

    @property
    def _fingerprint(self) -> str:
        return f"{super()._fingerprint} {self._columns}"

    def read(self, number: int, row: int) -> Any:
        """Return row `row` of file `number`, as a dict of Python values."""
        if number not in self._tables:
            self._tables[number] = _Table(self._arrow, self._copies[number])
        return self._tables[number].row(row)

    def __getstate__(self) -> dict[str, Any]:
        # Neither modules nor open files can be sent to spawned DataLoader workers.
        return self.__dict__ | {"_tables": {}, "_arrow": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_arrow": import_module("pyarrow")}

    def _decoded(self, path: Path, stamp: tuple[int, int], folder: Path) -> Path:
        """Return the decoded copy of a file, creating it first if it is missing or out of date."""
        arrow, ipc = self._arrow, import_module("pyarrow.ipc")
        copy = folder / f"{self._name(path, repr(self._columns))}.arrow"
        wanted = repr(stamp).encode()
        with locked(folder, "decoded"):
            try:
                with ipc.open_file(str(copy)) as reader:
                    if (reader.schema.metadata or {}).get(STAMP) == wanted:
                        return copy
            except (FileNotFoundError, arrow.ArrowInvalid):
                pass  # missing, or damaged: write it again
            self._decode(path, copy, wanted)
        return copy

    def _decode(self, path: Path, copy: Path, stamp: bytes) -> None:
        parquet, ipc = import_module("pyarrow.parquet"), import_module("pyarrow.ipc")
        try:
            file = parquet.ParquetFile(path)
        except self._arrow.ArrowException as error:
            raise DataError(f"{path} is not a Parquet file: {error}") from error
        with file:
            names = file.schema_arrow.names
            wanted = names if self._columns is None else self._columns
            if missing := [name for name in wanted if name not in names]:
                raise DataError(
                    f"{path} has no column {' and no column '.join(missing)}. Its columns are "
                    f"{', '.join(names)}."
                )
            if not file.metadata.num_rows:
                raise DataError(f"{path} has no samples: leave it out.")
            schema = self._arrow.schema([file.schema_arrow.field(name) for name in wanted])
            schema = schema.with_metadata({STAMP: stamp})
            with replacement_of(copy) as target, ipc.new_file(target, schema) as writer:
                for batch in file.iter_batches(ROWS, columns=wanted):
                    arrays = [batch.column(name) for name in wanted]
                    writer.write_batch(self._arrow.RecordBatch.from_arrays(arrays, schema=schema))


class _Table:
    """The rows of a memory-mapped decoded file."""

    def __init__(self, arrow: Any, path: Path) -> None:
        reader = import_module("pyarrow.ipc").open_file(arrow.memory_map(str(path)))
        # The batches refer to the mapped file. Their values are read on use.
        self._batches = [reader.get_batch(at) for at in range(reader.num_record_batches)]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        self.rows = self._ends[-1]

    def row(self, row: int) -> dict[str, Any]:
        at = bisect.bisect_right(self._ends, row)
        first = self._ends[at] - self._batches[at].num_rows
        sample: dict[str, Any] = self._batches[at].slice(row - first, 1).to_pylist()[0]
        return sample
