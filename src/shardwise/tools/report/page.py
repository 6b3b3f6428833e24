"""Renders self-contained HTML pages."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.messages.printable import as_utf8
from shardwise.tools.report.look import DARK, variable


def write_page(file: Path, package: str, **values: Any) -> None:
    """Render `package`'s page.html.jinja with `values` and write it to `file`. Needs Jinja2."""
    file.write_bytes(as_utf8(render_page(package, **values)))


def render_page(package: str, **values: Any) -> str:
    """Render `package`'s page.html.jinja, which extends this package's template as "base"."""
    from jinja2 import Environment, FunctionLoader

    def load(name: str) -> str:
        home = "shardwise.tools.report" if name == "base" else name
        # importlib.resources also finds templates in a wheel.
        return resources.files(home).joinpath("page.html.jinja").read_text()

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(load)
    )
    colors = [(variable(color), color, dark) for color, dark in DARK.items()]
    return environment.get_template(package).render(colors=colors, **values)
