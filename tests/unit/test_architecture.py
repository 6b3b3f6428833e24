"""ARCHITECTURE.md and the pages of docs/design describe the actual source tree."""

import ast
import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]


def test_layers_in_architecture_are_those_that_imports_are_checked_against() -> None:
    picture = re.search(r"^```text\n(layer .+?)^```", PAGES[0].read_text(), re.M | re.S)
    assert picture
    layers_listed: list[set[str]] = []
    for line in picture[1].splitlines():
        if found := re.match(r"layer (\d+) ", line):
            layers_listed.append(set())
            number = int(found[1])
        names = re.split(r"\s{2,}", line[10:])[0].split(", ")
        layers_listed[-1] |= {name.removesuffix("/").removesuffix(".py") for name in names}
    assert number == 0
    assert len(layers_listed) == int(picture[1].split()[1]) + 1
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    assert layers_listed == [set(layer.split(" | ")) for layer in layers]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    homes = (ROOT / "src" / "shardwise", ROOT)
    assert [name for name in sorted(named) if not any((h / name).exists() for h in homes)] == []


PACKAGES = sorted((ROOT / "src" / "shardwise").rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.parent.name)
def test_files_that_a_package_lists_exist(package: Path) -> None:
    listed = ast.get_docstring(ast.parse(package.read_text())) or ""
    homes = (package.parent, ROOT / "src" / "shardwise")
    named = re.findall(r"(?<![\w/])([\w/]+\.py)\b", listed)
    assert [name for name in named if not any((h / name).exists() for h in homes)] == []


def test_no_files_import_each_other_in_a_circle_not_even_for_types() -> None:
    """import-linter leaves imports for types out, and does not look inside a layer."""
    source = ROOT / "src" / "shardwise"
    files = {
        ".".join(path.relative_to(source.parent).with_suffix("").parts): path
        for path in source.rglob("*.py")
        if path.name != "__init__.py"  # it hands on what its files have
    }
    TopologicalSorter(
        {name: imported(path) & files.keys() for name, path in files.items()}
    ).prepare()


def imported(path: Path) -> set[str]:
    """The modules that a file names in its imports, wherever they stand in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


def test_python_is_started_in_one_place():
    """Words such as `python -m shardwise` by hand would leave out `-P` (see python_words)."""
    source = ROOT / "src" / "shardwise"
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r'(executable|python), "-m"', path.read_text())
    }
    assert found == {"net/python_command.py"}
