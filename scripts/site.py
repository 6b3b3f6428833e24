"""What the site has beside docs/: pages that lie elsewhere, help of the command, lists of files.

mkdocs calls the functions `on_...`. A link is written as it works in the repository; what it leads
to must exist, and where that is no page of the site only its text is left.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from shardwise.cli import main as cli

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "shardwise"
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "design/index.md",
    "CONTRIBUTING.md": "design/contributing.md",
    "CHANGELOG.md": "reference/changelog.md",
    "benchmarks/README.md": "reference/benchmarks.md",
}
"""Files outside of docs/ and the pages that they are."""

LINK = re.compile(
    r"^```.*?^```$|`[^`\n]+`(?!\])|\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", re.M | re.S
)
"""A link, or code, in which there is none."""
SHOWN = re.compile(r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", re.M)
"""What a page of the reference shows, and the name that it has there."""
ROOMS = ("accelerate", "horovod", "lightning", "transformers")
"""The packages whose names users import."""
COMMANDS = ("run", "doctor", "scale", "pipeline-plan", "verify", "checkpoint", "timeline")


def on_pre_build(config: Any) -> None:
    """Refuse a public name that has no docstring, or that no page of the reference shows."""
    package = griffe.load("shardwise", search_paths=[str(ROOT / "src")])
    if missing := sorted(set(_undocumented(package))):
        raise PluginError(f"Public names without a docstring: {', '.join(missing)}")
    if missing := sorted(set(_public(package)) - set(_shown(package))):
        raise PluginError(f"Public names that no page of the reference has: {', '.join(missing)}")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/, and their pictures."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for picture in (ROOT / "benchmarks" / "results").glob("*.png"):
        path = f"benchmarks/results/{picture.name}"
        files.append(File.generated(config, path, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in what is made here, and turn links of the repository into those of the site."""
    markdown = re.sub(r"<!-- help of the command -->", lambda _: _help(), markdown)
    markdown = re.sub(r"<!-- the files -->", lambda _: "\n".join(_files(SOURCES)), markdown)
    source = Path(page.file.abs_src_path).resolve().relative_to(ROOT)

    def linked(found: re.Match[str]) -> str:
        text, target = found.groups()
        if target is None:
            return found[0]
        path, hash_, anchor = target.partition("#")
        if not path or "://" in path:
            return found[0]
        meant = os.path.normpath(source.parent / path)
        if not (ROOT / meant).exists():
            raise PluginError(f"{source}: the link to {target} is broken")
        there = PAGES.get(meant) or _in_site(meant)
        if there is None:
            return text
        here = os.path.dirname(page.file.src_uri)
        return f"[{text}]({os.path.relpath(there, here or '.')}{hash_}{anchor})"

    return LINK.sub(linked, markdown)


def _in_site(path: str) -> str | None:
    """Where a file that is not among PAGES stands in the site; None where it is no part of it."""
    is_page = path.endswith((".md", ".png"))
    return path.removeprefix("docs/") if is_page else None


def _help() -> str:
    """What `shardwise COMMAND --help-all` writes, for each command."""
    parts = []
    for name in COMMANDS:
        command = cli._shardwise.commands[name]
        context = click.Context(command, info_name=name, parent=click.Context(cli._shardwise))
        formatter = context.make_formatter()
        if isinstance(command, cli.Command):
            command.write_help(formatter, all_flags=True)
        else:
            command.format_help(context, formatter)
        parts.append(f"## shardwise {name}\n\n```text\n{formatter.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


def _files(folder: Path) -> Iterator[str]:
    """Each file below `folder` with the first sentence of its docstring."""
    yield f"\n## {folder.relative_to(SOURCES.parent)}\n\n| file | |\n|---|---|"
    for path in sorted(folder.glob("*.py")):
        if said := ast.get_docstring(ast.parse(path.read_text())):
            first = " ".join(said.split("\n\n")[0].split())
            yield f"| `{path.name}` | {first.replace('|', '&#124;')} |"
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and any(inner.glob("*.py")):
            yield from _files(inner)


def _public(package: Any) -> Iterator[str]:
    """What users may name: `shardwise.Engine`, `shardwise.horovod.allreduce`, ..."""
    for module in (package, *(package[name] for name in ROOMS)):
        yield from (f"{module.path}.{name}" for name in module.exports if name[0] != "_")


def _shown(package: Any) -> Iterator[str]:
    """What the pages of the reference show; a module there shows its names for its package."""
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for path, heading in SHOWN.findall(page.read_text()):
            yield heading or path
            thing = package[path.removeprefix("shardwise.")]
            if thing.is_module:
                yield from (f"{thing.parent.path}.{name}" for name in thing.exports or ())


def _undocumented(package: Any) -> Iterator[str]:
    for module in (package, *(package[name] for name in ROOMS)):
        for name in module.exports or ():
            yield from _without_docstring(module[str(name)])


def _without_docstring(thing: Any) -> Iterator[str]:
    """`thing`, and what is public in it, where they have no docstring of their own."""
    if thing.is_alias:
        thing = thing.final_target
    if not (thing.docstring or thing.is_attribute):
        yield thing.path
    if not (thing.is_class or thing.path in ("shardwise.errors", "shardwise.lr")):
        return
    for name, inner in thing.all_members.items():
        if not name.startswith("_") and not (thing.is_module and inner.is_alias):
            yield from _without_docstring(inner)
