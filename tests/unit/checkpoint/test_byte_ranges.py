"""Byte ranges of intervals across borders of parameters, and their checksums."""

import zlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.checksum import ChecksumPart, combine
from shardwise.layout import bucket_layout
from shardwise.layout.byte_ranges import Extent, byte_ranges, clipped, extents, share


def test_a_table():
    #   bucket | b: 16..19 of 20 | a: 0..4 |, an interval from 16 on
    pieces = [bucket_layout.Slot(1, 16, 20, 16), bucket_layout.Slot(0, 32, 37, 0)]
    parts = extents(pieces, 16, {0: "a", 1: "b"})
    assert parts == [Extent("b", 0, 4, 16), Extent("a", 16, 21, 0)]
    assert clipped(parts, 2, 18) == [Extent("b", 0, 2, 18), Extent("a", 14, 16, 0)]
    assert clipped(parts, 4, 16) == []
    assert byte_ranges(parts, 4, 8) == [
        Extent("b", 0, 8, 64),
        Extent("b", 8, 16, 72),
        Extent("a", 64, 72, 0),
        Extent("a", 72, 80, 8),
        Extent("a", 80, 84, 16),
    ]
    assert extents(pieces, 16, {0: "a"}) == [Extent("a", 16, 21, 0)]
    assert [share(7, index, 3) for index in range(3)] == [(0, 2), (2, 4), (4, 7)]


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 40),
    st.booleans(),
)
def test_every_byte_is_written_once(numels, ranks, copies, span, whole):
    """Buckets over `ranks`, each interval held by `copies` ranks and lent in spans of `span`
    elements."""
    specs = [
        bucket_layout.Spec(name=f"t{i}", numel=n, itemsize=4, key=0, whole=whole)
        for i, n in enumerate(numels)
    ]
    names = {i: spec.name for i, spec in enumerate(specs)}
    written = {spec.name: [0] * (spec.numel * 4) for spec in specs}
    for bucket in bucket_layout.lay_out(specs, ranks=ranks, capacity=400):
        for rank in range(ranks):
            own = bucket.interval(rank)
            parts = extents(bucket.pieces(*own), own[0], names)
            for copy in range(copies):
                first, end = share(own[1] - own[0], copy, copies)
                for start in range(first, end, span):
                    found = clipped(parts, start, min(start + span, end))
                    for each in byte_ranges(found, 4, 24):
                        for byte in range(each.offset, each.offset + each.end - each.start):
                            written[each.tensor][byte] += 1
    assert all(count == 1 for counts in written.values() for count in counts)


# -- checksums ----------------------------------------------------------------------------------


def test_the_checksum_of_parts_equals_that_of_the_whole():
    data = bytes(range(256)) * 9
    cuts = [0, 5, 5, 700, 2303, len(data)]
    parts = [ChecksumPart(a, b - a, zlib.crc32(data[a:b])) for a, b in pairwise(cuts)]
    assert combine(reversed(parts), len(data)) == zlib.crc32(data)
    assert combine([], 0) == zlib.crc32(b"") == 0


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_sums_of_any_parts(data, cuts):
    borders = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    parts = [ChecksumPart(a, b - a, zlib.crc32(data[a:b])) for a, b in pairwise(borders)]
    assert combine(parts, len(data)) == zlib.crc32(data)


def test_incomplete_parts_have_no_checksum():
    assert combine([ChecksumPart(0, 4, 1), ChecksumPart(5, 3, 1)], 8) is None  # a gap
    assert combine([ChecksumPart(0, 4, 1), ChecksumPart(3, 5, 1)], 8) is None  # an overlap
    assert combine([ChecksumPart(0, 4, 1)], 8) is None  # the end is missing
    assert combine([ChecksumPart(0, 4, 1), ChecksumPart(0, 4, 1)], 4) is None  # twice
