"""Records one rank of a stock script, or its reference, by hooks on torch.

Every step of an optimizer is written as `shardwise.world.tensor_log` writes those of an engine:
losses, gradients just before the update, parameters, buffers and optimizer state after it, learning
rates. stock.facts has the facts that causes are recognised by.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
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
from shardwise.model.module_records import ForwardInputs, joined, other_tensors
from shardwise.tools.verify.outside import _named_models
from shardwise.tools.verify.stock import alterations, readers
from shardwise.tools.verify.stock.batches import BatchRecorder, BatchReplay, LoaderKeys
from shardwise.tools.verify.stock.script_facts import ScriptFacts
from shardwise.world.tensor_log import FeedTotals, Part, TensorLog

VARIABLE = "SHARDWISE_VERIFY_STOCK"
"""JSON: record (folder), steps, reference (whether this is the one process), replay (folder of
the ranks' records or None), wide (whether it runs in fp64), alter (see alterations.py)."""
CONTRIBUTIONS = ("contributions", "first contribution", "last contribution")
"""Kinds of tensors: what all backwards of a step added to a gradient, the first one, the last."""


def start() -> None:
    """Record this process from now on, unless another process records this rank already."""
    request = json.loads(os.environ[VARIABLE])
    rank = 0 if request["reference"] else readers.rank()
    folder = Path(request["record"]) / f"rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # The first process of a rank that imports torch is the script. Its own subprocesses
        # inherit the variables, and must not record as well.
        (folder / "claimed").touch(exist_ok=False)
    except FileExistsError:
        return
    StockRecorder(request, rank, folder).follow()


class StockRecorder:
    """Records the optimizers, losses and loaders of one process."""

    def __init__(self, request: dict[str, Any], rank: int, folder: Path) -> None:
        self._request, self._rank, self._folder = request, rank, folder
        self._pid = os.getpid()
        self._environment = dict(os.environ)
        self._log = TensorLog(Path(request["record"]), rank)
        self._batches = BatchRecorder(folder)
        self._replay: BatchReplay | None = None
        self._optimizers: dict[int, FollowedOptimizer] = {}
        self._depth = 0
        self._is_in_backward = False
        self._losses: list[dict[str, Any]] = []
        self._events: list[list[str]] = [[]]
        self._rates: list[list[float]] = []
        self._is_done = False
        self._script_facts = ScriptFacts(
            lambda: self._is_here and not self._is_done,
            lambda: (self._replay or self._batches).evaluated,
            lambda event: self._events[-1].append(event),
            lambda: len(self._events) - 1,
        )

    @property
    def _is_here(self) -> bool:
        """Whether this is the process that records, and not a forked child of it."""
        return os.getpid() == self._pid

    def follow(self) -> None:
        """Record from now on."""
        if self._request["wide"]:
            torch.set_default_dtype(torch.float64)
        keys = LoaderKeys()
        keys.follow()
        if self._request["replay"]:
            self._replay = BatchReplay(Path(self._request["replay"]), self._request["wide"])
            self._replay.follow()
        else:
            self._batches.follow()
        self._follow_losses()
        self._follow_events()
        self._script_facts.follow()
        # Alterations come first, so that gradients are recorded as the optimizer uses them.
        alterations.apply(self._request["alter"])
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._leave)

    # -- what is noted ----------------------------------------------------------------------

    def _follow_losses(self) -> None:
        """Note the value and the terms of everything that backward is called on."""
        backward: Callable[..., Any] = torch.autograd.backward  # Tensor.backward calls it, too

        @wraps(backward)
        def noted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_in_backward or not self._is_here:
                return backward(tensors, *args, **kwargs)
            losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
            for loss in losses:
                if loss.numel() == 1:
                    self._losses.append(_described(loss))
            self._events[-1].append("backward")
            self._is_in_backward = True
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                self._is_in_backward = False

        torch.autograd.backward = noted

    def _follow_events(self) -> None:
        """Note the order of clipping, unscaling and schedulers between two steps."""
        self._note_calls(nn.utils.clip_grad, "clip_grad_norm_", "clip")
        nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_
        self._note_calls(nn.utils, "clip_grads_with_norm_", "clip")
        self._note_calls(torch.amp.GradScaler, "unscale_", "unscale")
        kinds = {each for each in vars(optim.lr_scheduler).values() if isinstance(each, type)}
        for kind in kinds:
            if "step" in vars(kind):  # some override the base class's
                self._note_calls(kind, "step", "schedule")
        self._note_calls(torch.utils.data.DistributedSampler, "set_epoch", "set_epoch")

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

    # -- steps ------------------------------------------------------------------------------

    def _before_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not self._is_here or self._is_done:
            return  # an optimizer inside of another one, such as in ZeroRedundancyOptimizer
        followed = self._optimizers.get(id(optimizer))
        if followed is None:
            followed = FollowedOptimizer(optimizer, len(self._optimizers))
            if self._request["reference"]:
                followed.follow_contributions()
            self._optimizers[id(optimizer)] = followed
            self._script_facts.know(followed.models, followed.names)
        if not followed.names:
            return
        with torch.no_grad():
            followed.gradients = list(followed.read_gradients(self._rank))
            if not followed.steps:
                self._write(followed, [], {})

    def _after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        followed = self._optimizers.get(id(optimizer))
        if self._depth or not self._is_here or self._is_done or followed is None:
            return
        if not followed.names:
            return
        followed.steps += 1
        self._rates.append([float(group["lr"]) for group in optimizer.param_groups])
        losses, self._losses = self._losses, []
        batches = self._batches.count_since_step()
        self._events.append([])
        value = math.fsum(each["value"] for each in losses)
        with torch.no_grad():
            self._write(
                followed, followed.gradients, {"loss": value, "terms": losses, "batches": batches}
            )
        first = next(iter(self._optimizers.values()))
        if followed is first and followed.steps >= self._request["steps"]:
            self._is_done = True
            self._leave()
            # All ranks make the same step now, so none waits for this one. Exit handlers of
            # the script's libraries would wait for ranks that are gone.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

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
        """Write the facts. Runs once, at the end of the script or after the last step."""
        path = self._folder / "stock.facts"
        if not self._is_here or path.exists():
            return
        trained = [
            [name for p, name in each.names.items() if p.requires_grad]
            for each in self._optimizers.values()
        ]
        facts = {
            "driver": "plain" if any(each.steps for each in self._optimizers.values()) else "",
            "world_size": readers.world_size(),
            "argv": sys.orig_argv[1:],
            "environment": self._environment,
            "libraries": sorted(readers.LIBRARIES & sys.modules.keys()),
            "loaders": self._batches.loaders,
            "seen": self._batches.seen,
            "events": self._events,
            "rates": self._rates,
            "trained": trained,
            "tensor_parallel": any(each.is_tensor_parallel for each in self._optimizers.values()),
            "ended_itself": not self._is_done,
            **self._script_facts.plain(),
        }
        path.with_suffix(".part").write_text(json.dumps(facts))
        os.replace(path.with_suffix(".part"), path)


def _describe_clip(result: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> str:
    """Return the norm that gradients had, the largest that they may have, and their number."""
    # clip_grads_with_norm_ returns nothing, and is given the norm.
    norm = (args[0] if args else kwargs.get("total_norm")) if result is None else result
    values = [readers.number(each) for each in (norm, max_norm)]
    if None in values:
        return ""
    count = len(parameters) if isinstance(parameters, list) else 1
    if result is not None and float(kwargs.get("norm_type", args[0] if args else 2)) != 2:
        count = 0  # other norms are not compared with the length of the gradients
    return f" {values[0]!r} {values[1]!r} {count}"


def _described(loss: Tensor) -> dict[str, Any]:
    """Return the value of a loss, what its graph shows that it is a mean over, and the factor that
    the script multiplied that mean by, such as 1/4 for four micro-batches."""
    terms = loss_terms.read(loss, None)
    main = terms.main
    return {
        "value": float(loss.detach()),
        "source": None if main is None else main.source,
        # A sum divided by a number may be divided by that of all ranks, or by a constant.
        "items": None if main is None or terms.guessed else readers.number(main.items),
        "factor": _root_factor(loss),
        "words": terms.describe(),
        "addends": _count_addends(loss),
    }


def _count_addends(loss: Tensor) -> int:
    """Return the number of terms of a loss that is a sum at its root: 2 for a + b, else 1."""
    node = loss.grad_fn
    if node is None or type(node).__name__ != "AddBackward0":
        return 1
    return len([each for each, _ in node.next_functions if each is not None])


def _root_factor(loss: Tensor) -> float:
    """Return the product of the constants that a loss was multiplied by, or divided by, last."""
    node, factor = loss.grad_fn, 1.0
    while node is not None and type(node).__name__ in ("MulBackward0", "DivBackward0"):
        other = readers.number(getattr(node, "_saved_other", None))
        if other is None or not other:
            break
        factor = factor * other if type(node).__name__ == "MulBackward0" else factor / other
        node = node.next_functions[0][0]
    return factor


class FollowedOptimizer:
    """An optimizer, and the names that its parameters have in the outermost modules."""

    def __init__(self, optimizer: optim.Optimizer, number: int) -> None:
        self._optimizer = optimizer
        self.number = number
        self.steps = 0
        self.gradients: list[Part] = []
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.models = list(_named_models(parameters))
        self.names: dict[Tensor, str] = {
            parameter: readers.plain_name(joined(prefix, name))
            for prefix, model in self.models
            for name, parameter in model.named_parameters()
        }
        self._parameters = [p for p in parameters if p in self.names]
        self.is_tensor_parallel = any(readers.is_tensor_parallel(model) for _, model in self.models)
        self._inputs = ForwardInputs(self.models, lambda: None)
        self._contributions: dict[Tensor, list[Tensor]] = {}

    def follow_contributions(self) -> None:
        """Keep what each backward adds to a gradient. Ranks reduce it, so for one process only."""
        for parameter in self._parameters:
            if parameter.requires_grad and parameter.is_leaf:
                parameter.register_hook(partial(self._add_contribution, parameter))

    def _add_contribution(self, parameter: Tensor, gradient: Tensor) -> None:
        values = gradient.detach().double()
        known = self._contributions.get(parameter)
        total, first = (values, values) if known is None else (known[0] + values, known[1])
        self._contributions[parameter] = [total, first, values]

    def take_contributions(self, rank: int) -> list[Part]:
        """Return the sum of what the backwards since the last step added, the first and the last of
        it, if there were several."""
        taken, self._contributions = self._contributions, {}
        return [
            readers.part(kind, self.names[parameter], each, rank)
            for parameter, values in taken.items()
            if values[0] is not values[1]
            for kind, each in zip(CONTRIBUTIONS, values, strict=True)
        ]

    def figures(self) -> dict[str, Any]:
        """Return what a step's file has next to tensors."""
        fed, samples = self._inputs.taken() if self.steps else (FeedTotals(), [])
        return {
            "lr": [float(group["lr"]) for group in self._optimizer.param_groups],
            "numbers": {
                f"{name}.{key}": value
                for parameter, name in self.names.items()
                for key, state in self._optimizer.state.get(parameter, {}).items()
                if (value := readers.number(state)) is not None
            },
            "order": [readers.plain_name(name) for name in self._inputs.order],
            "fed": vars(fed),
            "samples": samples,
            "dtypes": sorted({str(p.grad.dtype) for p in self._parameters if p.grad is not None}),
            "parameters": [[(self.names[p], tuple(p.shape)) for p in self._parameters]],
        }

    def read_gradients(self, rank: int) -> Iterator[Part]:
        """Yield the whole gradient of each trained parameter."""
        with readers.full_parameters(model for _, model in self.models):
            for parameter in self._parameters:
                gradient = readers.gradient(parameter)
                if gradient is not None:
                    # A copy: at the end of the block FSDP1 frees the full gradients.
                    yield readers.part("gradient", self.names[parameter], gradient.clone(), rank)

    def read_state(self, rank: int) -> Iterator[Part]:
        """Yield parameters, optimizer state and buffers."""
        with readers.full_parameters(model for _, model in self.models) as is_split:
            for parameter, name in self.names.items():
                yield readers.part("model", name, parameter.detach().clone(), rank)
                for key, state in self._optimizer.state.get(parameter, {}).items():
                    if isinstance(state, Tensor) and state.ndim and not is_split:
                        yield readers.part("optimizer", f"{name}.{key}", state, rank)
        for each in other_tensors(self.models, rank):
            yield Part(each.kind, readers.plain_name(each.name), each.values, copy=rank)
