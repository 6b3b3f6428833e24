"""Runs a script with our classes in place of a library's.

    python -m shardwise.adopt NAMES SCRIPT ...

`shardwise run --adopt NAMES SCRIPT ...` runs this command on every rank. The process joins the run
before the script starts, because the script may ask for its rank at once.
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
    """Adopt the libraries that the first of `arguments` names, and run the rest."""
    names, *words = arguments or [""]
    if not words or any(name not in LIBRARIES for name in names.split(",")):
        sys.exit(
            "shardwise: python -m shardwise.adopt takes one or more of "
            f"{', '.join(LIBRARIES)}, separated by commas, and then a script or -m MODULE."
        )
    # Before the library is imported: some read the rank on import.
    join({}, f"--adopt {names}", in_parts=names == "deepspeed")
    for name in names.split(","):
        _adopt(name)
    # True for `-m MODULE`.
    if program.set_up_python(words):
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        _run(words[0])


def _run(path: str) -> None:
    """Run the script at `path` as Python itself does."""
    # In the module `__main__` of this process, not in a new module as runpy does, because pickle
    # looks there for the script's functions.
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    namespace = vars(sys.modules["__main__"])
    # Names of this module must not be visible to the script.
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
"""Classes of a library that our classes of the same name replace."""

MODULES = {"deepspeed": "shardwise.deepspeed.modules", "lightning": "shardwise.lightning.adoption"}
"""Our modules that replace a whole library."""

LIBRARIES = ("accelerate", "deepspeed", "transformers", "lightning")


def _adopt(library: str) -> None:
    """Replace classes of `library` by ours."""
    if library in MODULES:
        import_module(MODULES[library]).adopt()
        return
    theirs = import_module(library)
    # The original classes first, because importing ours may import more of the library.
    originals = {name: getattr(theirs, name) for name in CLASSES[library]}
    ours = import_module(f"shardwise.{library}")
    for name, original in originals.items():
        # Submodules hold the class under its name too: `from .trainer import Trainer`.
        for path, module in list(sys.modules.items()):
            if path.split(".")[0] == library and vars(module).get(name) is original:
                setattr(module, name, getattr(ours, name))


if __name__ == "__main__":
    # The script clears and takes over the module `__main__`, so run from the imported copy of it.
    import_module("shardwise.adopt").main(sys.argv[1:])
