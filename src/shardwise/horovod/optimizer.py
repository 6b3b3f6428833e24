"""`hvd.DistributedOptimizer`: steps the user's optimizer on gradients of all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn, optim

from shardwise.errors import BadCall, HookOrder
from shardwise.horovod import script_checks
from shardwise.horovod.allreduce import grouped_allreduce_async_
from shardwise.horovod.buckets import ReductionOptions, make_buckets
from shardwise.horovod.compression import Compression, Compressor
from shardwise.horovod.context import current
from shardwise.horovod.gradient_hooks import GradientHooks, release
from shardwise.horovod.operations import ReduceOp, wait
from shardwise.horovod.process_sets import ProcessSet, global_process_set
from shardwise.horovod.sparse_allreduce import sparse_parameters
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.timeline import span

Named = Iterable[tuple[str, nn.Parameter]]
Groups = int | Sequence[Sequence[nn.Parameter]] | None


class ReducingOptimizer(optim.Optimizer):
    """Base class that a DistributedOptimizer puts before the user's own class.

    `_gradient_hooks` is None where there is no other rank to reduce with.
    """

    _gradient_hooks: GradientHooks | None
    _make_hooks: Callable[[optim.Optimizer], GradientHooks | None]
    _synchronized: bool
    _skips_synchronize: bool
    _opt_called: bool

    def synchronize(self) -> None:
        """Wait until every `param.grad` is reduced over all ranks: for clipping by hand, before
        `with optimizer.skip_synchronize(): optimizer.step()`."""
        if self._gradient_hooks is not None:
            with span("synchronize"):
                self._gradient_hooks.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` inside the block take gradients as they are, since `synchronize` was
        called."""
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the reduced gradients, and update. A `closure` computes them first, each time
        that the optimizer calls it."""
        self._opt_called = True  # by which torch's schedulers know that a step came before theirs
        if closure is not None:
            loss = super().step(partial(self._evaluate, closure))
            current().stepped()
            return loss
        if not self._skips_synchronize and self._synchronized and not self._started:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after "
                "optimizer.synchronize(): gradients are reduced already, and not once more. Write "
                "with optimizer.skip_synchronize(): optimizer.step().",
                stacklevel=2,
            )
        elif not self._skips_synchronize:
            self.synchronize()
        self._synchronized = False
        with span("update"):
            super().step()
        current().stepped()
        return None

    def step_alone(self) -> None:
        """Run the step of the user's own class on gradients as they are, without communication."""
        super().step()

    # LRScheduler would wrap `step` on the instance, where it would hide a class set later.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def _started(self) -> bool:
        """Whether a backward has come since gradients were reduced."""
        return self._gradient_hooks is not None and self._gradient_hooks.started

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        if not self._skips_synchronize:
            self.synchronize()
            self._synchronized = False
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero gradients as the user's class does. Raises HookOrder between backward and step,
        while reductions are in flight."""
        if self._started:
            raise HookOrder(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(), while gradients are in flight."
            )
        self._synchronized = False
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backwards before each `step`, whose gradients are added up."""
        if self._gradient_hooks is not None:
            self._gradient_hooks.set_passes(_checked_passes(passes))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its parameters are reduced too."""
        if self._started:
            raise HookOrder("add_param_group between backward and step: call it after the step.")
        super().add_param_group(param_group)
        if self._gradient_hooks is not None:
            passes = self._gradient_hooks.passes
            self._gradient_hooks.detach()
            self._gradient_hooks = self._make_hooks(self)
            self.set_backward_passes_per_step(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state as torch does, and reset the counts of gradients."""
        super().load_state_dict(state_dict)
        self._synchronized = False
        if self._gradient_hooks is not None and not self._gradient_hooks.started:
            self._gradient_hooks.forget()


def DistributedOptimizer(  # noqa: N802 (its name in Horovod)
    optimizer: optim.Optimizer,
    named_parameters: Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Change the class of `optimizer` to one that reduces gradients over all ranks; returns it.

    Gradients are reduced during backward, in flat buckets (`--bucket-mb`), each once
    `backward_passes_per_step` backwards have added to all of it; `op` says what becomes of them:
    hvd.Average divides the sum by the number of ranks only. `compression` is hvd.Compression.fp16
    or a class of your own. `groups`, lists of parameters or a number of them, travel in one
    operation each. `gradient_predivide_factor` divides before the sum what it multiplies after it.
    A sparse gradient, of an nn.Embedding(sparse=True), travels as its rows, as it is; with
    `sparse_as_dense` it is dense on its options, and sparse for the update. With hvd.Adasum what
    each rank's own step changes is joined instead. A parameter has one such optimizer: the newest,
    after which `step` of the one before raises HookOrder.

    Raises BadCall for names that are missing or twice, and for options that cannot be.
    """
    op = ReduceOp(op)
    if gradient_predivide_factor != 1.0 and op != ReduceOp.Average:
        raise BadCall("gradient_predivide_factor is for op=hvd.Average.")
    passes = _checked_passes(backward_passes_per_step)
    named = _named_parameters(optimizer, named_parameters)
    assigned = _group_numbers(named, num_groups if groups is None else groups)
    options = ReductionOptions(
        op=op,
        scale=(1.0 / gradient_predivide_factor, gradient_predivide_factor),
        process_set=process_set,
        compression=compression,
        narrow=compression is Compression.fp16,
        sparse_as_dense=sparse_as_dense,
    )
    name = _next_name(process_set)
    alone = not process_set.included() or process_set.size() == 1
    if op == ReduceOp.Adasum and not alone:
        _change_class(optimizer, AdasumOptimizer)
        release([entry.parameter for entry in named])
        optimizer.__dict__.update(_named=named, _reduction_options=options, _name=name)
        return optimizer
    names = {entry.parameter: entry.name for entry in named}

    def make(optimizer: optim.Optimizer) -> GradientHooks | None:
        return None if alone else _hooks_on(optimizer, names, assigned, options, name, passes)

    _change_class(optimizer, ReducingOptimizer)
    optimizer.__dict__.update(_make_hooks=make, _synchronized=False, _skips_synchronize=False)
    optimizer.__dict__["_parameter_names"] = names  # scripts of Horovod's read it
    optimizer.__dict__["_gradient_hooks"] = make(optimizer)
    return optimizer


def _hooks_on(
    optimizer: optim.Optimizer,
    names: dict[nn.Parameter, str],
    assigned: dict[nn.Parameter, int],
    options: ReductionOptions,
    name: str,
    passes: int,
) -> GradientHooks:
    """Hooks on the present parameters of `optimizer`; those added later have no names yet."""
    context = current()
    named = [
        NamedParameter(names.get(param, f"{group}.{place}"), param)
        for group, options in enumerate(optimizer.param_groups)
        for place, param in enumerate(options["params"])
        if param.requires_grad
    ]
    numbers = [assigned.get(entry.parameter, 0) for entry in named]
    capacity = int(context.world.settings.bucket_mb * 2**20)
    found = make_buckets(named, numbers, sparse_parameters(optimizer), capacity, options, name)

    owner = ref(optimizer)

    def note() -> dict[str, str]:
        averages, alive = options.op == ReduceOp.Average, owner()
        if alive is None:
            return {}
        return script_checks.describe_rank(alive, averages=averages, asked_size=context.asked_size)

    release([entry.parameter for entry in named])
    return GradientHooks(named, found, passes, note)


def _change_class(optimizer: optim.Optimizer, kind: type[optim.Optimizer]) -> None:
    """Change the class of `optimizer` to one derived from `kind` and its own class."""
    own = type(optimizer)
    if issubclass(own, ReducingOptimizer | AdasumOptimizer):
        raise BadCall("This optimizer is a DistributedOptimizer already.")
    optimizer.__dict__.pop("step", None)  # what a scheduler has put before the class's
    optimizer.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})


def _named_parameters(optimizer: optim.Optimizer, given: Named | None) -> list[NamedParameter]:
    """The parameters of the optimizer, with their names."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if given is None:
        return [NamedParameter(f"noname.{index}", param) for index, param in enumerate(params)]
    pairs = list(given)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise BadCall(
            "named_parameters takes pairs of a name and a parameter, such as "
            "model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise BadCall(f"named_parameters has these names twice: {', '.join(twice)}.")
    names = {param: name for name, param in pairs}
    missing = [param for param in params if param not in names]
    if missing:
        shapes = ", ".join(str(tuple(param.shape)) for param in missing[:5])
        raise BadCall(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters, of shape "
            f"{shapes}: give those of all models that it trains."
        )
    return [NamedParameter(names[param], param) for param in params]


def _group_numbers(named: Sequence[NamedParameter], groups: Groups) -> dict[nn.Parameter, int]:
    """The group number of each parameter, from 1 on; 0 without groups."""
    if isinstance(groups, int):
        if groups < 0:
            raise BadCall(f"a number of groups is 0 or more, not {groups}.")
        count = len(named)
        numbers = [1 + index * groups // count if groups else 0 for index in range(count)]
        return {entry.parameter: n for entry, n in zip(named, numbers, strict=True)}
    found: dict[nn.Parameter, int] = {}
    known: set[Tensor] = {entry.parameter for entry in named}
    for number, group in enumerate(groups or (), start=1):
        for param in group:
            if param not in known or param in found:
                raise BadCall(
                    f"groups: a parameter of shape {tuple(param.shape)} is in two of them, or not "
                    "the optimizer's."
                )
            found[param] = number
    return found


def _next_name(process_set: ProcessSet) -> str:
    """The name of the next optimizer of a process set; all its ranks count alike."""
    numbers, of_set = current().counters, f"DistributedOptimizer.{process_set.number()}"
    numbers[of_set] += process_set.included()
    return f"{of_set}.{numbers[of_set]}"


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise BadCall(f"backward_passes_per_step is 1 or more, not {passes}.")
    return passes


class AdasumOptimizer(optim.Optimizer):
    """Base class for op=hvd.Adasum: each rank steps by itself, then Adasum joins the changes."""

    _named: Sequence[NamedParameter]
    _reduction_options: ReductionOptions
    _name: str
    _opt_called: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's own gradients, then replace each parameter's change by the Adasum of
        all ranks' changes."""
        self._opt_called = True
        params = [entry.parameter for entry in self._named if entry.parameter.requires_grad]
        before = [param.detach().clone() for param in params]
        loss = super().step(closure)
        with torch.no_grad():
            changes = [param - old for param, old in zip(params, before, strict=True)]
            packed = [self._reduction_options.compression.compress(change) for change in changes]
            sent = [tensor for tensor, _ in packed]
            process_set = self._reduction_options.process_set
            wait(
                grouped_allreduce_async_(
                    sent, None, self._name, ReduceOp.Adasum, process_set=process_set
                )
            )
            for param, old, (tensor, context) in zip(params, before, packed, strict=True):
                param.copy_(old + self._reduction_options.compression.decompress(tensor, context))
        current().stepped()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def step_alone(self) -> None:
        """Run the step of the user's own class without communication."""
        super().step()

    def synchronize(self) -> None:
        """Do nothing: gradients stay each rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise HookOrder, as Horovod does."""
        raise HookOrder("optimizer.skip_synchronize() with Adasum: its step is what is joined.")
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: `step` takes what the backwards have added up."""
