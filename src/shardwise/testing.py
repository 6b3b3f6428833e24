"""Provides an assertion for your own tests: training gives the same result under every placement.

from shardwise.testing import assert_same_training

def make():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(5)]
    return model, optimizer, batches, lambda model, x, y: F.mse_loss(model(x), y)

def test_same_training():
    assert_same_training(make, placements=["-n 2 --zero 3", "-n 4 --tensor 2"])
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import cycle, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, UsageError
from shardwise.tools.verify import runs, verdicts
from shardwise.tools.verify.flags import placement_of
from shardwise.tools.verify.flow import Verification
from shardwise.tools.verify.placements import RunPlacement
from shardwise.tools.verify.records import RecordedTraining
from shardwise.tools.verify.request import VerifyRequest
from shardwise.tools.verify.runs import Run, RunFailed, ScriptCommand, warm_ranks
from shardwise.tools.verify.verdicts import TrainingVerdict
from shardwise.world.randomness import seed_everything

Training = tuple[nn.Module, torch.optim.Optimizer, Sequence[Any], Callable[..., Tensor]]
"""Model, optimizer, global batches and loss function."""

_LAST = 40
"""Number of a failed run's output lines to show in the message."""


def assert_same_training(
    make: Callable[[], Training],
    *,
    placements: Sequence[str] = ("-n 2 --zero 0", "-n 2 --zero 3"),
    steps: int = 5,
    bits: bool = False,
) -> None:
    """Assert that training under several placements gives the same results as plain PyTorch.

    It trains once in plain PyTorch and once per placement, and compares every loss, gradient norm,
    parameter, buffer and optimizer state. By default, results are compared in fp64, to within 1e-8.

    Args:
        make: Returns `(model, optimizer, batches, loss_of)`. `batches` are global batches: nested
            containers of tensors of shape (rows, ...), repeated if there are fewer than `steps`.
            `loss_of(model, *batch)` returns a mean over rows. `make` must be a function at the top
            level of a module, because every rank imports it in its own process.
        placements: Flags of `shardwise run`, one string per placement.
        steps: Number of training steps. Default: 5.
        bits: Require bit-identical results, in the model's own precision. Default: False.

    Raises:
        AssertionError: A result differs. The message names the first step and tensor that differ,
            and the cause, as `shardwise verify` does.
        UsageError: `make` cannot be imported.

    Example:
        def test_same_training():
            assert_same_training(make, placements=["-n 2 --zero 3", "-n 4 --tensor 2"])
    """
    __tracebackhide__ = True
    source = _source_of(make)
    requested = [placement_of(text) for text in placements]
    folder = Path(tempfile.mkdtemp(prefix="shardwise-testing-"))
    words = ("shardwise.testing", *source, str(steps))
    plan = VerifyRequest(
        script=ScriptCommand(words=words, module=True),
        against=ScriptCommand(words=(*words, "plain"), module=True),
        placements=requested,
        steps=steps,
        out=folder,
    )
    try:
        with warm_ranks(plan.script, plan.max_size) as warm:

            def run_training(run: Run, words: str) -> RecordedTraining:
                return runs.make(run, words, folder / "output.txt", lambda steps: None, warm)

            verification = Verification(plan, run_training)
            for placement in requested:
                _check(verification, placement, bits=bits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(verification: Verification, placement: RunPlacement, *, bits: bool) -> None:
    """Raise AssertionError if training under `placement` differs from plain PyTorch."""
    __tracebackhide__ = True
    try:
        # The first call trains the plain reference.
        verification.check()
        result = verification.judge(placement)
    except RunFailed as error:
        output = "\n".join(error.output.strip().splitlines()[-_LAST:])
        raise AssertionError(f"{placement}: {error}\n{output}") from None
    except ShardwiseError as error:
        raise AssertionError(f"{placement}: {error}") from None
    if result.verdict is TrainingVerdict.BITS or (
        result.verdict is TrainingVerdict.ROUNDING and not bits
    ):
        return
    differences = "\n  ".join(verdicts.sentences(result))
    raise AssertionError(f"{placement}: {result.verdict.words}\n  {differences}")


def _source_of(make: Callable[[], Training]) -> tuple[str, str, str, str]:
    """Return a function's file, name and module, and `sys.path` as one string.

    Raises UsageError if other processes cannot import the function.
    """
    name, path = getattr(make, "__qualname__", ""), inspect.getsourcefile(make)
    if path is None or not name.isidentifier():
        raise UsageError(
            "assert_same_training takes a function that is defined at the top level of a module, "
            f"so that every rank can import it, not {name or make!r}."
        )
    folders = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    return str(Path(path).resolve()), name, make.__module__, folders


def _import_function(path: str, name: str, module: str, folders: str) -> Callable[[], Training]:
    """Import the function that `_source_of` described in another process.

    The function is imported by module name if that leads to the same file, otherwise from the file.
    """
    # Append to this process's own entries, which must keep their order.
    sys.path += [folder for folder in folders.split(os.pathsep) if folder not in sys.path]
    if (imported := _by_name(path, module)) is None:
        sys.path.insert(0, str(Path(path).parent))
        imported = _by_file(path)
    function: Callable[[], Training] = getattr(imported, name)
    return function


def _by_name(path: str, module: str) -> ModuleType | None:
    """Import a module by name if its file is `path`. Otherwise return None."""
    # pytest's importlib mode gives modules different names from those that an import would use.
    if module == "__main__":
        return None
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # its package cannot be imported here
        return None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != Path(path):
        return None
    return import_module(module)


def _by_file(path: str) -> ModuleType:
    """Import the module in file `path`, by its full name if it belongs to a package."""
    file = Path(path)
    # Relative imports in the file need its package's name.
    names, folder = [file.stem], file.parent
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    if len(names) > 1:
        sys.path.insert(0, str(folder))
        return import_module(".".join(names))
    spec = spec_from_file_location(file.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # Register the module before it runs, as Python's own import does: dataclasses look it up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _train(make: Callable[[], Training], steps: int) -> None:
    """Train under the placement that this process's flags define."""
    import shardwise as sw

    world = sw.init(seed=0)
    model, optimizer, batches, loss_of = make()
    engine = sw.Engine(model.to(world.device), optimizer)
    for batch in islice(cycle(batches), steps):
        engine.backward(loss_of(model, *world.share(batch)))
        engine.step()


def _train_plain(make: Callable[[], Training], steps: int) -> None:
    """Run the training loop in plain PyTorch."""
    # Seed like `sw.init(seed=0)` in `_train`, so that `make` builds the same model and batches.
    seed_everything(0)
    model, optimizer, batches, loss_of = make()
    for batch in islice(cycle(batches), steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, *batch))
        optimizer.step()


if __name__ == "__main__":
    path, name, module, folders, steps, *plain = sys.argv[1:]
    make = _import_function(path, name, module, folders)
    (_train_plain if plain else _train)(make, int(steps))
