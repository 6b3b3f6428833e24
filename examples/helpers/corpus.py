"""The text that the language model learns: files, which of them are held out, and windows.

Everything here is a pure function of the files' names and contents, so that every rank, every
number of workers and every machine with the same Python reads the same text.
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

# Tests repeat themselves; encodings and pydoc_data are tables and manuals, hardly code.
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__"}

Sample = tuple[Tensor, Tensor]

HELD_OUT_SHARE = 20
"""One file in this many is held out."""

LESSON = 16_000_000
"""Bytes that the tokenizer learns from, at most; of more text, evenly spread files."""


class CorpusError(Exception):
    """A --data that cannot be learned from; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens to learn and tokens held out, with the tokenizer that made them."""

    tokenizer: bpe.Tokenizer
    training: array[int]
    held_out: array[int]
    files: int
    held_out_files: int
    bytes: int

    @property
    def token_bytes(self) -> Tensor:
        """The number of bytes in each token, (vocabulary,) float."""
        return torch.tensor([float(len(token)) for token in self.tokenizer.tokens])

    def windows(self, context: int, held_out: int) -> tuple[Windows, Dataset[Sample]]:
        """Windows to learn, and `held_out` windows to evaluate on (fewer if there are fewer).

        Raises CorpusError for text that is too short.
        """
        return Windows(self.training, context), spread(Windows(self.held_out, context), held_out)

    def __str__(self) -> str:
        return (
            f"{self.bytes / 1e6:.1f} MB in {self.files} files, {self.held_out_files} held out · "
            f"{len(self.training) / 1e6:.2f}M tokens of "
            f"{self.bytes / (len(self.training) + len(self.held_out)):.1f} bytes to learn"
        )


def read(data: Path | None, *, vocabulary: int) -> Corpus:
    """The corpus of a file or a folder, of Python's standard library by default."""
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
    """The bytes of each file of text, by its name inside the folder, in the order of names."""
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
    # A zero byte marks a binary file, as it does for grep and git.
    texts = {name: texts[name] for name in sorted(texts) if b"\0" not in texts[name]}
    if not any(texts.values()):
        raise CorpusError(f"--data: there is no text in {data or folder}.")
    return texts


def is_library(path: Path) -> bool:
    """Whether a path below the standard library's folder is code that comes with every Python."""
    # _sysconfigdata and config-* hold the paths and flags of this one machine.
    own = path.name.startswith("_sysconfigdata") or path.parts[0].startswith("config-")
    return not own and LEFT_OUT.isdisjoint(path.parts)


def lesson(texts: list[bytes]) -> list[bytes]:
    """The texts that the tokenizer learns from."""
    every = -(-sum(map(len, texts)) // LESSON)
    return [text[:LESSON] for text in texts[::every]]


def split(texts: dict[str, bytes]) -> tuple[list[bytes], list[bytes]]:
    """Texts to learn and texts held out: files by a hash of their name, which stays when others
    come and go; of files too few for that, the end of each."""
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
    """Whether the file of this name is kept from training."""
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0


def join(tokenizer: bpe.Tokenizer, texts: list[bytes]) -> array[int]:
    """The tokens of all texts, one after the other."""
    tokens = array("H")
    for text in texts:
        tokens.extend(tokenizer.encode(text))
    return tokens


class Windows(Dataset[Sample]):
    """Tokens cut into windows: a sample is (tokens, targets), both (context,) int64, where
    each target is the token after."""

    def __init__(self, tokens: array[int], context: int) -> None:
        if len(tokens) <= context:
            raise CorpusError(
                f"The text has {len(tokens)} tokens where one window takes {context + 1}: "
                "give more with --data, or a smaller --context."
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
    """`count` of the windows, evenly spread, so that many files are among them."""
    count = min(count, len(windows))
    return Subset(windows, [index * len(windows) // count for index in range(count)])
