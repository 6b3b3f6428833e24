"""A small byte-pair tokenizer that learns from the text (Sennrich et al., 2016).

A token is a string of bytes: one of the 256 single bytes, or a merge of two tokens. Learning merges
the most frequent pair again and again. Any file can be encoded, and decoding returns it.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property

# Merges stay within a piece: the indentation of a line, a word with the space before it,
# underscores, one digit, or consecutive punctuation. Every byte belongs to a piece.
PIECES = re.compile(
    rb"\n[ \t]*| ?[A-Za-z\x80-\xff]+| ?_+|[0-9]| ?[!-/:-@\[-^`{-~]+|[ \t]+|[\x00-\x1f\x7f]"
)

Pair = tuple[int, int]


class Tokenizer:
    """Converts bytes to token ids and back. Pair i of `merges` becomes token 256 + i."""

    def __init__(self, merges: list[Pair]) -> None:
        self.merges = merges
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._known: dict[bytes, tuple[int, ...]] = {}

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each token id."""
        tokens = [bytes([value]) for value in range(256)]
        for left, right in self.merges:
            tokens.append(tokens[left] + tokens[right])
        return tokens

    def encode(self, text: bytes) -> array[int]:
        """Return the token ids of `text`."""
        ids = array("H")
        for piece in PIECES.findall(text):
            if (known := self._known.get(piece)) is None:
                known = self._known[piece] = tuple(self._encode_piece(piece))
            ids.extend(known)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become the replacement character."""
        return b"".join(self.tokens[token] for token in ids).decode(errors="replace")

    def _encode_piece(self, piece: bytes) -> list[int]:
        """Apply the merges to one piece, in the order in which they were learned."""
        ids = list(piece)
        while len(ids) > 1:
            pair = min(itertools.pairwise(ids), key=self._rank)
            if pair not in self.ranks:
                break
            ids = merge(ids, pair, 256 + self.ranks[pair])
        return ids

    def _rank(self, pair: Pair) -> float:
        return self.ranks.get(pair, float("inf"))


def learn(texts: Iterable[bytes], vocabulary: int) -> Tokenizer:
    """Learn a tokenizer of at most `vocabulary` tokens. The same texts give the same one."""
    counts: Counter[bytes] = Counter()
    for text in texts:
        counts.update(PIECES.findall(text))
    # Pieces that occur once do not show which pairs are frequent, and are half of all pieces.
    learner = Learner({piece: count for piece, count in counts.items() if count > 1})
    merges = []
    while len(merges) < vocabulary - 256 and (pair := learner.most_frequent()):
        learner.merge(pair, 256 + len(merges))
        merges.append(pair)
    return Tokenizer(merges)


class Learner:
    """Pieces during the merging, with the number of occurrences of each pair.

    A merge only visits the pieces that contain the pair, so it is fast.
    """

    def __init__(self, counts: dict[bytes, int]) -> None:
        self.pieces = [list(piece) for piece in counts]
        self.counts = list(counts.values())
        self.pairs: Counter[Pair] = Counter()
        self.holders: defaultdict[Pair, set[int]] = defaultdict(set)
        for index in range(len(self.pieces)):
            self._count(index, sign=1)

    def most_frequent(self) -> Pair | None:
        """Return the pair to merge next, None if no pair occurs twice."""
        # The smallest of equally frequent pairs, so that the result does not depend on their order.
        highest = max(self.pairs.values(), default=0)
        if highest < 2:
            return None
        return min(pair for pair, count in self.pairs.items() if count == highest)

    def merge(self, pair: Pair, token: int) -> None:
        """Replace `pair` with `token` in every piece."""
        for index in self.holders.pop(pair):
            self._count(index, sign=-1)
            self.pieces[index] = merge(self.pieces[index], pair, token)
            self._count(index, sign=1)
        del self.pairs[pair]

    def _count(self, index: int, sign: int) -> None:
        piece, count = self.pieces[index], sign * self.counts[index]
        for pair in itertools.pairwise(piece):
            self.pairs[pair] += count
            if sign > 0:
                self.holders[pair].add(index)


def merge(ids: list[int], pair: Pair, token: int) -> list[int]:
    """Return `ids` with each `pair` replaced by `token`, from the left."""
    merged: list[int] = []
    position = 0
    while position < len(ids):
        if position + 1 < len(ids) and (ids[position], ids[position + 1]) == pair:
            merged.append(token)
            position += 2
        else:
            merged.append(ids[position])
            position += 1
    return merged
