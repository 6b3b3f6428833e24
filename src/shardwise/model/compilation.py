"""Compiles the forward passes of units with torch.compile."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.model.module_hooks import ReplacedForward

Compiler = Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
"""Returns the compiled form of a unit's `forward`."""


class CompiledForward(ReplacedForward):
    """Replacement for `unit.forward` that is compiled. Hooks on the unit split no graph."""

    is_compiled = True

    def __init__(self, unit: nn.Module, compiler: Compiler) -> None:
        super().__init__(unit)
        self.plain = compiler(unit, self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)


def is_compiled_by_script(module: nn.Module) -> bool:
    """Return whether the script has compiled `module`, with its hooks, by torch.compile."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether the script or the engine (`--compile`) has compiled `module`."""
    by_engine = getattr(vars(module).get("forward"), "is_compiled", False)
    return by_engine or is_compiled_by_script(module)


def compile_forward(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `forward`, the bound method of `unit`."""
    del unit
    return torch.compile(forward)


def with_unknown_sizes(compiler: Compiler) -> Compiler:
    """Return `compiler`, whose graphs contain operators with an unknown number of rows.

    By default torch splits a graph before such an operator.
    """

    def compile_unit(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled = compiler(unit, forward)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # the script compiles the model as a whole
                return compiled(*args, **kwargs)
            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
                return compiled(*args, **kwargs)

        return call

    return compile_unit


def check_cpp_compiler(device: torch.device) -> None:
    """Raise ConfigError if torch.compile cannot compile for `device` because of a missing compiler.

    torch itself would raise an error in the first forward pass, after data has been read.
    """
    # The default of torch._inductor.config.cpp.cxx, without the import, which takes seconds.
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(name) is None:
        raise ConfigError(
            f"--compile needs a C++ compiler on a CPU, but {name} is not installed. Install it (on "
            "Debian: apt install g++), set the environment variable CXX to another compiler, or "
            "start without --compile."
        )


def fix_order_of_graphs() -> None:
    """Have torch try the graphs of a function in the same order on every call.

    By default torch first tries the graph that ran last. For the same inputs, a recomputation would
    then find a graph for all sizes, compiled since, instead of the one that its forward pass used.
    """
    # Versions of torch that lack it raise CheckpointError if the graphs differ.
    set_lru_cache = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if set_lru_cache is not None:
        set_lru_cache(False)
