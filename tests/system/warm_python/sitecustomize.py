"""Makes the programs of tests start with less CPU time.

Python imports this file at startup if its folder is in PYTHONPATH.

- With TESTS_WARM in the environment, a warm process (server.py) runs the program instead: a script,
  a module of ours that runs a script, or a command of ours that imports torch, with its arguments,
  environment and open files. This process then stands in for the program: it forwards signals, and
  exits with the same status.
- Every other program starts as usual, but does not import torch's compiler unless it compiles.
"""

import functools
import importlib.machinery
import os
import sys

_MODULES = (
    *("shardwise.adopt", "shardwise.tools.plan.observer", "shardwise.tools.warm.fork_server"),
    "shardwise.tools.doctor",
)
"""Modules of ours that run scripts, or are ranks."""

_COMMANDS = ("plan", "pipeline-plan", "verify")
"""Commands of ours that import torch."""

_LIGHT = "rank_client.py"
"""A script that imports nothing."""


def _program(words: list[str]) -> list[str]:
    """The script, or module of ours that runs one, that an interpreter with these arguments is
    started for, and its own arguments; nothing for all else."""
    match words:
        case ["-u", *rest]:
            os.environ["PYTHONUNBUFFERED"] = "1"
            return _program(rest)
        case ["-P", *rest]:
            return _program(rest)
        case ["-m", module, *_] if module in _MODULES:
            return words
        case ["-m", "shardwise", command, *_] if command in _COMMANDS:
            return words
        case [path, *_] if path.endswith(".py") and not path.endswith(_LIGHT):
            return words
    return []


def _compiles() -> bool:
    return "torch._dynamo" in sys.modules


def _postponed_disable(original):  # type: ignore[no-untyped-def]
    """Return `torch._compile._disable_dynamo` without its import, as long as nothing compiles."""

    def disable(fn=None, recursive=True):  # type: ignore[no-untyped-def]
        if fn is None:
            return functools.partial(disable, recursive=recursive)
        disabled = original(fn, recursive)

        @functools.wraps(fn)
        def inner(*args, **kwargs):  # type: ignore[no-untyped-def]
            return (disabled if _compiles() else fn)(*args, **kwargs)

        return inner

    return disable


def _postponed_grad(original):  # type: ignore[no-untyped-def]
    """Return the decorator of `Optimizer.step` in torch without its import, in the same way."""

    def decorate(step):  # type: ignore[no-untyped-def]
        broken = original(step)  # with a graph break before and after the step

        @functools.wraps(step)
        def inner(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            if _compiles():
                return broken(self, *args, **kwargs)
            with sys.modules["torch"].set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return inner

    return decorate


_POSTPONED = {
    "torch._compile": ("_disable_dynamo", _postponed_disable),
    "torch.optim.optimizer": ("_use_grad_for_differentiable", _postponed_grad),
}
"""Functions of torch that import its compiler when the first optimizer is created or steps, which
takes 2 s of CPU time in each process."""


class _Finder:
    """Replaces these functions as soon as their modules are imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in _POSTPONED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            run(module)
            function, postpone = _POSTPONED[name]
            setattr(module, function, postpone(getattr(module, function)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "TESTS_WARM" in os.environ and (_words := _program(sys.orig_argv[1:])):
    from shardwise.tools.warm import rank_client

    os._exit(rank_client.main(os.environ["TESTS_WARM"], "0", *_words))

_COMPILING = ("forkserver", "fork_server", "server.py")
"""Parts of the arguments of processes that import the compiler once, for all of their forks."""

if not any(part in word for part in _COMPILING for word in sys.orig_argv[1:4]):
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
