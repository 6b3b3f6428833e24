"""Finds the program that every rank is to run, before the start: a file, a module, a command."""

import difflib
import importlib.util
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import FileFinder, ModuleSpec
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.net.python_command import is_own, python_words

_BY_TORCH = re.compile(r"torch\.distributed|torch import distributed|accelerate|lightning")


def command(name: str, arguments: tuple[str, ...], *, module: bool) -> tuple[str, ...]:
    """The words to execute. Raises LaunchError, naming what is near, when there is no `name`."""
    if module:
        _check_module(name)
        return (*python_words(name), *arguments)
    if Path(name).is_dir():
        raise LaunchError(f"{name} is a directory; give the script in it{_example(Path(name))}.")
    if is_script(name):
        _check_file(name)
        return (sys.executable, name, *arguments)
    return (_executable(name), *arguments)


def is_script(name: str) -> bool:
    """Whether a program of this name is Python's to run."""
    return name.endswith(".py")


def text_of(name: str) -> str:
    """What stands in a Python script; "" for any other program, and where it cannot be read."""
    if not is_script(name):
        return ""
    try:
        return Path(name).read_text(errors="replace")
    except OSError:  # `command` says what is wrong with it
        return ""


def joins_itself(name: str) -> bool:
    """Whether a Python script names what joins ranks by the variables of torchrun, and not us."""
    text = text_of(name)
    return bool(_BY_TORCH.search(text)) and not names_us(text)


def names_us(text: str) -> bool:
    """Whether a script may be one for `sw.init` or `hvd.init`."""
    return re.search("shardwise|horovod", text) is not None


def set_up_python(words: Sequence[str]) -> bool:
    """Set sys.argv and sys.path[0] as Python has them for `words`, SCRIPT ... or -m MODULE ...;
    returns whether it is a module, whose name is sys.argv[0] then."""
    module = words[0] == "-m"
    sys.argv = list(words[1:] if module else words)
    if not module:
        put_first_on_path(os.path.dirname(os.path.abspath(words[0])))
    elif not is_own(words[1]):
        put_first_on_path(os.getcwd())
    return module


def put_first_on_path(folder: str) -> None:
    """Let Python look for modules in `folder` first, as it does for a script in that folder."""
    if os.environ.get("PYTHONSAFEPATH"):
        return  # the user wants no such folder
    if sys.flags.safe_path:
        sys.path.insert(0, folder)  # started with -P, so nothing stands there yet
    else:
        sys.path[0] = folder


def imports(text: str, *packages: str) -> bool:
    """Whether a script's text imports one of `packages`, alone or in a list."""
    names = "|".join(packages)
    line = rf"^[ \t]*(from[ \t]+({names})\b|import\b[^#\n]*\b({names})\b)"
    return re.search(line, text, re.MULTILINE) is not None


def _check_file(name: str) -> None:
    path = Path(name)
    if not path.is_file():
        raise LaunchError(f"There is no script {name} {_place(path)}.{_near(path)}")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"The script {name} may not be read: check its permissions.")


def _executable(name: str) -> str:
    found = shutil.which(name)
    if found is not None:
        return found
    path = Path(name)
    if path.is_file():
        raise LaunchError(
            f"{name} is not executable. Write chmod +x {name}, or give it the ending .py "
            "if it is Python."
        )
    where = _place(path) if os.sep in name else "on PATH"
    raise LaunchError(f"There is no program {name} {where}.{_near(path)}")


def _place(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"(nor a directory {folder})"
    return f"in {folder.resolve()}"


def _near(path: Path) -> str:
    """ " Did you mean ...?", from the files beside the one that is missing."""
    folder = path.parent
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f" Did you mean {folder / near[0]}?" if near else ""


def _example(folder: Path) -> str:
    scripts = sorted(folder.glob("*.py"))
    return f", such as {scripts[0]}" if scripts else ""


def _check_module(name: str) -> None:
    """Find a module as `python -m` will, but execute none of it."""
    head, *rest = name.split(".")
    with _current_folder_first():
        spec = importlib.util.find_spec(head) if head else None
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
    """The module `path` of `package`, or None; also when `package` is not one."""
    places = package.submodule_search_locations or []
    finders = [pkgutil.get_importer(place) for place in places]
    found = [finder.find_spec(path) for finder in finders if isinstance(finder, FileFinder)]
    specs = [spec for spec in found if spec is not None]
    return next((spec for spec in specs if spec.loader), specs[0] if specs else None)


def _no_module(name: str, missing: str) -> LaunchError:
    if missing.endswith(".__main__"):
        return LaunchError(f"{name} is a package without {missing}: name a module in it.")
    hint = (
        "Did you mean to run the file without -m?"
        if is_script(name)
        else ("Is it spelt so, and installed for this Python?")
    )
    return LaunchError(f"There is no module {missing!r} for {sys.executable}. {hint}")


@contextmanager
def _current_folder_first() -> Iterator[None]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop(0)


def wait_for(process: subprocess.Popen[bytes], on_time: Callable[[], None]) -> int:
    """Wait for a run of `shardwise run`, calling `on_time` meanwhile; returns its exit code.

    An error, or Ctrl-C, ends the run first.
    """
    try:
        while True:
            try:
                return process.wait(timeout=0.25)
            except subprocess.TimeoutExpired:
                on_time()
    except BaseException:
        process.send_signal(signal.SIGINT)  # a second one is harmless: it ends its ranks
        process.wait()
        raise
