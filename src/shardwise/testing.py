"""For tests of your own: that a training is the same under every placement.

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
from shardwise.tools.verify.runs import Run, RunFailed, ScriptCommand, WarmRanks
from shardwise.tools.verify.verdicts import TrainingVerdict
from shardwise.world.randomness import seed_everything

Made = tuple[nn.Module, torch.optim.Optimizer, Sequence[Any], Callable[..., Tensor]]

_LAST = 40
"""Lines of the output of a run that failed, in the message."""


def assert_same_training(
    make: Callable[[], Made],
    *,
    placements: Sequence[str] = ("-n 2 --zero 0", "-n 2 --zero 3"),
    steps: int = 5,
    bits: bool = False,
) -> None:
    """Raise AssertionError unless `make`'s training is that of plain PyTorch in every placement.

    `make()` returns `model, optimizer, batches, loss_of`: total batches (nests of tensors whose
    rows are dimension 0; they are gone through again where there are fewer than `steps`), and
    `loss_of(model, *batch)`, a mean over rows. `placements` are flags of `shardwise run`. In fp64
    every loss, gradient norm, parameter, buffer and optimizer state agrees to 1e-8; with `bits`
    they are to be equal to the last bit as they are. `make` is a function at the top of a module,
    since every rank, a process of its own, imports it.

    The message has the first step, the first tensor and the cause, as `shardwise verify` has them.
    """
    __tracebackhide__ = True
    where = _place_of(make)
    spread = [placement_of(text) for text in placements]
    folder = Path(tempfile.mkdtemp(prefix="shardwise-testing-"))
    words = ("shardwise.testing", *where, str(steps))
    plan = VerifyRequest(
        script=ScriptCommand(words=words, module=True),
        against=ScriptCommand(words=(*words, "plain"), module=True),
        placements=spread,
        steps=steps,
        out=folder,
    )
    try:
        with WarmRanks(plan.script, plan.max_size) as warm:

            def run_training(run: Run, words: str) -> RecordedTraining:
                return runs.make(run, words, folder / "output.txt", lambda steps: None, warm)

            verification = Verification(plan, run_training)
            for placement in spread:
                _check(verification, placement, bits=bits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(verification: Verification, placement: RunPlacement, *, bits: bool) -> None:
    __tracebackhide__ = True
    try:
        verification.check()
        result = verification.judge(placement)
    except RunFailed as error:
        said = "\n".join(error.output.strip().splitlines()[-_LAST:])
        raise AssertionError(f"{placement}: {error}\n{said}") from None
    except ShardwiseError as error:
        raise AssertionError(f"{placement}: {error}") from None
    if result.verdict is TrainingVerdict.BITS or (
        result.verdict is TrainingVerdict.ROUNDING and not bits
    ):
        return
    said = "\n  ".join(verdicts.sentences(result))
    raise AssertionError(f"{placement}: {result.verdict.words}\n  {said}")


def _place_of(make: Callable[[], Made]) -> tuple[str, str, str, str]:
    """The file of a function, its name, its module, and where modules are looked for here. Raises
    UsageError for one that no process can import."""
    name, path = getattr(make, "__qualname__", ""), inspect.getsourcefile(make)
    if path is None or not name.isidentifier():
        raise UsageError(
            f"assert_same_training takes a function at the top of a module, which every rank "
            f"imports, not {name or make!r}."
        )
    places = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    return str(Path(path).resolve()), name, make.__module__, places


def _imported(path: str, name: str, module: str, places: str) -> Callable[[], Made]:
    """The function `name` of the file `path`, imported as it was there: as `module`, looked for in
    the same `places`, where that is the file; else from the file, with its folder on the path."""
    sys.path += [place for place in places.split(os.pathsep) if place not in sys.path]
    if (found := _by_name(path, module)) is None:
        sys.path.insert(0, str(Path(path).parent))
        found = _by_file(path)
    function: Callable[[], Made] = getattr(found, name)
    return function


def _by_name(path: str, module: str) -> ModuleType | None:
    """The module of that name, if it is in that file: pytest's importlib mode gives other names."""
    if module == "__main__":
        return None
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # a package of it is not to be found from here
        return None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != Path(path):
        return None
    return import_module(module)


def _by_file(path: str) -> ModuleType:
    """The module in a file, by its full name where it lies in a package, so that it may import
    from there."""
    file = Path(path)
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
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _train(make: Callable[[], Made], steps: int) -> None:
    """The loop under a placement."""
    import shardwise as sw

    world = sw.init(seed=0)
    model, optimizer, batches, loss_of = make()
    engine = sw.Engine(model.to(world.device), optimizer)
    for batch in islice(cycle(batches), steps):
        engine.backward(loss_of(model, *world.share(batch)))
        engine.step()


def _train_plain(make: Callable[[], Made], steps: int) -> None:
    """The same loop as plain PyTorch has it."""
    seed_everything(0)
    model, optimizer, batches, loss_of = make()
    for batch in islice(cycle(batches), steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, *batch))
        optimizer.step()


if __name__ == "__main__":
    path, name, module, places, steps, *plain = sys.argv[1:]
    (_train_plain if plain else _train)(_imported(path, name, module, places), int(steps))
