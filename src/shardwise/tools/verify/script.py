"""Runs a user's script inside a rank for `shardwise verify`.

    python -m shardwise.tools.verify.script '{"record": ..., "alter": {...}}' train.py [ARGS]

The script runs as with `python train.py`. Its training is recorded, and its behaviour is altered if
`alter` is not empty. A script without an engine is recorded with hooks on torch's optimizers.
"""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardwise.launch import program
from shardwise.launch.flags import ADOPTED
from shardwise.model.precision import PRESETS
from shardwise.net.launchers import detection as launcher_detection
from shardwise.net.python_command import is_own
from shardwise.tools.verify import alterations, outside, watching

_RANKS = re.compile(r"(environ|getenv).*\b(LOCAL_)?RANK\b")


_NARROWER = {torch.float32, torch.float16, torch.bfloat16}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_CASTS: set[Any] = {Tensor.float, Tensor.half, Tensor.bfloat16}
_LOSSES: set[Any] = {
    *(functional.mse_loss, functional.l1_loss),
    *(functional.smooth_l1_loss, functional.huber_loss),
}
"""Losses that accept a mix of fp32 and fp64 in the forward pass, but fail in the backward pass
with torch 2.9."""


_WITH_DTYPE: set[Any] = {functional.softmax, functional.log_softmax}
"""Functions with an argument dtype that torch's own Python code passes to a mode."""


class PromoteToFp64(TorchFunctionMode):
    """Makes a script compute in fp64, even if its own code or a library casts tensors to fp32.

    Casts of fp64 tensors to narrower dtypes have no effect. If a call fails because its arguments
    mix fp32 and fp64, it is repeated with all arguments in fp64. If the function writes to its
    first tensor, the other arguments are cast to that tensor's dtype instead.

    Args:
        creates: Whether tensors for which the script requests a narrower dtype are also fp64, such
            as torch.zeros(n, dtype=torch.float32) and mask.float(). Default: False.
    """

    def __init__(self, *, creates: bool = False) -> None:
        super().__init__()
        self._creates = creates

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype = args[0].dtype if args and isinstance(args[0], Tensor) else None
        wide = dtype is torch.float64 or (self._creates and dtype in _INTEGERS)
        narrow = self._creates and kwargs.get("dtype") in _NARROWER
        if narrow and (func in _WITH_DTYPE or not watching.is_called_by_torch(1)):
            kwargs = kwargs | {"dtype": torch.float64}
        # Keep casts inside torch and the engine, which are part of their algorithms.
        if wide and (func in _CASTS or func is Tensor.to) and not watching.is_called_by_torch(1):
            if func in _CASTS:
                return args[0].double()
            args, kwargs = pytree.tree_map_only(
                torch.dtype,
                lambda dtype: torch.float64 if dtype in _NARROWER else dtype,
                (args, kwargs),
            )
        leaves = pytree.tree_leaves((args, kwargs))
        dtypes = {each.dtype for each in leaves if isinstance(each, Tensor)}
        mixed = {torch.float32, torch.float64} <= dtypes
        # Try the call unchanged first, because most functions promote their arguments. Losses fail
        # only in the backward pass, when it is too late to repeat the call.
        if not (mixed and func in _LOSSES):
            try:
                return func(*args, **kwargs)
            except RuntimeError:
                if not mixed:
                    raise
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        first = next(each for each in pytree.tree_leaves(args) if isinstance(each, Tensor))
        dtype = first.dtype if writes else torch.float64
        with torch._C.DisableTorchFunction():
            args, kwargs = pytree.tree_map_only(
                Tensor,
                lambda each: each.to(dtype) if each.is_floating_point() else each,
                (args, kwargs),
            )
        return func(*args, **kwargs)


def run_backward_in(mode: TorchFunctionMode) -> None:
    """Activate a mode in backward passes too, for recomputation and autograd functions.

    `Tensor.backward` and `torch.autograd.backward` are functions that a mode handles, and a mode is
    inactive while it handles a function.
    """
    module: Any = torch.autograd
    plain: Callable[..., Any] = module._engine_run_backward

    @wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return plain(*args, **kwargs)

    module._engine_run_backward = run


def main(arguments: list[str]) -> None:
    """Run a script to its end. `arguments` are the options (JSON), the script and its arguments."""
    options: dict[str, Any] = json.loads(arguments[0])
    words = arguments[1:]
    if not Path(options["record"]).is_dir():
        sys.exit(
            f"shardwise: host {platform.node()} does not see {options['record']}, where each rank "
            "records its training. On several hosts give a folder that all hosts share: --out DIR."
        )
    sys.argv = words
    facts = watching.Facts()
    watching.watch(facts)
    if not options["module"] and "horovod" in Path(words[0]).read_text(errors="replace"):
        # Importing shardwise.horovod takes time, so do so only if the script uses Horovod.
        watching.watch_horovod(facts)
    # The recorder applies the precision only without an engine, which applies it itself.
    preset = PRESETS[options["precision"]]
    recorder = outside.Recorder(
        Path(options["record"]),
        rank=0 if options["plain"] else launcher_detection.identify().rank,
        stop_after=options["steps"],
        preset=preset,
        facts=facts,
        plain=options["plain"],
    )
    # Apply alterations after `watch`, so that they wrap the functions that record their callers.
    alterations.apply(options["alter"])
    mode = PromoteToFp64() if preset.widens else None
    if mode is not None:
        run_backward_in(mode)
    with nullcontext() if mode is None else mode:
        try:
            _run(words[0], facts, module=options["module"])
        finally:
            # Write the facts even if the script fails or exits with SystemExit.
            for library in ADOPTED:
                if f"shardwise.{library}" in sys.modules:
                    facts.note("bridge", library)
            recorder.write_facts()


def _run(name: str, facts: watching.Facts, *, module: bool) -> None:
    script = next((word for word in sys.argv if program.is_script(word)), "")
    # There are many ways to read an environment variable, so search the source for its name.
    for number, line in enumerate(program.text_of(script).splitlines(), 1):
        if _RANKS.search(line):
            facts.note("rank", f"{Path(script).name}:{number}")
    if module:
        # `python -m shardwise.adopt NAMES -m MODULE` runs MODULE, which is the user's code.
        own = name if name != "shardwise.adopt" else sys.argv[3] if sys.argv[2] == "-m" else ""
        watching.USERS.add(own.split(".")[0])
        if not is_own(name):
            program.put_first_on_path(os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    program.put_first_on_path(str(Path(name).resolve().parent))
    runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
