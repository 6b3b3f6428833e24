"""Headers to the letter of the format: golden files, and hostile ones."""

import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.format import (
    ITEM_BYTES,
    TensorSpec,
    header_length,
    index,
    index_name,
    lay_out,
    parse,
)
from shardwise.errors import BrokenCheckpoint

GOLDEN = (
    b"\xd0\x00\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"format":"pt","twin":"w"},'
    b'"n":{"dtype":"I64","shape":[],"data_offsets":[0,8]},'
    b'"w":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]},'
    b'"h":{"dtype":"BF16","shape":[1],"data_offsets":[16,18]}} '
)


def specs():
    return [
        TensorSpec("h", "BF16", (1,)),
        TensorSpec("w", "F32", (1, 2)),
        TensorSpec("n", "I64", ()),
    ]


def laid(several, limit=10**9, **aliases):
    return lay_out("model", several, limit=limit, aliases=aliases)


def test_a_golden_file():
    (file,) = laid(specs(), twin="w", other="absent")
    assert file.name == "model.safetensors"
    assert file.header == GOLDEN
    assert file.nbytes == len(file.header) + 18
    assert {n: (p.begin - len(file.header), p.end - p.begin) for n, p in file.tensors.items()} == {
        "n": (0, 8),
        "w": (8, 8),
        "h": (16, 2),
    }


def test_the_stock_library_reads_it():
    (file,) = laid(specs())
    data = file.header + (7).to_bytes(8, "little") + torch.tensor([1.5, 2.5]).numpy().tobytes()
    found = safetensors.torch.load(data + b"\x80\x3f")
    assert found["n"] == 7
    assert found["w"].tolist() == [[1.5, 2.5]]
    assert found["h"] == torch.ones(1, dtype=torch.bfloat16)


def test_parse_inverts_lay_out():
    (file,) = laid(specs(), twin="w")
    assert header_length(file.header[:8], file.nbytes, "f") == len(file.header) - 8
    again = parse(file.header, file.nbytes, "model.safetensors")
    assert again.tensors == dict(file.tensors)
    assert again.metadata == {"format": "pt", "twin": "w"}


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=12,
    ),
    st.integers(1, 400),
)
def test_every_tensor_is_aligned_and_in_one_file(drawn, limit):
    several = [TensorSpec(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(drawn)]
    files = laid(several, limit)
    placed = {name: p for file in files for name, p in file.tensors.items()}
    assert sorted(placed) == sorted(spec.name for spec in several)
    for file in files:
        assert len(file.tensors) <= 1 or file.nbytes - len(file.header) <= limit
        reached = len(file.header)
        for each in file.tensors.values():
            assert each.begin % ITEM_BYTES[each.spec.dtype] == 0
            assert each.begin == reached
            reached = each.end
        assert reached == file.nbytes
        assert dict(parse(file.header, file.nbytes, file.name).tensors) == dict(file.tensors)


def test_a_set_that_is_split():
    files = laid([TensorSpec(name, "F32", (4,)) for name in "abc"], limit=32)
    assert [file.name for file in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert index_name("model") == "model.safetensors.index.json"
    assert index(files) == {
        "metadata": {"total_size": 48},
        "weight_map": {"a": files[0].name, "b": files[0].name, "c": files[1].name},
    }


# -- hostile files -----------------------------------------------------------------------------


def of(table, data=b""):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text, data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "overlap": (of({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12), "overlaps"),
    "hole": (of({"a": entry(), "b": entry(offsets=(9, 17))}, b"\0" * 17), "leaves a gap"),
    "hole at the start": (of({"a": entry(offsets=(4, 12))}, b"\0" * 12), "leaves a gap"),
    "cut short": (of({"a": entry()}, b"\0" * 7), "cut short"),
    "trailing bytes": (of({"a": entry()}, b"\0" * 9), "belong to no tensor"),
    "size of the shape": (of({"a": entry(shape=(3,))}, b"\0" * 8), r"has 8 bytes.*takes 12"),
    "huge shape": (of({"a": entry(shape=(2**40, 2**40))}, b"\0" * 8), "takes"),
    "many dims": (of({"a": entry(shape=[1] * 65)}, b"\0" * 8), "has the invalid shape"),
    "negative shape": (of({"a": entry(shape=(-2,))}, b"\0" * 8), r"shape \[-2\]"),
    "true in a shape": (of({"a": entry(shape=(True, 2))}, b"\0" * 8), r"shape \[True"),
    "backward offsets": (of({"a": entry(offsets=(8, 0))}, b"\0" * 8), "data_offsets"),
    "unknown dtype": (of({"a": entry(dtype="F31")}, b"\0" * 8), "F31"),
    "no dtype": (of({"a": {"shape": [], "data_offsets": [0, 0]}}), "does not have exactly"),
    "an entry that is no map": (of({"a": 3}), "does not have exactly"),
    "twice": (of(b'{"a":1,"a":2}'), "appears twice"),
    "no map": (of(b"[1]"), "does not begin with"),
    "no JSON": (of(b"{nonsense}"), "not valid JSON"),
    "not UTF-8": (of(b'{"\xff":1}'), "not valid JSON"),
    "deep": (of(b'{"a":' + b"[" * 200_000), "nested too deeply|not valid JSON"),
    "metadata": (of({"__metadata__": {"a": 1}}), "metadata"),
    "an empty file": ((b"", b""), "ends after 0 bytes"),
    "half a length": ((b"\1\0\0", b""), "ends after 3 bytes"),
    "too long a header": (((10**9).to_bytes(8, "little"), b""), "claims 1000000000 bytes"),
    "a header past the end": (((99).to_bytes(8, "little") + b"{}", b""), "claims 99 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name):
    (header, data), said = HOSTILE[name]
    with pytest.raises(BrokenCheckpoint, match=said):
        read(header, len(header) + len(data))


def read(header, nbytes):
    """Read as a reader does: the length first, then that many bytes."""
    length = header_length(header[:8], nbytes, "bad.safetensors")
    return parse(header[: 8 + length], nbytes, "bad.safetensors")
