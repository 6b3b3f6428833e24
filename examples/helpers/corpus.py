"""The text that the language model learns: files, held-out files, and windows of tokens.

All functions depend only on the names and contents of the files. So every rank, every number of
workers and every machine with the same Python gets the same text.
"""

from __future__ import annotations

import sysconfig
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from helpers import bpe

# Tests are repetitive, and encodings and pydoc_data contain tables and manuals instead of code.
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__"}

Sample = tuple[Tensor, Tensor]

HELD_OUT_SHARE = 20
"""One file in this many is held out."""

LESSON = 16_000_000
"""Maximum number of bytes for the tokenizer. Of more text, it learns from evenly spread files."""


class CorpusError(Exception):
    """An error about --data that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training tokens and held-out tokens, with their tokenizer."""

    tokenizer: bpe.Tokenizer
    training: array[int]
    held_out: array[int]
    files: int
    held_out_files: int
    bytes: int

    @property
    def token_bytes(self) -> Tensor:
        """The number of bytes in each token, a float tensor (vocabulary,)."""
        return torch.tensor([float(len(token)) for token in self.tokenizer.tokens])

    def windows(self, context: int, held_out: int) -> tuple[Windows, Dataset[Sample]]:
        """Return the training windows, and at most `held_out` windows for evaluation.

        Raises CorpusError if the text is too short.
        """
        return Windows(self.training, context), spread(Windows(self.held_out, context), held_out)

    def __str__(self) -> str:
        return (
            f"{self.bytes / 1e6:.1f} MB in {self.files} files, {self.held_out_files} held out · "
            f"{len(self.training) / 1e6:.2f}M tokens of "
            f"{self.bytes / (len(self.training) + len(self.held_out)):.1f} bytes to learn"
        )


def read(data: Path | None, *, vocabulary: int) -> Corpus:
    """Read the corpus from a file or a folder (default: Python's standard library)."""
    texts = read_files(data)
    tokenizer = bpe.learn(lesson(list(texts.values())), vocabulary)
    training, held_out = split(texts)
    return Corpus(
        tokenizer=tokenizer,
        training=join(tokenizer, training),
        held_out=join(tokenizer, held_out),
        files=len(texts),
        held_out_files=len(held_out),
        bytes=sum(map(len, texts.values())),
    )


def read_files(data: Path | None) -> dict[str, bytes]:
    """Return the bytes of each text file by its path in the folder, sorted by path."""
    if data is None:
        folder = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in folder.rglob("*.py") if is_library(path.relative_to(folder))]
    elif data.is_dir():
        folder = data
        paths = [path for path in folder.rglob("*") if path.is_file()]
    else:
        folder, paths = data.parent, [data]
    try:
        texts = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    except OSError as error:
        raise CorpusError(f"--data: {error.filename} cannot be read: {error.strerror}.") from None
    # As for grep and git, a file with a zero byte is binary.
    texts = {name: texts[name] for name in sorted(texts) if b"\0" not in texts[name]}
    if not any(texts.values()):
        raise CorpusError(f"--data: there is no text in {data or folder}.")
    return texts


def is_library(path: Path) -> bool:
    """Return whether a path in the standard library's folder is code that every Python has."""
    # _sysconfigdata and config-* have paths and flags of this machine.
    own = path.name.startswith("_sysconfigdata") or path.parts[0].startswith("config-")
    return not own and LEFT_OUT.isdisjoint(path.parts)


def lesson(texts: list[bytes]) -> list[bytes]:
    """Return the texts for the tokenizer to learn from."""
    every = -(-sum(map(len, texts)) // LESSON)
    return [text[:LESSON] for text in texts[::every]]


def split(texts: dict[str, bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return the training texts and the held-out texts.

    A hash of its name decides whether a file is held out, so added files do not change the others.
    If there are too few files for that, the end of each file is held out.
    """
    held_out = [text for name, text in texts.items() if is_held_out(name)]
    training = [text for name, text in texts.items() if not is_held_out(name)]
    if any(training) and any(held_out):
        return training, held_out
    whole = list(texts.values())
    cuts = [len(text) - len(text) // HELD_OUT_SHARE for text in whole]
    return (
        [text[:cut] for text, cut in zip(whole, cuts, strict=True)],
        [text[cut:] for text, cut in zip(whole, cuts, strict=True)],
    )


def is_held_out(name: str) -> bool:
    """Return whether the file of this name is held out."""
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0


def join(tokenizer: bpe.Tokenizer, texts: list[bytes]) -> array[int]:
    """Return the concatenated tokens of all texts."""
    tokens = array("H")
    for text in texts:
        tokens.extend(tokenizer.encode(text))
    return tokens


class Windows(Dataset[Sample]):
    """Tokens cut into windows.

    A sample is (tokens, targets), both (context,) int64. Each target is the next token.
    """

    def __init__(self, tokens: array[int], context: int) -> None:
        if len(tokens) <= context:
            raise CorpusError(
                f"The text has {len(tokens)} tokens, but one window needs {context + 1}: "
                "pass more text with --data, or a smaller --context."
            )
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = torch.tensor(self.tokens[start : start + self.context + 1])
        return window[:-1], window[1:]


def spread(windows: Windows, count: int) -> Dataset[Sample]:
    """Select `count` of the windows, evenly spread over the files."""
    count = min(count, len(windows))
    return Subset(windows, [index * len(windows) // count for index in range(count)])
