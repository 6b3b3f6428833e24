"""`hvd.DistributedOptimizer`: the user's optimizer, stepping on gradients of all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn, optim

from shardwise.errors import BadCall, HookOrder
from shardwise.horovod import habits
from shardwise.horovod.adasum_optimizer import AdasumSteps
from shardwise.horovod.asking import ReduceOp
from shardwise.horovod.buckets import Way, parcels
from shardwise.horovod.compression import Compression, Compressor
from shardwise.horovod.context import current
from shardwise.horovod.gradients import Gradients, release
from shardwise.horovod.process_sets import ProcessSet, global_process_set
from shardwise.horovod.sparse_allreduce import known_sparse
from shardwise.states.tracked import Tracked
from shardwise.timeline import span

Named = Iterable[tuple[str, nn.Parameter]]
Groups = int | Sequence[Sequence[nn.Parameter]] | None


class ReducedSteps(optim.Optimizer):
    """What a DistributedOptimizer has before the user's own class. `_gradients` is None where
    there is nobody to reduce with."""

    _gradients: Gradients | None
    _make: Callable[[optim.Optimizer], Gradients | None]
    _synchronized: bool
    _skips: bool
    _opt_called: bool

    def synchronize(self) -> None:
        """Return when every `param.grad` is reduced over all ranks: for clipping by hand, before
        `with optimizer.skip_synchronize(): optimizer.step()`."""
        if self._gradients is not None:
            with span("synchronize"):
                self._gradients.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside the block `step` takes gradients as they are: `synchronize` was called."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the reduced gradients, and update. A `closure` makes them first, each time that
        the optimizer calls it."""
        self._opt_called = True  # by which torch's schedulers know that a step came before theirs
        if closure is not None:
            loss = super().step(partial(self._evaluate, closure))
            current().stepped()
            return loss
        if not self._skips and self._synchronized and not self._begun:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after "
                "optimizer.synchronize(): gradients are reduced already, and not once more. Write "
                "with optimizer.skip_synchronize(): optimizer.step().",
                stacklevel=2,
            )
        elif not self._skips:
            self.synchronize()
        self._synchronized = False
        with span("update"):
            super().step()
        current().stepped()
        return None

    def step_alone(self) -> None:
        """The step of the user's own class, on gradients as they are."""
        super().step()

    # LRScheduler would wrap `step` on the instance, where it would hide a class set later.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def _begun(self) -> bool:
        """Whether a backward has come since gradients were reduced."""
        return self._gradients is not None and self._gradients.begun

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        if not self._skips:
            self.synchronize()
            self._synchronized = False
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the user's class has it. Raises HookOrder between backward and step, where gradients
        travel."""
        if self._begun:
            raise HookOrder(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(), while gradients are on their way."
            )
        self._synchronized = False
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on `step` comes after so many backwards, whose gradients are added up."""
        if self._gradients is not None:
            self._gradients.set_passes(_checked(passes))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters are reduced too."""
        if self._begun:
            raise HookOrder("add_param_group between backward and step: call it after the step.")
        super().add_param_group(param_group)
        if self._gradients is not None:
            passes = self._gradients.passes
            self._gradients.detach()
            self._gradients = self._make(self)
            self.set_backward_passes_per_step(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; gradients count from the beginning."""
        super().load_state_dict(state_dict)
        self._synchronized = False
        if self._gradients is not None and not self._gradients.begun:
            self._gradients.forget()


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
    """`optimizer` itself, from now on of a class that reduces gradients over all ranks.

    They travel while backward goes on, in flat buckets (`--bucket-mb`), each once
    `backward_passes_per_step` backwards have added to all of it; `op` says what becomes of them:
    hvd.Average divides the sum by the number of ranks only. `compression` is hvd.Compression.fp16
    or a class of your own. `groups`, lists of parameters or a number of them, travel in one
    operation each. `gradient_predivide_factor` divides before the sum what it multiplies after it.
    A sparse gradient, of an nn.Embedding(sparse=True), travels as its rows, as it is; with
    `sparse_as_dense` it is dense on its way, and sparse for the update. With hvd.Adasum what
    each rank's own step changes is joined instead. A parameter has one such optimizer: the newest,
    after which `step` of the one before raises HookOrder.

    Raises BadCall for names that are missing or twice, and for options that cannot be.
    """
    op = ReduceOp(op)
    if gradient_predivide_factor != 1.0 and op != ReduceOp.Average:
        raise BadCall("gradient_predivide_factor is for op=hvd.Average.")
    passes = _checked(backward_passes_per_step)
    forms = _forms(optimizer, named_parameters)
    assigned = _assigned(forms, num_groups if groups is None else groups)
    way = Way(
        op=op,
        scale=(1.0 / gradient_predivide_factor, gradient_predivide_factor),
        process_set=process_set,
        compression=compression,
        narrow=compression is Compression.fp16,
        sparse_as_dense=sparse_as_dense,
    )
    name = _numbered(process_set)
    alone = not process_set.included() or process_set.size() == 1
    if op == ReduceOp.Adasum and not alone:
        _become(optimizer, AdasumSteps)
        release([form.parameter for form in forms])
        optimizer.__dict__.update(_forms=forms, _way=way, _name=name)
        return optimizer
    names = {form.parameter: form.name for form in forms}

    def make(optimizer: optim.Optimizer) -> Gradients | None:
        return None if alone else _watched(optimizer, names, assigned, way, name, passes)

    _become(optimizer, ReducedSteps)
    optimizer.__dict__.update(_make=make, _synchronized=False, _skips=False)
    optimizer.__dict__["_parameter_names"] = names  # scripts of Horovod's read it
    optimizer.__dict__["_gradients"] = make(optimizer)
    return optimizer


def _watched(
    optimizer: optim.Optimizer,
    names: dict[nn.Parameter, str],
    assigned: dict[nn.Parameter, int],
    way: Way,
    name: str,
    passes: int,
) -> Gradients:
    """The gradients of what `optimizer` has now; parameters that came later have no names yet."""
    context = current()
    forms = [
        Tracked(names.get(param, f"{group}.{place}"), param)
        for group, options in enumerate(optimizer.param_groups)
        for place, param in enumerate(options["params"])
        if param.requires_grad
    ]
    numbers = [assigned.get(form.parameter, 0) for form in forms]
    capacity = int(context.world.settings.bucket_mb * 2**20)
    found = parcels(forms, numbers, known_sparse(optimizer), capacity, way, name)

    owner = ref(optimizer)

    def note() -> dict[str, str]:
        averages, alive = way.op == ReduceOp.Average, owner()
        if alive is None:
            return {}
        return habits.note(alive, averages=averages, asked_size=context.asked_size)

    release([form.parameter for form in forms])
    return Gradients(forms, found, passes, note)


def _become(optimizer: optim.Optimizer, kind: type[optim.Optimizer]) -> None:
    """Let `optimizer` be of a class that is `kind` before its own."""
    own = type(optimizer)
    if issubclass(own, ReducedSteps | AdasumSteps):
        raise BadCall("This optimizer is a DistributedOptimizer already.")
    optimizer.__dict__.pop("step", None)  # what a scheduler has put before the class's
    optimizer.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})


def _forms(optimizer: optim.Optimizer, named: Named | None) -> list[Tracked]:
    """The parameters of the optimizer, with their names."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if named is None:
        return [Tracked(f"noname.{index}", param) for index, param in enumerate(params)]
    pairs = list(named)
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
    return [Tracked(names[param], param) for param in params]


def _assigned(forms: Sequence[Tracked], groups: Groups) -> dict[nn.Parameter, int]:
    """By parameter the number of its group, from 1 on."""
    if isinstance(groups, int):
        if groups < 0:
            raise BadCall(f"a number of groups is 0 or more, not {groups}.")
        count = len(forms)
        numbers = [1 + index * groups // count if groups else 0 for index in range(count)]
        return {form.parameter: n for form, n in zip(forms, numbers, strict=True)}
    found: dict[nn.Parameter, int] = {}
    known: set[Tensor] = {form.parameter for form in forms}
    for number, group in enumerate(groups or (), start=1):
        for param in group:
            if param not in known or param in found:
                raise BadCall(
                    f"groups: a parameter of shape {tuple(param.shape)} is in two of them, or not "
                    "the optimizer's."
                )
            found[param] = number
    return found


def _numbered(process_set: ProcessSet) -> str:
    """The name of the next optimizer of a process set, whose ranks all make it."""
    numbers, of_set = current().numbers, f"DistributedOptimizer.{process_set.number()}"
    numbers[of_set] += process_set.included()
    return f"{of_set}.{numbers[of_set]}"


def _checked(passes: int) -> int:
    if passes < 1:
        raise BadCall(f"backward_passes_per_step is 1 or more, not {passes}.")
    return passes
