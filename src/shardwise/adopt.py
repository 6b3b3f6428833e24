"""Runs a script with our classes in the place of a library's: `python -m shardwise.adopt NAMES
SCRIPT ...`, as `shardwise run --adopt NAMES SCRIPT ...` has every rank do.

The run is joined before the script starts, so that whatever it asks first knows its rank.
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
            "shardwise: python -m shardwise.adopt takes names out of "
            f"{', '.join(LIBRARIES)}, with commas between, and then a script or -m MODULE."
        )
    join({}, f"--adopt {names}", in_parts=names == "deepspeed")
    for name in names.split(","):
        _adopt(name)
    if program.set_up_python(words):
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        _run(words[0])


def _run(path: str) -> None:
    """Run the script at `path` as Python itself does."""
    # In the module `__main__` of this process, and not in a new one as runpy does: pickle looks
    # for the script's functions there.
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    namespace = vars(sys.modules["__main__"])
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
"""Classes that are replaced by ours of the same name."""

MODULES = {"deepspeed": "shardwise.deepspeed.modules", "lightning": "shardwise.lightning.adoption"}
"""Modules of ours that replace a whole library."""

LIBRARIES = ("accelerate", "deepspeed", "transformers", "lightning")


def _adopt(library: str) -> None:
    """Put our classes in the place of those of `library`."""
    if library in MODULES:
        import_module(MODULES[library]).adopt()
        return
    theirs = import_module(library)
    # All of theirs first: importing ours may import more of the library.
    stock = {name: getattr(theirs, name) for name in CLASSES[library]}
    ours = import_module(f"shardwise.{library}")
    for name, before in stock.items():
        # Submodules hold the class under its name too: `from .trainer import Trainer`.
        for path, module in list(sys.modules.items()):
            if path.split(".")[0] == library and vars(module).get(name) is before:
                setattr(module, name, getattr(ours, name))


if __name__ == "__main__":
    # The script takes this module's place, so that nothing may still run in it.
    import_module("shardwise.adopt").main(sys.argv[1:])
