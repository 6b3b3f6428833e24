"""The page of all error messages, docs/reference/messages.md, is complete."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "site_messages.py"
_SPEC = importlib.util.spec_from_file_location("site_messages", _SCRIPT)
site_messages = importlib.util.module_from_spec(_SPEC)
sys.modules["site_messages"] = site_messages
_SPEC.loader.exec_module(site_messages)
Message, Untraced = site_messages.Message, site_messages.Untraced


@pytest.fixture(scope="module", autouse=True)
def forget_syntax_trees():
    """Free the trees, whose nodes would make all later garbage collections slower."""
    yield
    site_messages._tree.cache_clear()


_STILTED = re.compile(r"\b(anew|alike|equally often|whole number|truth values?|beside)\b")


def test_every_message_is_on_the_page():
    page = site_messages.page()
    found = site_messages.messages()
    assert sum(isinstance(each, Message) for each in found) > 800
    for each in found:
        if isinstance(each, Message):
            first_words = re.split(r"[|<\[*_]", each.text)[0]
            assert first_words in page, each


def test_every_error_without_a_text_is_listed_as_passed_on():
    """If this fails, give the error a text, or add a row to PASSED_ON of scripts/site_messages."""
    untraced = {
        (each.path, each.argument): each
        for each in site_messages.messages()
        if isinstance(each, Untraced)
    }
    assert [each for key, each in untraced.items() if key not in site_messages.PASSED_ON] == []
    assert site_messages.PASSED_ON.keys() - untraced.keys() == set()


def test_every_raise_of_an_error_is_traced():
    """Compare with a plain search: each line that raises an error class is among the messages."""
    found = {(each.path, each.line) for each in site_messages.messages()}
    names = "|".join(site_messages.error_names())
    for path in site_messages.SOURCES.rglob("*.py"):
        relative = path.relative_to(site_messages.SOURCES).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(rf"\s+raise (errors\.)?({names})\([^)]", line):
                assert (relative, number) in found, line


def test_messages_use_plain_words():
    for each in site_messages.messages():
        if isinstance(each, Message):
            assert not _STILTED.search(re.sub(r"{.*?}|world.alike", "", each.text)), each


def test_no_part_of_an_fstring_lacks_its_prefix():
    """Find `f"{a} and " "{b}"`, which prints the name b. `{i}` is the layer number of a format."""
    for path in site_messages.SOURCES.rglob("*.py"):
        for node in ast.walk(site_messages._tree(path)):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for part in parts:
                text = part.value if isinstance(part, ast.Constant) else ""
                assert not re.search(r"\{(?!i\})[a-z_]+\}", text), (path, node.lineno, text)


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ('raise UsageError("one")', ["one"]),
        ('raise UsageError(f"{size} rows")', ["{size} rows"]),
        ('raise UsageError("a" if first else "b")', ["a", "b"]),
        ('message = "m"\n    raise UsageError(message + end)', ["m{end}"]),
        ("raise UsageError(unknown())", []),
    ],
)
def test_finds_texts_of_each_form(tmp_path, code, texts):
    path = tmp_path / "module.py"
    path.write_text(f"def function():\n    {code}\n")
    function = ast.parse(path.read_text()).body[0]
    call = next(each for each in ast.walk(function) if isinstance(each, ast.Raise)).exc
    assert site_messages._Tracer(path, function).texts(call.args[0]) == texts
