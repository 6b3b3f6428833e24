"""Lists every error message of the package for docs/reference/messages.md.

    python scripts/site_messages.py     # print the page

A message is the first argument of a `raise` of one of the classes in errors.py. Values that are
filled in appear as {name}.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src" / "shardwise"


def error_names() -> set[str]:
    """Return the names of the public error classes."""
    tree = ast.parse((SOURCES / "errors.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def text_of(node: ast.expr) -> str | None:
    """Return a string expression as text with placeholders; None if it is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(value.value)
            if isinstance(value, ast.Constant)
            else f"{{{ast.unparse(value.value)}}}"
            for value in node.values
            if isinstance(value, ast.Constant | ast.FormattedValue)
        ]
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return left + right if left is not None and right is not None else None
    return None


def messages() -> Iterator[tuple[str, str, str]]:
    """Yield the package, the error class and the text of each message."""
    names = error_names()
    for path in sorted(SOURCES.rglob("*.py")):
        package = path.relative_to(SOURCES).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            text = text_of(node.exc.args[0]) if node.exc.args else None
            if name in names and text is not None:
                yield package, name, " ".join(text.split())


def page() -> str:
    """Return all messages as Markdown tables, one per package."""
    by_package = defaultdict(set)
    for package, name, text in messages():
        by_package[package].add((name, text))
    lines = []
    for package, rows in sorted(by_package.items()):
        lines += [f"\n## {package}\n", "| error | message |", "|---|---|"]
        for name, text in sorted(rows):
            # Code, so that braces, stars and brackets stay as they are.
            shown = text.replace("|", "&#124;").replace("<", "&lt;").replace("[", "&#91;")
            lines.append(f"| `{name}` | {shown.replace('*', '&#42;').replace('_', '&#95;')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
