"""Records one rank of a stock script, or its reference, with hooks on torch.

Every optimizer step is written in the format that `shardwise.world.tensor_log` uses for engines:
losses, learning rates, gradients just before the update, and parameters, buffers and optimizer
state after it. Each process also writes the file stock.facts, with facts that identify causes.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.engine import loss_terms
from shardwise.model.module_records import BUFFER, ForwardInputs, joined, other_tensors
from shardwise.tools.verify.outside import _has_closure, _named_models
from shardwise.tools.verify.stock import (
    alterations,
    draws,
    own_files,
    precision,
    readers,
    zero_shards,
)
from shardwise.tools.verify.stock.batches import BatchRecorder, BatchReplay, LoaderKeys
from shardwise.tools.verify.stock.script_facts import ScriptFacts
from shardwise.tools.verify.stock.stateful_forwards import StatefulForwards
from shardwise.tools.verify.stock.zero_shards import ZeroShards
from shardwise.world.tensor_log import FeedTotals, Part, TensorLog

VARIABLE = "SHARDWISE_VERIFY_STOCK"
"""The variable with the request, in JSON. Its keys are record (folder), view (folder of
own_files.py), steps, stop_at (step after which the rank receives SIGTERM, or None), reference
(whether this is the reference), replay (folder of the ranks' records, or None), wide (None,
"default" or "promoted", see precision.py), draws (whether to log random operations, see draws.py)
and alter (see alterations.py)."""

CONTRIBUTIONS = ("contributions", "first contribution", "last contribution")
"""Kinds of tensors: the sum of the gradients of a step's backward passes, the first of these
gradients, and the last one."""

CLAIM = "claimed"
"""File in a rank's folder with the pid of the process that records the rank."""

STACK = "stack.txt"
"""File in a rank's folder. On SIGUSR2, the rank writes its stack to it."""

LAST_WAIT = 20.0
"""Seconds to wait for other ranks' records after the last step."""


def start(rank: int | None = None, words: Sequence[str] | None = None) -> None:
    """Start recording this process, unless another process is already recording this rank.

    Args:
        rank: The rank, if no launcher has set it in the environment.
        words: The script's command line, if it differs from this process's command line.
    """
    request = json.loads(os.environ[VARIABLE])
    is_spawned = rank is not None
    if rank is None or request["reference"]:
        rank = 0 if request["reference"] else readers.rank()
    folder = Path(request["record"]) / f"rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # The first process of a rank that imports torch is the script. Its own subprocesses
        # inherit the variables, and must not record as well.
        with (folder / CLAIM).open("x") as claim:
            claim.write(str(os.getpid()))
    except FileExistsError:
        if not _is_abandoned(folder):
            return
        (folder / CLAIM).write_text(str(os.getpid()))
    started = {"argv": list(words or sys.orig_argv[1:]), "spawned": is_spawned}
    StockRecorder(request, rank, folder, started).follow()


def _is_abandoned(folder: Path) -> bool:
    """Return whether the process that claimed a rank has exited without completing a step.

    For example, a script may query the GPUs in a subprocess before it imports torch itself. The
    subprocess then claims the rank first.
    """
    if any(folder.glob("engine-*.pt")):
        return False
    try:
        os.kill(int((folder / CLAIM).read_text()), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, ValueError):  # ValueError: the claim is being written
        return False
    return False


class StockRecorder:
    """Records one process's optimizers, losses and loaders."""

    def __init__(
        self, request: dict[str, Any], rank: int, folder: Path, started: dict[str, Any]
    ) -> None:
        self._request, self._rank, self._folder = request, rank, folder
        self._pid = os.getpid()
        self._spawns = False
        self._start = started | {
            "executable": sys.executable,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "view": request["view"],
        }
        self._log = TensorLog(Path(request["record"]), rank)
        is_wide = bool(request["wide"])
        # The reference replays the batches of the ranks, so nothing reads files of its batches.
        keeps = not request["reference"]
        self._batches = BatchRecorder(folder, keeps=keeps, widens=is_wide)
        self._replay: BatchReplay | None = None
        self._optimizers: dict[int, FollowedOptimizer] = {}
        self._rounds = Rounds(request["steps"])
        self._depth = 0
        self._zero: ZeroShards | None = None
        """DeepSpeed's optimizer, during its step."""
        self._steps = 0
        self._is_in_backward = False
        self._losses: list[dict[str, Any]] = []
        self._events: list[list[str]] = [[]]
        self._rates: list[list[float]] = []
        self._dtypes: set[str] = set()
        self._world_size = 0
        self._unnamed: str | None = None
        self._is_done = False
        self._script_facts = ScriptFacts(
            lambda: self._is_here and not self._is_done,
            lambda: (self._replay or self._batches).evaluated,
            lambda event: self._events[-1].append(event),
            lambda: len(self._events) - 1,
        )
        self._draws = draws.DrawLog() if request["draws"] else None
        self._alterations = dict(request["alter"])
        self._stateful = StatefulForwards(
            lambda: self._is_in_backward, self._alterations.pop("keep_buffers", None)
        )
        self._narrow = precision.NarrowOperations() if is_wide else None

    @property
    def _is_here(self) -> bool:
        """Whether the current process is the one that records, rather than a forked child."""
        return os.getpid() == self._pid

    def follow(self) -> None:
        """Install all hooks and start recording."""
        if self._request["view"]:
            own_files.follow(Path(self._request["view"]))
        if self._request["wide"]:
            precision.widen(promotes=self._request["wide"] == "promoted")
        if hasattr(signal, "SIGUSR2"):
            # verify requests the stack of a rank that makes no progress. The file stays open.
            faulthandler.register(
                signal.SIGUSR2, (self._folder / STACK).open("w"), all_threads=False
            )
        if self._draws is not None:
            self._draws.follow()
        keys = LoaderKeys()
        keys.follow()
        if self._request["replay"]:
            self._replay = BatchReplay(Path(self._request["replay"]), bool(self._request["wide"]))
            self._replay.follow()
            if self._replay.window is not None:
                zero_shards.join_ranks(self._replay.window)
        else:
            self._batches.follow()
        self._follow_losses()
        self._follow_events()
        self._script_facts.follow()
        self._follow_exit()
        self._follow_spawns()
        # Hooks run in order of registration, so the recorded gradients include alterations.
        alterations.apply(self._alterations)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        zero_shards.follow(self._before_zero_step, self._after_zero_step)
        atexit.register(self._leave)

    # -- notes ----------------------------------------------------------------------

    def _follow_losses(self) -> None:
        """Patch torch to record the value and terms of every loss on which backward is called."""
        backward: Callable[..., Any] = torch.autograd.backward  # Tensor.backward calls it, too

        @wraps(backward)
        def noted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_in_backward or not self._is_here:
                return backward(tensors, *args, **kwargs)
            if not isinstance(tensors, Tensor):
                tensors = tuple(tensors)  # it may be an iterator, which can be read only once
            for loss in (tensors,) if isinstance(tensors, Tensor) else tensors:
                if loss.numel() == 1:
                    self._losses.append(_described(loss))
            self._events[-1].append("backward")
            self._is_in_backward = True
            try:
                with self._narrow or nullcontext():
                    return backward(tensors, *args, **kwargs)
            finally:
                self._is_in_backward = False

        torch.autograd.backward = noted

    def _follow_events(self) -> None:
        """Patch torch to record the order of clipping, unscaling and scheduler steps."""
        self._note_calls(nn.utils.clip_grad, "clip_grad_norm_", "clip")
        nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_
        self._note_calls(nn.utils, "clip_grads_with_norm_", "clip")
        self._note_calls(torch.amp.GradScaler, "unscale_", "unscale")
        kinds = {each for each in vars(optim.lr_scheduler).values() if isinstance(each, type)}
        for kind in kinds:
            if "step" in vars(kind):  # some override the base class's
                self._note_calls(kind, "step", "schedule")
        self._note_calls(torch.utils.data.DistributedSampler, "set_epoch", "set_epoch")
        self._follow_scaler()

    def _note_calls(self, owner: Any, name: str, event: str) -> None:
        plain = getattr(owner, name)

        @wraps(plain)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if event == "clip" and args and not isinstance(args[0], Tensor):
                args = (list(args[0]), *args[1:])  # an iterator can be read only once
            result = plain(*args, **kwargs)
            if self._is_here:
                words = _describe_clip(result, *args, **kwargs) if event == "clip" else ""
                self._events[-1].append(f"{event}{words}")
            return result

        setattr(owner, name, noted)

    def _follow_scaler(self) -> None:
        """Patch GradScaler to mark losses with their scale and drop the losses of skipped steps."""
        scaler: Any = torch.amp.GradScaler
        scale, step = scaler.scale, scaler.step

        @wraps(scale)
        def marked(this: Any, outputs: Any) -> Any:
            result = scale(this, outputs)
            if isinstance(result, Tensor) and this.is_enabled():
                vars(result)["stock_scale"] = float(this.get_scale())
            return result

        @wraps(step)
        def stepped(this: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._steps
            result = step(this, *args, **kwargs)
            if self._steps == before and self._is_here:
                self._skip()
            return result

        scaler.scale, scaler.step = marked, stepped

    def _follow_spawns(self) -> None:
        """Patch torch.multiprocessing to record whether this rank starts processes itself."""
        module: Any = sys.modules["torch.multiprocessing.spawn"]
        plain: Callable[..., Any] = module.start_processes

        @wraps(plain)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._spawns = True
            return plain(*args, **kwargs)

        module.start_processes = vars(torch.multiprocessing)["start_processes"] = noted

    def _follow_exit(self) -> None:
        """Patch os._exit to write the facts first, because it runs no exit handlers."""
        leave: Callable[[int], Any] = os._exit

        @wraps(leave)
        def noted(status: int) -> Any:
            self._leave()
            return leave(status)

        os._exit = noted

    # -- steps ------------------------------------------------------------------------------

    def _before_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1 and self._zero is not None:
            self._zero.keep_gradients(optimizer)
        if self._depth > 1 or not self._is_here or self._is_done:
            return  # an optimizer inside of another one, such as in ZeroRedundancyOptimizer
        self._world_size = readers.world_size()
        followed = self._optimizers.get(id(optimizer))
        if followed is None:
            named = [each for each in self._optimizers.values() if each.names]
            followed = FollowedOptimizer(optimizer, len(named))
            self._optimizers[id(optimizer)] = followed
        if followed.update():
            if self._request["reference"]:
                followed.follow_contributions()
            self._script_facts.know(followed.models, followed.names)
            self._stateful.know(followed.models)
        if not followed.names:
            self._unnamed = readers.partitioning_library(optimizer)
            return
        if self._rounds.begin(followed.parameter_ids) == self._request["stop_at"]:
            self._request["stop_at"] = None
            # Send SIGTERM like a scheduler that reclaims the node. A script with a handler
            # continues. Wait first, because the launcher would kill slower ranks before they write
            # their facts.
            self._leave()
            self._wait_for_others()
            signal.raise_signal(signal.SIGTERM)
        with torch.no_grad():
            if not followed.steps:
                self._write(followed, [], {})
            followed.has_closure = _has_closure(args, kwargs)
            if not followed.reads_later:
                followed.gradients = list(followed.read_gradients(self._rank))

    def _after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        followed = self._optimizers.get(id(optimizer))
        if self._depth or not self._is_here or self._is_done or followed is None:
            return
        self._steps += 1
        self._batches.steps = self._steps
        self._stateful.stepped()
        if not followed.names:
            return
        followed.steps += 1
        self._rates.append([float(group["lr"]) for group in optimizer.param_groups])
        losses, self._losses = self._losses, []
        batches = self._batches.count_since_step()
        clips = [float(e.split()[1]) for e in self._events[-1] if e.startswith("clip ")]
        self._events.append([])
        figures = {
            "loss": math.fsum(each["value"] for each in losses),
            "terms": losses,
            "batches": batches,
            "random": readers.hash_random_states(),
        }
        if clips:
            figures["grad_norm"] = clips[-1]
        with torch.no_grad():
            if followed.reads_later:
                followed.gradients = list(followed.read_gradients(self._rank))
            self._dtypes.update(
                readers.floating_dtypes([part.values for part in followed.gradients])
            )
            self._write(followed, followed.gradients, figures)
        followed.gradients = []
        if self._rounds.end():
            self._is_done = True
            self._leave()
            self._wait_for_others()
            for child in multiprocessing.active_children():
                child.terminate()  # DataLoader workers would exit only seconds later
            # Exit handlers of the script's libraries would wait for ranks that are gone.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _before_zero_step(self, zero: Any) -> None:
        self._before_step(zero, (), {})
        followed = self._optimizers.get(id(zero))
        self._zero = None if followed is None else followed.zero

    def _after_zero_step(self, zero: Any) -> None:
        shards, self._zero = self._zero, None
        if zero.overflow:
            self._depth -= 1
            self._skip()
        else:
            if shards is not None and self._is_here and (words := shards.clip_words()):
                self._events[-1].append(f"clip{words}")
            self._after_step(zero, (), {})
        if shards is not None:
            shards.forget_gradients()

    def _skip(self) -> None:
        """Drop the facts about a step without an update, because gradients have overflowed."""
        self._losses.clear()
        self._batches.count_since_step()
        kept = [e for e in self._events[-1] if e in ("schedule", "set_epoch")]
        self._events[-1] = [*kept, "skipped"]

    def _wait_for_others(self) -> None:
        """Wait until all ranks have written their facts.

        All ranks complete the same step. When a rank exits, its sockets are closed, although
        another rank may still be in the collective that this rank has finished.
        """
        until = time.monotonic() + LAST_WAIT
        folder = self._folder.parent
        while time.monotonic() < until:
            if len(list(folder.glob("rank-*/stock.facts"))) >= self._world_size:
                return
            time.sleep(0.01)

    def _write(
        self, followed: FollowedOptimizer, gradients: list[Part], figures: dict[str, Any]
    ) -> None:
        parts = gradients + list(followed.read_state(self._rank))
        parts += followed.take_contributions(self._rank)
        if not followed.steps:
            parts = [part for part in parts if part.kind in ("model", "optimizer")]
        figures = {"loss": math.nan, "terms": []} | figures | followed.figures()
        self._log.write(followed.number, followed.steps, figures, parts)

    def _leave(self) -> None:
        """Write the facts when the script exits or the last step is complete."""
        if not self._is_here:
            return
        followed = [each for each in self._optimizers.values() if each.names]
        facts = self._start | {
            "driver": "plain" if any(each.steps for each in followed) else "",
            "world_size": self._world_size or readers.world_size(),
            "libraries": sorted(readers.LIBRARIES & sys.modules.keys()),
            "loaders": self._batches.loaders,
            "seen": self._batches.seen,
            "events": self._events,
            "rates": self._rates,
            "trained": [
                [name for p, name in each.names.items() if p.requires_grad] for each in followed
            ],
            "tensor_parallel": any(each.is_tensor_parallel for each in followed),
            "ended_itself": not self._is_done,
            "dtypes": sorted(self._dtypes),
            "narrow": [] if self._narrow is None else list(self._narrow.entries),
            "unnamed": self._unnamed,
            "spawns": self._spawns,
            "window": next((e.zero.window for e in followed if e.zero is not None), None),
            "draws": [] if self._draws is None else self._draws.entries,
            "stateful": self._stateful.plain(),
            **self._script_facts.plain(),
        }
        path = self._folder / "stock.facts"
        path.with_suffix(".part").write_text(json.dumps(facts))
        os.replace(path.with_suffix(".part"), path)


def _describe_clip(result: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> str:
    """Return the gradient norm, the limit and the number of clipped parameters, as text."""
    # clip_grads_with_norm_ returns nothing. Its caller passes the norm.
    norm = (args[0] if args else kwargs.get("total_norm")) if result is None else result
    values = [readers.number(each) for each in (norm, max_norm)]
    if None in values:
        return ""
    count = len(parameters) if isinstance(parameters, list) else 1
    if result is not None and float(kwargs.get("norm_type", args[0] if args else 2)) != 2:
        count = 0  # only 2-norms are compared with the norm of the gradients
    return f" {values[0]!r} {values[1]!r} {count}"


class Rounds:
    """Counts rounds of steps. Every optimizer steps at most once per round.

    With one optimizer, a round is a step. With two, as in a GAN, each of them steps in a round. If
    a script creates an optimizer again for the same parameters, it counts as the same optimizer.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._number = 0
        self._stepped: set[int] = set()
        self._before: set[int] = set()

    def begin(self, parameters: set[int]) -> int:
        """Record a step for the parameters with these ids. Return the number of earlier rounds."""
        if not self._number or self._stepped & parameters:
            self._number += 1
            self._before, self._stepped = self._stepped, set()
        self._stepped |= parameters
        return self._number - 1

    def end(self) -> bool:
        """Return whether the last round is complete. If it is, the script can be stopped."""
        return self._number >= self._most and self._before <= self._stepped


def _described(loss: Tensor) -> dict[str, Any]:
    """Describe a loss: its value, the items that it averages over, and the factor of this mean.

    The script may multiply the mean by a factor, such as 1/4 for four micro-batches. The value and
    factor do not include a GradScaler's scale.
    """
    terms = loss_terms.read(loss, None)
    main = terms.main
    scale = getattr(loss, "stock_scale", 1.0)
    value = readers.number(loss.detach().reshape(()))
    return {
        "value": math.nan if value is None else value / scale,
        "source": None if main is None else main.source,
        # A sum may be divided by the number of items of all ranks, or by a constant.
        "items": None if main is None or terms.guessed else readers.number(main.items),
        "factor": _root_factor(loss) / scale,
        "words": terms.describe(),
        "is_sum": terms.is_sum,
        "addends": _count_addends(loss),
    }


def _count_addends(loss: Tensor) -> int:
    """Return the number of terms if the loss is a sum (2 for a + b), otherwise 1."""
    node = loss.grad_fn
    if node is None or type(node).__name__ != "AddBackward0":
        return 1
    return len([each for each, _ in node.next_functions if each is not None])


def _root_factor(loss: Tensor) -> float:
    """Return the product of the constant factors that were applied to the loss last."""
    node, factor = loss.grad_fn, 1.0
    while node is not None and type(node).__name__ in ("MulBackward0", "DivBackward0"):
        other = readers.number(getattr(node, "_saved_other", None))
        if other is None or not other:
            break
        factor = factor * other if type(node).__name__ == "MulBackward0" else factor / other
        node = node.next_functions[0][0]
    return factor


class FollowedOptimizer:
    """An optimizer, and the names of its parameters in their outermost modules."""

    def __init__(self, optimizer: optim.Optimizer, number: int) -> None:
        self._optimizer = optimizer
        self.number = number
        self.steps = 0
        self.gradients: list[Part] = []
        self.has_closure = False
        self.zero = ZeroShards(optimizer) if isinstance(optimizer, zero_shards.kinds()) else None
        self.is_tensor_parallel = False
        self.models: list[tuple[str, nn.Module]] = []
        self.names: dict[Tensor, str] = {}
        self._parameters: list[Tensor] = []
        self._inputs: ForwardInputs | None = None
        self._contributions: dict[Tensor, list[Tensor]] = {}
        self._followed: set[Tensor] = set()

    def update(self) -> bool:
        """Update the parameters' names if the script has changed the parameters.

        Returns:
            Whether the parameters have changed since the last call.
        """
        groups = self._optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        if self.zero is not None:
            parameters = self.zero.parameters
        if [*map(id, parameters)] == [*map(id, self._parameters)]:
            return False
        self._parameters = parameters
        self.models = list(_named_models(parameters))
        self.names = {
            parameter: readers.plain_name(joined(prefix, name))
            for prefix, model in self.models
            for name, parameter in model.named_parameters()
        }
        if readers.partitioning_library(self._optimizer) is None:
            # Parameters that belong to no module, such as a learned temperature.
            for place, parameter in enumerate(parameters):
                self.names.setdefault(parameter, f"parameters[{place}]")
        modules = [model for _, model in self.models]
        self.is_tensor_parallel = any(map(readers.is_tensor_parallel, modules))
        compiled = readers.compiled_modules(modules)
        if self._inputs is not None:
            self._inputs.close()
        self._inputs = ForwardInputs(self.models, lambda: None, lambda each: each not in compiled)
        return True

    @property
    def reads_later(self) -> bool:
        """Whether a closure or DeepSpeed's optimizer computes the gradients inside of the step."""
        return self.has_closure or self.zero is not None

    @property
    def parameter_ids(self) -> set[int]:
        return set(map(id, self._parameters))

    def follow_contributions(self) -> None:
        """Start recording each backward pass's gradients.

        Call this only in the reference. On ranks, the gradients may already be reduced.
        """
        for parameter in self._parameters:
            is_new = parameter not in self._followed and parameter in self.names
            if is_new and parameter.requires_grad and parameter.is_leaf:
                self._followed.add(parameter)
                parameter.register_hook(partial(self._add_contribution, parameter))  # type: ignore[no-untyped-call]

    def _add_contribution(self, parameter: Tensor, gradient: Tensor) -> None:
        values = gradient.detach().double()
        known = self._contributions.get(parameter)
        total, first = (values, values) if known is None else (known[0] + values, known[1])
        self._contributions[parameter] = [total, first, values]

    def take_contributions(self, rank: int) -> list[Part]:
        """Return what the backward passes since the last step added to each gradient.

        A parameter with several backward passes has three parts: the sum of the gradients that they
        added, the first of these gradients, and the last one. Other parameters are left out.
        """
        taken, self._contributions = self._contributions, {}
        if self.has_closure:
            return []  # it clears the gradients before each of its backward passes
        return [
            readers.part(kind, self.names[parameter], each, rank)
            for parameter, values in taken.items()
            if values[0] is not values[1]
            for kind, each in zip(CONTRIBUTIONS, values, strict=True)
        ]

    def figures(self) -> dict[str, Any]:
        """Return the figures that a step's file contains in addition to tensors."""
        assert self._inputs is not None
        fed, samples = self._inputs.taken() if self.steps else (FeedTotals(), [])
        named = [p for p in self._parameters if p in self.names]
        return {
            "lr": [float(group["lr"]) for group in self._optimizer.param_groups],
            "numbers": {
                f"{name}.{key}": value
                for parameter, name in self.names.items()
                for key, state in self._state(parameter)
                if not (isinstance(state, Tensor) and state.ndim)
                and (value := readers.number(state)) is not None
            },
            "order": [readers.plain_name(name) for name in self._inputs.order],
            "fed": vars(fed),
            "samples": samples,
            "parameters": [[(self.names[p], tuple(p.shape)) for p in named]],
        }

    def _state(self, parameter: Tensor) -> Iterator[tuple[str, Any]]:
        """Yield the optimizer's state of a parameter. Collective for DeepSpeed's optimizers."""
        if self.zero is not None:
            yield from self.zero.state(parameter)
        else:
            for key, state in self._optimizer.state.get(parameter, {}).items():
                if key != "prev_loss":  # LBFGS stores the loss of this rank's rows
                    yield key, state

    def read_gradients(self, rank: int) -> Iterator[Part]:
        """Yield each trained parameter's full gradient."""
        with readers.full_parameters(model for _, model in self.models):
            for parameter in self._parameters:
                if self.zero is not None:
                    values = self.zero.gradient(parameter)
                else:
                    values = readers.gradient(parameter, self._optimizer)
                if values is not None and parameter in self.names:
                    values = readers.gathered(values, parameter)
                    # Copy, because FSDP1 frees the full gradients at the end of the block.
                    yield readers.part("gradient", self.names[parameter], values, rank)

    def read_state(self, rank: int) -> Iterator[Part]:
        """Yield parameters, optimizer state and buffers."""
        with readers.full_parameters(model for _, model in self.models) as is_split:
            for parameter, name in self.names.items():
                whole = parameter.detach() if self.zero is None else self.zero.value(parameter)
                values = readers.gathered(whole, parameter)
                yield readers.part("model", name, values, rank)
                for key, state in self._state(parameter):
                    is_tensor = isinstance(state, Tensor) and state.ndim
                    if is_tensor and not is_split and readers.can_be_recorded(state):
                        values = readers.gathered(state, parameter)
                        yield readers.part("optimizer", f"{name}.{key}", values, rank)
        for each in other_tensors(self.models, rank):
            if each.kind != BUFFER:
                continue  # FSDP1 leaves tensors without memory in attributes
            yield Part(each.kind, readers.plain_name(each.name), each.values, copy=rank)
