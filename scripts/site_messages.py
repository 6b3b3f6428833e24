"""Lists every error message of the package for docs/reference/messages.md.

    python scripts/site_messages.py     # print the page

A message is the first argument of a call of one of the classes in errors.py. Values that are filled
in appear as {name}; constants of the package appear as their text. An argument without text in the
source, such as a variable that holds an earlier error, must have a row in `PASSED_ON`.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).resolve().parents[1] / "src" / "shardwise"

PASSED_ON = {
    ("checkpoint/formats/exporting.py", "damage"): "the damage that a check of the source found",
    ("checkpoint/formats/importing.py", "damage"): "the damage that a check of the source found",
    (
        "checkpoint/formats/importing.py",
        "draft.describe_error(error)",
    ): "why a file was not written",
    ("checkpoint/source.py", "damage"): "the damage that a check of the source found",
    ("checkpoint/saver.py", "save_plan.failure"): "why the save could not be planned",
    ("checkpoint/saver.py", "job.failure"): "why the background save failed",
    ("horovod/background.py", "self._failure"): "why the background thread stopped",
    ("horovod/background.py", "why"): "why the operations in flight cannot be completed",
    ("islands/elastic/hosts.py", "host.remote.fault"): "the fault that the agent reported",
    ("islands/elastic/hosts.py", "command.refusals(faults)"): "the faults of all hosts",
    ("launch/scale_up.py", "answer['error']"): "the error that the launcher reported",
    ("launch/ssh/agents.py", "command.refusals(faults)"): "the faults of all hosts",
    ("net/launchers/detection.py", "str(error).replace(signs.WAYS, signs.WAYS_OF_COMMAND)"): (
        "the same error, with what to do for a command"
    ),
    ("parallel/pipeline/runner.py", "next(filter(None, refusals))"): "the first rank's message",
    ("tiers/nvme.py", "str(self._failure)"): "the error of the I/O thread",
    ("tiers/spool.py", "str(error)"): "an error of the tier below",
}
"""Arguments that pass on a message made elsewhere, by path and source text, and what they hold."""


class Message(NamedTuple):
    """One message: the file and line that create it, the name of the error class, and the text."""

    path: str
    line: int
    error: str
    text: str


class Untraced(NamedTuple):
    """The argument of an error class for which no text was found."""

    path: str
    line: int
    argument: str


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def error_names() -> set[str]:
    """Return the names of the public error classes."""
    return {
        node.name for node in _tree(SOURCES / "errors.py").body if isinstance(node, ast.ClassDef)
    }


def _path_of(module: str) -> Path | None:
    base = SOURCES.joinpath(*module.split(".")[1:])
    candidates = [base.with_suffix(".py"), base / "__init__.py"]
    return next((path for path in candidates if path.is_file()), None)


@cache
def _imports(path: Path) -> dict[str, tuple[str, str]]:
    """Map each name that a file imports from the package to its module and its name there."""
    found = {}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise"):
            for alias in node.names:
                found[alias.asname or alias.name] = (node.module or "", alias.name)
    return found


def _definition(path: Path, node: ast.expr) -> tuple[Path, ast.AST] | None:
    """Return the constant or function of the package that `node` names, and its file."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        imported = _imports(path).get(node.value.id)
        module = imported and _path_of(f"{imported[0]}.{imported[1]}")
        return _definition(module, ast.Name(node.attr)) if module else None
    if not isinstance(node, ast.Name):
        return None
    for statement in _tree(path).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == node.id:
            return path, statement
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == node.id for target in statement.targets
        ):
            return path, statement.value
    imported = _imports(path).get(node.id)
    module = imported and _path_of(imported[0])
    return _definition(module, ast.Name(imported[1])) if imported and module else None


class _Tracer:
    """Finds the texts that an expression in one function of a file can have."""

    def __init__(self, path: Path, function: ast.AST | None, depth: int = 0) -> None:
        self._path = path
        self._function = function
        self._depth = depth

    def texts(self, node: ast.expr) -> list[str]:
        """Return the possible texts of `node`, with placeholders for values; often one."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return ["".join(self._part(part) for part in node.values)]
        if isinstance(node, ast.IfExp):
            return self.texts(node.body) + self.texts(node.orelse)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left = self.texts(node.left) or [f"{{{ast.unparse(node.left)}}}"]
            right = self.texts(node.right) or [f"{{{ast.unparse(node.right)}}}"]
            return [before + after for before in left for after in right]
        if isinstance(node, ast.BoolOp):
            return [text for value in node.values for text in self.texts(value)]
        if isinstance(node, ast.Call):
            return self._texts_of_call(node)
        return self._texts_of_name(node) or self._texts_of_argument(node)

    def _part(self, part: ast.expr) -> str:
        if isinstance(part, ast.Constant):
            return str(part.value)
        value = part.value if isinstance(part, ast.FormattedValue) else part
        found = _definition(self._path, value)
        if found is not None and isinstance(found[1], ast.expr):
            texts = _Tracer(found[0], None, self._depth + 1).texts(found[1])
            if len(texts) == 1:
                return texts[0]
        return f"{{{ast.unparse(value)}}}"

    def _texts_of_call(self, node: ast.Call) -> list[str]:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in ("format", "replace"):
            return self.texts(function.value)
        found = _definition(self._path, function)
        if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self":
            methods = [
                each
                for each in ast.walk(_tree(self._path))
                if isinstance(each, ast.FunctionDef) and each.name == function.attr
            ]
            found = (self._path, methods[0]) if methods else None
        if found is None or not isinstance(found[1], ast.FunctionDef) or self._depth > 3:
            return []
        tracer = _Tracer(found[0], found[1], self._depth + 1)
        return [
            text
            for each in ast.walk(found[1])
            if isinstance(each, ast.Return) and each.value is not None
            for text in tracer.texts(each.value)
        ]

    def _texts_of_name(self, node: ast.expr) -> list[str]:
        name = ast.unparse(node)
        texts = [
            text
            for each in ast.walk(self._function or ast.Module([], []))
            if isinstance(each, ast.Assign) and name in map(ast.unparse, each.targets)
            for text in self.texts(each.value)
        ]
        for each in ast.walk(self._function or ast.Module([], [])):
            if isinstance(each, ast.For) and name in map(ast.unparse, ast.walk(each.target)):
                texts += self._texts_of_values(each.iter)
        found = None if texts else _definition(self._path, node)
        if found is not None and isinstance(found[1], ast.expr) and self._depth <= 3:
            return _Tracer(found[0], None, self._depth + 1).texts(found[1])
        return texts

    def _texts_of_values(self, loop: ast.expr) -> list[str]:
        """Return the texts in the constant dict `NAME`, if `loop` is `NAME.items()` or similar."""
        if not (isinstance(loop, ast.Call) and isinstance(loop.func, ast.Attribute)):
            return []
        found = _definition(self._path, loop.func.value)
        if found is None or not isinstance(found[1], ast.Dict):
            return []
        return [text for value in found[1].values for text in self.texts(value)]

    def _texts_of_argument(self, node: ast.expr) -> list[str]:
        """Return the texts that callers in the same file pass for the parameter `node`."""
        function = self._function
        if not isinstance(function, ast.FunctionDef) or self._depth > 3:
            return []
        names = [parameter.arg for parameter in function.args.args]
        if not isinstance(node, ast.Name) or node.id not in names:
            return []
        place = names.index(node.id)
        return [
            text
            for call, caller in _calls(_tree(self._path), None)
            if ast.unparse(call.func) == function.name and len(call.args) > place
            for text in _Tracer(self._path, caller, self._depth + 1).texts(call.args[place])
        ]


def _calls(node: ast.AST, function: ast.AST | None) -> Iterator[tuple[ast.Call, ast.AST | None]]:
    """Yield each call below `node`, with the innermost function around it."""
    for child in ast.iter_child_nodes(node):
        inside = child if isinstance(child, ast.FunctionDef) else function
        if isinstance(child, ast.Call):
            yield child, inside
        yield from _calls(child, inside)


@cache
def messages() -> tuple[Message | Untraced, ...]:
    """Return each message of the package, and each argument for which no text was found."""
    return tuple(_messages())


def _messages() -> Iterator[Message | Untraced]:
    names = error_names()
    for path in sorted(SOURCES.rglob("*.py")):
        relative = path.relative_to(SOURCES).as_posix()
        for call, function in _calls(_tree(path), None):
            called = call.func
            name = called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
            if name not in names or not call.args:
                continue
            texts = _Tracer(path, function).texts(call.args[0])
            for text in texts:
                yield Message(relative, call.lineno, name, " ".join(text.split()))
            if not texts:
                yield Untraced(relative, call.lineno, ast.unparse(call.args[0]))


def page() -> str:
    """Return all messages as Markdown tables, one per package."""
    by_package = defaultdict(set)
    for message in messages():
        if isinstance(message, Message):
            package = message.path.partition("/")[0].removesuffix(".py")
            by_package[package].add((message.error, message.text))
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
