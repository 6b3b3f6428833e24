"""Runs a script with Shardwise's classes in place of a library's.

    python -m shardwise.adopt NAMES SCRIPT ...

`shardwise run --adopt NAMES SCRIPT ...` runs this command on every rank. The process joins the run
before the script starts, because the script may query its rank immediately.
"""

from __future__ import annotations

import builtins
import runpy
import sys
from importlib import import_module
from pathlib import Path

from shardwise.bridging.joining import join
from shardwise.launch import program


def main(arguments: list[str]) -> None:
    """Adopt the libraries named by the first of the `arguments`, and run the script in the rest."""
    names, *words = arguments or [""]
    if not words or any(name not in LIBRARIES for name in names.split(",")):
        sys.exit(
            "shardwise: python -m shardwise.adopt takes one or more of "
            f"{', '.join(LIBRARIES)}, separated by commas, and then a script or -m MODULE."
        )
    # Join before the library is imported, because some libraries read the rank on import.
    libraries = names.split(",")
    join(
        {},
        f"--adopt {names}",
        in_parts=names == "deepspeed",
        splits_sequences="deepspeed" not in libraries,
    )
    for name in libraries:
        _adopt(name)
    # `set_up_python` returns True for `-m MODULE`.
    if program.set_up_python(words):
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        _run(words[0])


def _run(path: str) -> None:
    """Run the script at `path` as Python itself would."""
    # Use this process's `__main__` module instead of a new module as runpy does, because pickle
    # looks up the script's functions there.
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    namespace = vars(sys.modules["__main__"])
    # The script must not see the names of this module.
    namespace.clear()
    namespace |= {
        "__name__": "__main__",
        "__file__": path,
        "__builtins__": builtins,
        "__spec__": None,
        "__doc__": None,
    }
    exec(code, namespace)


CLASSES = {"accelerate": ("Accelerator",), "transformers": ("Trainer", "Seq2SeqTrainer")}
"""Maps each library to the names of the classes that Shardwise replaces with its own."""

MODULES = {"deepspeed": "shardwise.deepspeed.modules", "lightning": "shardwise.lightning.adoption"}
"""Maps each library that is replaced entirely to the module that replaces it."""

LIBRARIES = ("accelerate", "deepspeed", "transformers", "lightning")


def _adopt(library: str) -> None:
    """Replace classes of `library` with Shardwise's classes."""
    if library in MODULES:
        import_module(MODULES[library]).adopt()
        return
    theirs = import_module(library)
    # Look up the original classes first, because importing ours may import more of the library.
    originals = {name: getattr(theirs, name) for name in CLASSES[library]}
    ours = import_module(f"shardwise.{library}")
    for name, original in originals.items():
        # Submodules hold the class under its name too, as in `from .trainer import Trainer`.
        for path, module in list(sys.modules.items()):
            if path.split(".")[0] == library and vars(module).get(name) is original:
                setattr(module, name, getattr(ours, name))


if __name__ == "__main__":
    # The script clears and takes over `__main__`, so run from the imported copy of this module.
    import_module("shardwise.adopt").main(sys.argv[1:])
