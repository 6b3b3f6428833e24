"""`sw.JsonLines`: files with one JSON value per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.data.files.indexed_files import IndexedFiles, Spans
from shardwise.errors import DataError

BLOCK = 2**24
"""Number of bytes that are scanned at a time."""
NEWLINE, SPACE = 10, 32


class JsonLines(IndexedFiles):
    """A map-style dataset of files with one JSON value per line.

    Blank lines are skipped. The files must be local and uncompressed.

    Args:
        files: A path, a pattern such as `data/*.jsonl`, or a list of these. The files that match a
            pattern are sorted by name.
        index: Folder in which each sample's position is stored for later runs. Without it, every
            rank scans all files at each start.
        transform: Function that converts a sample. The Loader seeds its random numbers by (seed,
            epoch, index).

    Raises:
        DataError: If a file is missing, empty, compressed or malformed.

    Example:
        ```python
        dataset = sw.JsonLines("data/train-*.jsonl", index="index")
        loader = sw.Loader(dataset, batch_size=256, shuffle=True, collate_fn=collate)
        ```
    """

    def scan(self, file: BinaryIO, path: Path) -> Spans:
        """Return the byte ranges of the samples in `file`. Raises DataError if it is malformed."""
        pieces = []
        start, offset, has_text = 0, 0, False  # of the line that continues in the next block
        while block := file.read(BLOCK):
            values = np.frombuffer(block, np.uint8)
            breaks = np.flatnonzero(values == NEWLINE)
            edges = np.concatenate([[0], breaks + 1])
            inner = edges[edges < len(block)]
            # Control characters are at most 32 too, and JSON text has none outside of blanks.
            texts = np.zeros(len(edges), bool)
            texts[: len(inner)] = np.logical_or.reduceat(values > SPACE, inner)
            texts[0] |= has_text
            lines = np.stack([edges[:-1], breaks], axis=1) + offset
            if len(lines):
                lines[0, 0] = start
                pieces.append(lines[texts[:-1]])
                start = offset + int(edges[-1])
            has_text = bool(texts[-1])
            offset += len(block)
        if has_text:
            pieces.append(np.array([[start, offset]]))
        return np.concatenate([np.empty((0, 2), np.int64), *pieces]).astype(np.int64)

    def parse(self, content: bytes, place: str) -> Any:
        """Return the JSON value in `content`. Raises DataError, naming `place`, if malformed."""
        try:
            return json.loads(content)
        except ValueError as error:
            raise DataError(f"{place}, is not JSON ({error}): repair or remove the line.") from None
