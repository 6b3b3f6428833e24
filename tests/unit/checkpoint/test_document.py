"""checkpoint.json: valid contents, and detection of any change."""

import itertools
import json
import os
import re

import pytest

from shardwise.checkpoint import document
from shardwise.errors import BrokenCheckpoint, CheckpointError

FIELDS = {
    "step": 3, "seed": 0, "sets": {"model": ["model.safetensors"]},
    "checksums": {"model": {"w": "c2e4b3ab"}}, "files": {},
    "optimizers": [{"class": "SGD", "groups": [{"parameters": ["w"], "options": {"lr": 0.1}}]}],
    "state": {"w": {"step": 3}}, "borders": [],
    "scaling": {"scale": 1.0, "good_steps": 0, "unit": None, "wide": False},
    "tracked": {}, "written_by": {"torch": "2"},
}  # fmt: skip


def written(folder, **fields):
    """Write a current document into `folder`."""
    path = folder / "checkpoint.json"
    path.write_bytes(document.dump(FIELDS | fields))
    return path


def unsummed(folder, **fields):
    """Write a document of version 1."""
    told = {"format": document.FORMAT, "version": 1} | FIELDS | fields
    (folder / "checkpoint.json").write_text(
        json.dumps({k: v for k, v in told.items() if v is not ...})
    )


def test_it_is_read_as_it_was_written(tmp_path):
    written(tmp_path)
    assert {key: document.load(tmp_path)[key] for key in FIELDS} == FIELDS


def test_version_1_is_read_without_a_checksum(tmp_path):
    unsummed(tmp_path, files=...)
    assert {key: document.load(tmp_path)[key] for key in FIELDS} == FIELDS


def test_any_flipped_bit_is_detected(tmp_path):
    path = written(tmp_path)
    data = path.read_bytes()
    last = len(data) - 40  # start of the checksum
    for place, bit in itertools.product(range(len(data)), range(8)):
        if place < last and bit != place % 8:
            continue
        changed = bytearray(data)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(BrokenCheckpoint):
            document.load(tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 2, 10, 20, 300])
def test_any_missing_end_is_detected(tmp_path, cut):
    path = written(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: -cut - 1])
    with pytest.raises(BrokenCheckpoint):
        document.load(tmp_path)


def test_accept_takes_a_deliberate_edit(tmp_path):
    path = written(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    edited = path.read_text().replace('"lr": 0.1', '"lr": 9.001')
    path.write_text(edited)
    with pytest.raises(BrokenCheckpoint, match=r"changed after it was written.*checkpoint accept"):
        document.load(tmp_path)
    document.accept(tmp_path)
    told = document.load(tmp_path)
    assert told["optimizers"][0]["groups"][0]["options"] == {"lr": 9.001}
    assert told["files"] == {"config.json": document.crc_of(b"{}")}
    path.write_text(edited.replace('"seed": 0', '"seed": "0"'))
    with pytest.raises(BrokenCheckpoint, match=r"its seed is '0', not an integer"):
        document.accept(tmp_path)
    assert (
        os.listdir(tmp_path) == ["config.json", "checkpoint.json"] or len(os.listdir(tmp_path)) == 2
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a Shardwise checkpoint"),
        ('{"format": "shardwise checkpoint", "version": 3}', "has version 3"),
        ('{"format": "shardwise checkpoint", "version": 2}', "does not end with its CRC-32"),
        ('{"format": "shardwise checkpoint", "version": true}', "the invalid version True"),
        ('{"format": "shardwise checkpoint", "version": NaN}', "not a JSON number"),
        (
            '{"format": "shardwise checkpoint", "version": 1, "crc32": ""}',
            "files of version 1 do not",
        ),
        ('{"format": "shardwise checkpoint", "version": 1, "step": true}', "its step is True"),
        ('{"format": "shardwise checkpoint", "version": 1, "step": 1}', "has no seed"),
    ],
)
def test_invalid_documents_are_refused(tmp_path, text, said):
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=said):
        document.load(tmp_path)


def island(**fields):
    """Return the fields of an island."""
    return {"state": {}, "borders": [], "weights": {}, "due": {}} | fields


def deep(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("step", -1, "its step is -1, not an integer of 0 or more"),
        ("step", 2**80, "its step is"),
        ("sets", {"model": ["../m"]}, "its sets.model[0] is '../m', not the name of a file"),
        ("checksums", {"model": [1]}, "its checksums.model is [1], not a map"),
        ("checksums", {"model": {"w": 3}}, "its checksums.model.w is 3, not 8 hexadecimal"),
        ("files", {"a": "C2E4B3AB"}, "its files.a is"),
        ("optimizers", {}, "its optimizers is {}, not a list"),
        ("optimizers", [{"class": "SGD"}], "it has no optimizers[0].groups"),
        ("optimizers", [{"class": "SGD", "groups": [{"parameters": [3]}]}], "parameters[0] is 3"),
        ("state", {"w": 4}, "its state.w is 4, not a map"),
        ("state", {"w": {"step": deep(450)}}, "its state.w.step is nested deeper than 100"),
        ("borders", [[]], "its borders[0] is [], not text"),
        ("scaling", {"scale": 0.0}, "its scaling.scale is 0.0, not a number above 0"),
        ("tracked", [], "its tracked is [], not a map"),
        ("islands", {}, "its islands is {}, not a list"),
        ("islands", [{"state": {}, "borders": []}], "it has no islands[0].weights"),
        ("islands", [island(weights={"w": -1})], "its islands[0].weights.w is -1, not a number of"),
        ("islands", [island(due={"w": 0.5})], "its islands[0].due.w is 0.5, not an integer"),
    ],
)
def test_invalid_values_are_named_with_their_path(tmp_path, field, value, said):
    for write in (written, unsummed):
        write(tmp_path, **{field: value})
        with pytest.raises(BrokenCheckpoint, match=re.escape(said)):
            document.load(tmp_path)


def test_json_that_is_too_deep_for_the_parser(tmp_path):
    (tmp_path / "checkpoint.json").write_text("[" * 10**6)
    with pytest.raises(BrokenCheckpoint, match="not valid JSON"):
        document.load(tmp_path)


@pytest.mark.parametrize("kind", ["a folder", "a pipe"])
def test_a_pipe_or_folder_in_place_of_the_document_is_refused(tmp_path, kind):
    path = tmp_path / "checkpoint.json"
    path.mkdir() if kind == "a folder" else os.mkfifo(path)
    with pytest.raises(BrokenCheckpoint, match=f"is {kind}, not a file"):
        document.load(tmp_path)
