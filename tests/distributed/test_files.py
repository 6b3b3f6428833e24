"""Datasets over JSONL, tar and Parquet files: every sample once, over resumes at other sizes."""

import io
import json
import os
import pickle
import sys
import tarfile
from collections import Counter
from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.data.files.json_lines import JsonLines
from shardwise.errors import DataError


def write_lines(folder, sizes):
    """Write files whose lines have the numbers 0, 1, ... through all files."""
    number = 0
    for file, size in enumerate(sizes):
        numbers = range(number, number + size)
        text = "\n".join(json.dumps({"n": n, "text": "é" * (n % 5)}) for n in numbers)
        (folder / f"part-{file}.jsonl").write_text(text + "\n" * (file % 2))
        number += size
    return str(folder / "part-*.jsonl")


def write_tar(path, members):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def number_of(sample):
    return int(sample["n"]) if "n" in sample else int(sample["cls"])


def length_of(number):
    return 1 + number % 4


def run(world, kind, files, state, most, options):
    """Run at most `most` steps. Return the samples of each step on this rank, and the position."""
    dataset = getattr(sw, kind)(files, transform=number_of)
    loader = sw.Loader(dataset, shuffle=True, collate_fn=list, **options)
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for epoch in loader.epochs(2):
        for step in loader.steps():
            seen.append((epoch, [row for rows in step if world.rows for row in rows]))
            if len(seen) == most:
                return seen, loader.state_dict()
    return seen, None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JsonLines", {"batch_size": 6}),
        ("JsonLines", {"tokens": 12, "length": length_of}),
        ("TarSamples", {"batch_size": 5, "num_workers": 1}),
    ],
)
def test_every_sample_once_over_resumes_at_other_sizes(group, tmp_path, kind, options):
    if kind == "JsonLines":
        files = write_lines(tmp_path, (7, 1, 15))
    else:
        files = str(tmp_path / "part-{0..1}.tar")
        for file, numbers in enumerate((range(9), range(9, 23))):
            members = [
                (f"folder/{n}.{end}", text)
                for n in numbers
                for end, text in (("cls", b"%d" % n), ("TXT", b"x" * 700 * (n % 3)))
            ]
            write_tar(tmp_path / f"part-{file}.tar", members)
    draw = torch.Generator().manual_seed(len(kind))
    state, log = None, Counter()
    while True:
        size, most = (int(torch.randint(1, 5, (), generator=draw)) for _ in range(2))
        ranks = group(size)(run, kind, files, state, most, options)
        log.update((epoch, row) for seen, _ in ranks for epoch, rows in seen for row in rows)
        if (state := ranks[0][1]) is None:
            break
    assert log == Counter((epoch, number) for epoch in range(2) for number in range(23))


@given(
    st.lists(st.sampled_from([b"1", b'"a b"', b"", b"  ", b"\t", b"[1, 2]", b" 3 "]), max_size=9),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.integers(1, 7),
)
def test_lines_are_found_across_blocks_of_any_size(lines, end, ends, block):
    content = end.join(lines) + end * ends
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.data.files.json_lines.BLOCK", block)
        spans = JsonLines.scan(None, io.BytesIO(content), None)
    found = [json.loads(content[first:last]) for first, last in spans.tolist()]
    assert found == [json.loads(line) for line in lines if line.strip()]


def test_tar_samples_have_the_fields_of_webdataset(tmp_path):
    long = "directory/" * 15 + "long"
    members = [
        ("__a.b__", b"{}"),
        ("no_field", b"ignored"),
        ("a/b.c/7.seg.PNG", b"png"),
        ("a/b.c/7.cls", b"1"),
        (f"{long}.txt", b"t" * 1000),
    ]
    write_tar(tmp_path / "x.tar", members)
    with tarfile.open(tmp_path / "x.tar", "a") as tar:
        tar.add(tmp_path, "folder", recursive=False)
    samples = sw.TarSamples(tmp_path / "x.tar")
    assert list(samples) == [
        {"__key__": "a/b.c/7", "seg.png": b"png", "cls": b"1"},
        {"__key__": long, "txt": b"t" * 1000},
    ]
    assert pickle.loads(pickle.dumps(samples))[-1]["__key__"] == long
    with pytest.raises(IndexError):
        samples[2]


def test_index_is_used_until_a_file_changes(tmp_path, monkeypatch):
    files = write_lines(tmp_path, (3, 4))
    scans = []
    scan = JsonLines.scan
    monkeypatch.setattr(JsonLines, "scan", lambda *args: scans.append(args[2]) or scan(*args))
    assert len(sw.JsonLines(files, index=tmp_path / "a" / "index")) == 7
    first = sw.JsonLines(files, index=tmp_path / "a" / "index")
    assert len(scans) == 2
    os.utime(tmp_path / "part-0.jsonl", ns=(0, 0))
    second = sw.JsonLines(files, index=tmp_path / "a" / "index")
    assert len(scans) == 3
    assert first._fingerprint != second._fingerprint
    # A damaged index is built again.
    for kept in (tmp_path / "a" / "index").iterdir():
        kept.write_bytes(kept.read_bytes()[:-9])
    assert [sample["n"] for sample in sw.JsonLines(files, index=tmp_path / "a" / "index")] == [
        *range(7)
    ]
    assert len(scans) == 5
    with pytest.raises(DataError, match="has changed since it was indexed"):
        first[0]


def test_many_files_are_not_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.data.files.indexed_files.MOST_OPEN", 2)
    samples = sw.JsonLines(write_lines(tmp_path, [1] * 5))
    before = len(os.listdir("/proc/self/fd"))
    assert [sample["n"] for sample in samples] == list(range(5))
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del samples
    assert len(os.listdir("/proc/self/fd")) == before


def test_bad_files_are_named(tmp_path):
    def refuses(words, kind=sw.JsonLines, files=None, **options):
        with pytest.raises(DataError, match=words):
            kind(tmp_path / "x" if files is None else files, **options)[0]

    refuses("does not exist")
    refuses("No file matches", files=tmp_path / "*.jsonl")
    refuses("is a folder", files=tmp_path)
    refuses("is empty", files=[])
    refuses("is not a local file", files="s3://bucket/x.jsonl")
    file = tmp_path / "x"
    file.write_bytes(b"\n\n")
    refuses("has no samples")
    file.write_bytes(b"\x1f\x8b123456")
    refuses("gzip -d")
    file.write_bytes(b'{"a": 1')
    refuses("sample 0 of .*x, at byte 0, is not JSON")
    refuses("cannot be used", files=__file__, index="/proc/none")
    refuses("not a complete tar file", sw.TarSamples)
    write_tar(file, [("1.a", b"x"), ("2.a", b"x"), ("1.b", b"x")])
    refuses("sample 1 in .* are not next to each other", sw.TarSamples)
    write_tar(file, [("1.a", b"x"), ("1.A", b"x")])
    refuses("two fields a", sw.TarSamples)
    write_tar(file, [("1.a", b"x" * 2000), ("2.a", b"x" * 2000)])
    whole = file.read_bytes()
    for broken in (whole[:1700], whole[: 512 + 2048 + 100], whole[:2560] + b"junk" * 300):
        file.write_bytes(broken)
        refuses("not a complete tar file", sw.TarSamples)


def test_parquet_rows(tmp_path):
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    for file, numbers in enumerate((range(3), range(3, 2503))):
        rows = [{"n": n, "ids": list(range(n % 4)), "text": None} for n in numbers]
        table = arrow.Table.from_pylist(rows)
        parquet.write_table(table, tmp_path / f"{file}.parquet", row_group_size=700)
    files, folder = tmp_path / "*.parquet", tmp_path / "decoded"
    samples = sw.ParquetRows(files, folder, columns=["n", "ids"])
    assert len(samples) == 2503
    for n in (0, 2, 3, 702, 703, 2502):
        assert samples[n] == {"n": n, "ids": list(range(n % 4))}
    assert pickle.loads(pickle.dumps(samples))[-1]["n"] == 2502
    times = {copy: copy.stat().st_mtime_ns for copy in folder.iterdir()}
    assert len(times) == 2
    sw.ParquetRows(files, folder, columns=["n", "ids"])
    assert times == {copy: copy.stat().st_mtime_ns for copy in folder.iterdir()}
    # Other columns, and damaged copies, are decoded again.
    assert sw.ParquetRows(files, folder, columns=["text"])[1] == {"text": None}
    for copy in folder.iterdir():
        copy.write_bytes(copy.read_bytes()[:-9])
    assert sw.ParquetRows(files, folder)[5] == {"n": 5, "ids": [0], "text": None}
    assert len(list(folder.iterdir())) == 6
    with pytest.raises(DataError, match=r"has no column x\. Its columns are n, ids, text"):
        sw.ParquetRows(files, folder, columns=["x"])
    with pytest.raises(DataError, match="is not a Parquet file"):
        sw.ParquetRows(__file__, folder)


def test_parquet_without_pyarrow_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        sw.ParquetRows(__file__, "decoded")


def other_files(world, folder):
    loader = sw.Loader(sw.JsonLines(f"{folder}/part-{world.rank}.jsonl"), batch_size=2)
    with pytest.raises(DataError, match="Ranks hold different datasets"):
        next(iter(loader))


def test_ranks_with_other_files_are_refused(group, tmp_path):
    write_lines(tmp_path, (4, 4))
    group(2)(other_files, str(tmp_path))
