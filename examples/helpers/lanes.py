"""Text cut into lanes, contiguous parts that are read in parallel, window by window.

    text      0 1 2 3 4 5 6 7 8 9 10 11 12 13 14     3 lanes, windows of 2
    lane 0    0 1 | 2 3                              item 0, item 3
    lane 1    5 6 | 7 8                              item 1, item 4
    lane 2    10 11 | 12 13                          item 2, item 5

Consecutive `lanes` items are the same window of every lane, and form a total batch. A rank's share
of it has the same lanes at every step, so the rank can keep the state of a recurrent model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

END, UNKNOWN = "<eos>", "<unk>"
PARTS = {"training": "train", "validation": "valid", "test": "test"}


class TextError(Exception):
    """An error about missing or too short text."""


@dataclass(frozen=True)
class Text:
    """Tokens of each part, (tokens,) int64. A token is an index into `vocabulary`."""

    vocabulary: list[str]
    training: Tensor
    validation: Tensor
    test: Tensor


class Lanes(Dataset[tuple[Tensor, Tensor]]):
    """`tokens` in `lanes` parts of equal length. Item i is window i // lanes of lane i % lanes.

    An item is the tokens of a window and the next token of each, both (steps,). The last window may
    be shorter. The last tokens of the text, fewer than `lanes`, are not read.
    """

    def __init__(self, tokens: Tensor, lanes: int, steps: int) -> None:
        length = len(tokens) // lanes
        if length < 2:
            raise TextError(
                f"{len(tokens)} tokens are too few for {lanes} lanes: pass a smaller --batch-size."
            )
        self._lanes = tokens[: lanes * length].view(lanes, length)
        self._steps = steps
        self.windows = -(-(length - 1) // steps)

    def __len__(self) -> int:
        return self.windows * len(self._lanes)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        window, lane = divmod(item, len(self._lanes))
        first = window * self._steps
        read = self._lanes[lane, first : first + self._steps + 1]
        return read[:-1], read[1:]


def read(folder: Path, most: int) -> Text:
    """Read ptb.train.txt, ptb.valid.txt and ptb.test.txt in `folder`, or the names without "ptb.".

    Each line ends with <eos>. The vocabulary has the `most` most frequent words of the training
    part. Other words become <unk>. Raises TextError.
    """
    words = {part: _words(folder, name) for part, name in PARTS.items()}
    counts = Counter(words["training"])
    counts[UNKNOWN] += 0
    ranked = sorted(counts, key=lambda word: (word != UNKNOWN, -counts[word], word))[:most]
    number = {word: index for index, word in enumerate(ranked)}
    tokens = {part: torch.tensor([number.get(w, 0) for w in words[part]]) for part in PARTS}
    return Text(ranked, **tokens)


def _words(folder: Path, name: str) -> list[str]:
    for path in (folder / f"ptb.{name}.txt", folder / f"{name}.txt"):
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            return [word for line in lines if line.strip() for word in [*line.split(), END]]
    raise TextError(
        f"{folder} has no ptb.{name}.txt or {name}.txt. Pass --data a folder with the Penn "
        "Treebank, or any text, in three such files."
    )
