"""Finds the script, module or command that the ranks will run, before any rank starts."""

import difflib
import importlib.util
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import FileFinder, ModuleSpec
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.net.python_command import is_own, python_words

_BY_TORCH = re.compile(r"torch\.distributed|torch import distributed|accelerate|lightning")


def command(name: str, arguments: tuple[str, ...], *, module: bool) -> tuple[str, ...]:
    """Return the command that runs a script, module or other program with `arguments`.

    Raises LaunchError, with a suggestion, if the program does not exist.
    """
    if module:
        _check_module(name)
        return (*python_words(name), *arguments)
    path = Path(name)
    if path.is_dir():
        scripts = sorted(path.glob("*.py"))
        example = f", such as {scripts[0]}" if scripts else ""
        raise LaunchError(f"{name} is a directory: give the path of a script in it{example}.")
    if is_script(name):
        if not path.is_file():
            raise LaunchError(f"There is no script {name} {_place(path)}.{_near(path)}")
        if not os.access(path, os.R_OK):
            raise LaunchError(f"The script {name} is not readable: check its permissions.")
        return (sys.executable, name, *arguments)
    if (found := shutil.which(name)) is not None:
        return (found, *arguments)
    if path.is_file():
        raise LaunchError(
            f"{name} is not executable: run chmod +x {name}, or rename it to {name}.py if it is "
            "Python."
        )
    where = _place(path) if os.sep in name else "on PATH"
    raise LaunchError(f"There is no program {name} {where}.{_near(path)}")


def is_script(name: str) -> bool:
    return name.endswith(".py")


def text_of(name: str) -> str:
    """Return the source of a Python script, or "" if `name` is not a script or cannot be read."""
    if not is_script(name):
        return ""
    try:
        return Path(name).read_text(errors="replace")
    except OSError:  # `command` raises an error about this
        return ""


def joins_itself(name: str) -> bool:
    """Return whether a Python script seems to use torch.distributed itself to connect its ranks."""
    text = text_of(name)
    return bool(_BY_TORCH.search(text)) and not names_us(text)


def names_us(text: str) -> bool:
    """Return whether a script's source mentions shardwise or Horovod.

    Such a script may call `sw.init` or `hvd.init`.
    """
    return re.search("shardwise|horovod", text) is not None


def set_up_python(words: Sequence[str]) -> bool:
    """Set sys.argv and sys.path[0] as Python does for a script or module.

    Args:
        words: Python's arguments: SCRIPT ... or -m MODULE ...

    Returns:
        True if `words` names a module. Its name is then in sys.argv[0].
    """
    module = words[0] == "-m"
    sys.argv = list(words[1:] if module else words)
    if not module:
        put_first_on_path(os.path.dirname(os.path.abspath(words[0])))
    elif not is_own(words[1]):
        put_first_on_path(os.getcwd())
    return module


def put_first_on_path(folder: str) -> None:
    """Make Python search `folder` first for modules, as if the script were in that folder."""
    if os.environ.get("PYTHONSAFEPATH"):
        return  # the user has disabled such entries of sys.path
    if sys.flags.safe_path:
        sys.path.insert(0, folder)  # Python was started with -P, so there is no entry to replace
    else:
        sys.path[0] = folder


def imports(text: str, *packages: str) -> bool:
    """Return whether a script with the source `text` imports one of `packages`."""
    names = "|".join(packages)
    line = rf"^[ \t]*(from[ \t]+({names})\b|import\b[^#\n]*\b({names})\b)"
    return re.search(line, text, re.MULTILINE) is not None


def _place(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"(nor a directory {folder})"
    return f"in {folder.resolve()}"


def _near(path: Path) -> str:
    """Suggest a similar file name in the same folder (" Did you mean ...?"), else return ""."""
    folder = path.parent
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f" Did you mean {folder / near[0]}?" if near else ""


def _check_module(name: str) -> None:
    """Raise LaunchError if `python -m` will not find module `name`. Does not execute the module."""
    head, *rest = name.split(".")
    # Python searches the current folder first. Use find_spec only for the outermost package,
    # because for an inner module it would execute the packages that contain it.
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(head) if head else None
    finally:
        sys.path.pop(0)
    path = head
    for part in rest:
        if spec is None:
            break
        path = f"{path}.{part}"
        spec = _inside(spec, path)
    if spec is not None and spec.submodule_search_locations is not None:
        path = f"{path}.__main__"
        spec = _inside(spec, path)
    if spec is None:
        raise _no_module(name, path)


def _inside(package: ModuleSpec, path: str) -> ModuleSpec | None:
    """Return the module with the dotted name `path` in `package`, or None if it does not exist."""
    places = package.submodule_search_locations or []
    finders = [pkgutil.get_importer(place) for place in places]
    found = [finder.find_spec(path) for finder in finders if isinstance(finder, FileFinder)]
    specs = [spec for spec in found if spec is not None]
    # Prefer a regular module to a namespace package, which has no loader.
    return next((spec for spec in specs if spec.loader), specs[0] if specs else None)


def _no_module(name: str, missing: str) -> LaunchError:
    if missing.endswith(".__main__"):
        return LaunchError(f"{name} is a package without {missing}: name a module in it.")
    hint = (
        "Did you mean to run the file without -m?"
        if is_script(name)
        else "Check its spelling, and whether it is installed for this Python."
    )
    return LaunchError(f"There is no module {missing!r} for {sys.executable}. {hint}")


def wait_for(process: subprocess.Popen[bytes], on_time: Callable[[], None]) -> int:
    """Wait for a `shardwise run` process to exit, and return its exit code.

    Calls `on_time` several times per second. On an error or Ctrl-C, stops the run, then reraises.
    """
    try:
        while True:
            try:
                return process.wait(timeout=0.25)
            except subprocess.TimeoutExpired:
                on_time()
    except BaseException:
        # After Ctrl-C, the process may already have received SIGINT. A second one is harmless: it
        # kills the ranks at once.
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
