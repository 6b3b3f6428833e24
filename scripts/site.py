"""Completes the site of docs/: pages from other folders, flags, lists of files, a page to print.

mkdocs calls the functions `on_...`. Links are written as they work in the repository. Their targets
must exist; if a target is not a page of the site, only the text of the link stays.
"""

import ast
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import griffe
import site_flags
import site_messages
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from shardwise import __version__

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
"""A link; or code, which contains no links."""
INCLUDE = re.compile(r"^<!-- include (\S+) -->$", re.M)
"""The place of a program on a page."""
SHOWN = re.compile(r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", re.M)
"""A module or object on a page of the reference, and its name there."""
ROOMS = ("accelerate", "horovod", "lightning", "transformers")
"""The packages whose names users import."""
PRINTED = "reference/print.md"
NOT_PRINTED = (
    "reference/index.md",
    "reference/bridges.md",
    "reference/horovod.md",
    "reference/errors.md",
    "reference/changelog.md",
    "design/files.md",
    "design/contributing.md",
    PRINTED,
)
"""Pages that the page for printing leaves out."""
MARK = "<!-- the whole guide -->"
_order: list[Any] = []
"""The pages of the page for printing, in the order of the navigation."""
ATTRIBUTE = re.compile(r'(?<=\s)(id|href|src)="([^"]*)"')
"""An attribute that depends on the page on which it is."""


def on_config(config: Any) -> Any:
    """Show the version in the header of every page."""
    config.site_name = f"Shardwise {__version__}"
    return config


def on_pre_build(config: Any) -> None:
    """Refuse a public name that has no docstring, or that no page of the reference shows."""
    package = griffe.load("shardwise", search_paths=[str(ROOT / "src")])
    if missing := sorted(set(_undocumented(package))):
        raise PluginError(f"Public names without a docstring: {', '.join(missing)}")
    if missing := sorted(set(_public(package)) - set(_shown(package))):
        raise PluginError(f"Public names that no page of the reference has: {', '.join(missing)}")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside of docs/, and their pictures."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for picture in (ROOT / "benchmarks" / "results").glob("*.png"):
        path = f"benchmarks/results/{picture.name}"
        files.append(File.generated(config, path, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Insert generated text, and turn links of the repository into links of the site."""
    markdown = re.sub(r"<!-- help of the command -->", lambda _: _flags(), markdown)
    markdown = re.sub(r"<!-- messages -->", lambda _: site_messages.page(), markdown)
    markdown = re.sub(r"<!-- the files -->", lambda _: "\n".join(_files(SOURCES)), markdown)
    markdown = INCLUDE.sub(_program, markdown)
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


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Remember the order of the pages for printing."""
    del config, files
    _order[:] = [page for page in nav.pages if page.file.src_uri not in NOT_PRINTED]
    return nav


def on_env(env: Any, config: Any, files: Any) -> Any:
    """Fill the page for printing, once all other pages are rendered."""
    del config
    places = {page.url: page.file.src_uri.removesuffix(".md").replace("/", "-") for page in _order}
    here = files.get_file_from_path(PRINTED)
    listed = "\n".join(f'<li><a href="#{places[p.url]}">{p.title}</a></li>' for p in _order)
    parts = [f"<ol>\n{listed}\n</ol>"]
    for page in _order:
        content = ATTRIBUTE.sub(partial(_printed, page, places, here.url), page.content)
        parts.append(f'<section class="printed" id="{places[page.url]}">\n{content}\n</section>')
    here.page.content = here.page.content.replace(MARK, "\n".join(parts))
    return env


def _printed(page: Any, places: dict[str, str], here: str, found: re.Match[str]) -> str:
    """Return an attribute of a page as it has to be on the page for printing, `here`."""
    kind, value = found.groups()
    if kind == "id":
        return f'id="{places[page.url]}--{value}"'
    path, _, anchor = value.partition("#")
    if "://" in path or path.startswith("mailto:"):
        return found[0]
    target = os.path.normpath(os.path.join(os.path.dirname(page.url), path)) if path else page.url
    if target in places:
        return f'{kind}="#{places[target]}{"--" + anchor if anchor else ""}"'
    target = os.path.relpath(target, os.path.dirname(here))
    return f'{kind}="{target}{"#" + anchor if anchor else ""}"'


def _program(found: re.Match[str]) -> str:
    """Return a program of the repository as a block of code."""
    return f"```python\n{(ROOT / found[1]).read_text().rstrip()}\n```"


def _in_site(path: str) -> str | None:
    """Return the site's path of a file that is not in PAGES; None if the site does not have it."""
    is_page = path.endswith((".md", ".png", ".svg"))
    return path.removeprefix("docs/") if is_page else None


def _flags() -> str:
    """Return the tables of all commands and flags."""
    try:
        return site_flags.pages_text()
    except ValueError as error:
        raise PluginError(str(error)) from None


def _files(folder: Path) -> Iterator[str]:
    """Yield each file below `folder` with the first sentence of its docstring."""
    yield f"\n## {folder.relative_to(SOURCES.parent)}\n\n| file | |\n|---|---|"
    for path in sorted(folder.glob("*.py")):
        if said := ast.get_docstring(ast.parse(path.read_text())):
            first = " ".join(said.split("\n\n")[0].split())
            yield f"| `{path.name}` | {first.replace('|', '&#124;')} |"
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and any(inner.glob("*.py")):
            yield from _files(inner)


def _public(package: Any) -> Iterator[str]:
    """Yield public names: `shardwise.Engine`, `shardwise.horovod.allreduce`, ..."""
    for module in (package, *(package[name] for name in ROOMS)):
        yield from (f"{module.path}.{name}" for name in module.exports if name[0] != "_")


def _shown(package: Any) -> Iterator[str]:
    """Yield the names on the pages of the reference; a module there stands for its exports."""
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
    """Yield `thing` and its public members that have no docstring."""
    if thing.is_alias:
        thing = thing.final_target
    if not (thing.docstring or thing.is_attribute):
        yield thing.path
    if not (thing.is_class or thing.path in ("shardwise.errors", "shardwise.lr")):
        return
    for name, inner in thing.all_members.items():
        if not name.startswith("_") and not (thing.is_module and inner.is_alias):
            yield from _without_docstring(inner)
