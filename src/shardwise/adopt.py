"""Runs a script with our classes in the place of a library's: `python -m shardwise.adopt NAMES
SCRIPT ...`, as `shardwise run --adopt NAMES SCRIPT ...` has every rank do.

The run is joined before the script starts, so that whatever it asks first knows its rank.
"""

from __future__ import annotations

import builtins
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise.bridging.joining import join
from shardwise.launch import program


def main(arguments: list[str]) -> None:
    """Adopt the libraries that the first of `arguments` names, and run the rest."""
    names, *words = arguments or [""]
    if not words or any(name not in _ADOPT for name in names.split(",")):
        sys.exit(
            "shardwise: python -m shardwise.adopt takes names out of "
            f"{', '.join(_ADOPT)}, with commas between, and then a script or -m MODULE."
        )
    join({}, f"--adopt {names}", in_parts=names == "deepspeed")
    for name in names.split(","):
        _ADOPT[name]()
    if program.set_up_python(words):
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        _run(words[0])


def _run(path: str) -> None:
    """Run the script at `path` as Python itself does: in the module `__main__` that was there from
    the start, which those who pickle the script's functions look for."""
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


def _adopt_accelerate() -> None:
    stock = import_module("accelerate").Accelerator
    _replace("accelerate", stock, import_module("shardwise.accelerate").Accelerator)


def _adopt_transformers() -> None:
    theirs = import_module("transformers")
    stock = theirs.Trainer, theirs.Seq2SeqTrainer
    ours = import_module("shardwise.transformers")
    for before, after in zip(stock, (ours.Trainer, ours.Seq2SeqTrainer), strict=True):
        _replace("transformers", before, after)


def _adopt_deepspeed() -> None:
    import_module("shardwise.deepspeed.modules").adopt()


def _adopt_lightning() -> None:
    import_module("shardwise.lightning.adoption").adopt()


def _replace(library: str, stock: type[Any], ours: type[Any]) -> None:
    """Let every module of `library` that has the class `stock` have `ours` from now on."""
    name = stock.__name__
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] == library and vars(module).get(name) is stock:
            setattr(module, name, ours)


_ADOPT: dict[str, Callable[[], None]] = {
    "accelerate": _adopt_accelerate,
    "deepspeed": _adopt_deepspeed,
    "transformers": _adopt_transformers,
    "lightning": _adopt_lightning,
}

if __name__ == "__main__":
    # The script takes this module's place, so that nothing may still run in it.
    import_module("shardwise.adopt").main(sys.argv[1:])
