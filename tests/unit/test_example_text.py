"""The text of examples/language_model.py: tokens give the text back, held-out files stay so."""

from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st


def import_example(name: str) -> Any:
    """Import a module of examples/, as a script in that folder does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
        return import_module(name)


bpe = import_example("helpers.bpe")
corpus = import_example("helpers.corpus")
LEARNED = bpe.learn([b"def low(self):\n    return self.low\n" * 3], 300)


def test_the_most_frequent_pair_is_merged_first_of_equal_ones_the_smallest() -> None:
    tokenizer = bpe.learn([b"low lower", b" newest newest"], 300)
    assert tokenizer.tokens[256:] == [b" n", b"es", b"ew", b" new", b"est", b" newest"]
    assert list(tokenizer.encode(b"ew newest")) == [258, 261]


def test_the_vocabulary_is_no_larger_than_asked() -> None:
    assert len(bpe.learn([b"low lower newest newest"], 258).tokens) == 258
    assert bpe.learn([], 300).merges == []


@given(st.binary(max_size=200))
def test_any_bytes_come_back(text: bytes) -> None:
    assert b"".join(LEARNED.tokens[token] for token in LEARNED.encode(text)) == text


def test_learned_text_takes_fewer_tokens_than_bytes() -> None:
    text = b"    return self.low"
    assert len(LEARNED.encode(text)) < len(text) / 3


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("abc.py", True),
        ("json/decoder.py", True),
        ("test/test_abc.py", False),
        ("unittest/test/case.py", False),
        ("site-packages/torch/nn.py", False),
        ("encodings/cp1252.py", False),
        ("_sysconfigdata__linux_x86_64-linux-gnu.py", False),
        ("config-3.11-x86_64-linux-gnu/python-config.py", False),
    ],
)
def test_the_library_is_what_comes_with_every_python(path: str, taken: bool) -> None:
    assert corpus.is_library(PurePath(path)) is taken


def test_files_are_held_out_by_name_whatever_else_there_is() -> None:
    texts = {f"{letter}.py": letter.encode() for letter in "abcdefghijklmnopqrstuvwxyz"}
    training, held_out = corpus.split(texts)
    assert held_out == [b"v"]
    assert len(training) == 25
    assert corpus.split({"v.py": b"v", "a.py": b"a"}) == ([b"a"], [b"v"])


def test_of_too_few_files_the_ends_are_held_out() -> None:
    text = bytes(range(100))
    assert corpus.split({"a.py": text}) == ([text[:95]], [text[95:]])


def test_files_are_read_in_the_order_of_names_and_binary_ones_left_out(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    for name, text in {"z/a": b"1", "b": b"2", "picture": b"\0", "a": b"3"}.items():
        (tmp_path / name).write_bytes(text)
    assert list(corpus.read_files(tmp_path).items()) == [("a", b"3"), ("b", b"2"), ("z/a", b"1")]
    assert corpus.read_files(tmp_path / "b") == {"b": b"2"}


@pytest.mark.parametrize(("name", "complaint"), [("none", "No such file"), ("", "no text")])
def test_data_without_text_is_refused(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(corpus.CorpusError, match=complaint):
        corpus.read_files(tmp_path / name)


def test_a_window_is_tokens_and_the_tokens_after() -> None:
    windows = corpus.Windows(corpus.array("H", range(10)), 4)
    assert len(windows) == 2
    assert [part.tolist() for part in windows[1]] == [[4, 5, 6, 7], [5, 6, 7, 8]]
    with pytest.raises(corpus.CorpusError, match="10 tokens, but one window needs 11"):
        corpus.Windows(corpus.array("H", range(10)), 10)


def test_windows_to_evaluate_are_spread_over_the_text() -> None:
    windows = corpus.Windows(corpus.array("H", range(101)), 10)
    starts = [int(tokens[0]) for tokens, _ in corpus.spread(windows, 4)]
    assert starts == [0, 20, 50, 70]
    assert len(corpus.spread(windows, 99)) == 10
