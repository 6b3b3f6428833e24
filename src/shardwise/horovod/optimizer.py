"""Implements `hvd.DistributedOptimizer`, which steps an optimizer with gradients from all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn, optim

from shardwise.errors import BadCall, HookOrder
from shardwise.horovod import script_checks
from shardwise.horovod.allreduce import grouped_allreduce_async_
from shardwise.horovod.compression import Compression, Compressor
from shardwise.horovod.context import current
from shardwise.horovod.gradient_buckets import GradientHooks, ReductionOptions, make_buckets
from shardwise.horovod.operations import ReduceOp, wait
from shardwise.horovod.process_sets import ProcessSet, global_process_set
from shardwise.horovod.sparse_allreduce import sparse_parameters
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.timeline import span

Named = Iterable[tuple[str, nn.Parameter]]
Groups = int | Sequence[Sequence[nn.Parameter]] | None


class ReducingOptimizer(optim.Optimizer):
    """Mixin that a DistributedOptimizer places before the user's own class.

    `_gradient_hooks` is None if there is only one rank.
    """

    _gradient_hooks: GradientHooks | None
    _make_hooks: Callable[[optim.Optimizer], GradientHooks | None]
    _synchronized: bool
    _skips_synchronize: bool
    _opt_called: bool

    def synchronize(self) -> None:
        """Wait until every `param.grad` is reduced across all ranks.

        Example:
            ```python
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            ```
        """
        if self._gradient_hooks is not None:
            with span("synchronize"):
                self._gradient_hooks.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` use the current gradients inside the block. Call `synchronize` first."""
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the reduced gradients, and update the parameters.

        Args:
            closure: Computes the loss and its gradients. The optimizer may call it several times.

        Returns:
            The result of `closure`, or None.
        """
        self._opt_called = True  # torch's schedulers warn if they step before this is set
        if closure is not None:

            def evaluate() -> Any:
                loss = closure()
                if not self._skips_synchronize:
                    self.synchronize()
                    self._synchronized = False
                return loss

            loss = super().step(evaluate)
            current().stepped()
            return loss
        if not self._skips_synchronize and self._synchronized and not self._started:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after "
                "optimizer.synchronize(): gradients are already reduced, and are not reduced "
                "again. Write with optimizer.skip_synchronize(): optimizer.step().",
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
        """Run the wrapped optimizer's own `step()`, without communication."""
        super().step()

    # LRScheduler wraps `step` on the instance unless it has this mark. A wrapper would hide the
    # `step` of the class that DistributedOptimizer sets later.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def _started(self) -> bool:
        """True if a backward pass has run since the last reduction."""
        return self._gradient_hooks is not None and self._gradient_hooks.started

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients as the user's class does.

        Raises HookOrder if called between backward and step, while reductions are in flight.
        """
        if self._started:
            raise HookOrder(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(), while gradients are being reduced. "
                "Call it after the step, or before the backward."
            )
        self._synchronized = False
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each `step`. Their gradients are summed."""
        if self._gradient_hooks is not None:
            self._gradient_hooks.set_passes(_check_passes(passes))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as torch does. The gradients of its parameters are reduced too."""
        if self._started:
            raise HookOrder(
                "add_param_group was called between backward and step: call it after the step."
            )
        super().add_param_group(param_group)
        if self._gradient_hooks is not None:
            passes = self._gradient_hooks.passes
            self._gradient_hooks.detach()
            self._gradient_hooks = self._make_hooks(self)
            self.set_backward_passes_per_step(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state as torch does, and reset the gradient counters."""
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
    """Change the class of an optimizer to one that reduces gradients across all ranks.

    Gradients are reduced during the backward pass in flat buckets (`--bucket-mb`). A bucket is sent
    when `backward_passes_per_step` backward passes have computed all of its gradients. If several
    DistributedOptimizers share a parameter, it belongs to the newest one, and calling `step` on an
    older one raises HookOrder.

    Args:
        optimizer: Any torch optimizer.
        named_parameters: Pairs of name and parameter, such as model.named_parameters().
        compression: hvd.Compression.none, hvd.Compression.fp16, or your own class.
        backward_passes_per_step: Number of backward passes whose gradients are summed before a
            `step`.
        op: hvd.Average divides the sum by the number of ranks, while hvd.Sum does not. With
            hvd.Adasum, each rank steps independently, and Adasum combines the parameters' changes.
        gradient_predivide_factor: Divides gradients before the sum and multiplies them after it.
        num_groups: Number of parameter groups to form. Each group is sent in one operation.
        groups: Lists of parameters that form groups. Replaces `num_groups`.
        sparse_as_dense: Send sparse gradients as dense ones. By default, only the rows that were
            used are sent of the gradients of nn.Embedding(sparse=True).
        process_set: The ranks to reduce across.

    Returns:
        The same optimizer.

    Raises:
        BadCall: If names are missing or duplicate, or if options are incompatible.

    Example:
        ```python
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters()
        )
        ```
    """
    op = ReduceOp(op)
    if gradient_predivide_factor != 1.0 and op != ReduceOp.Average:
        raise BadCall(
            f"gradient_predivide_factor={gradient_predivide_factor} needs op=hvd.Average, not "
            f"hvd.{op.name}: leave one of them out."
        )
    passes = _check_passes(backward_passes_per_step)
    named = _named_parameters(optimizer, named_parameters)
    assigned = _group_numbers(named, num_groups if groups is None else groups)
    options = ReductionOptions(
        op=op,
        scale=(1.0 / gradient_predivide_factor, gradient_predivide_factor),
        process_set=process_set,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
    )
    # All ranks of a process set count the same optimizers, so the n-th one has the same name on
    # each rank.
    counters, counted = current().counters, f"DistributedOptimizer.{process_set.number()}"
    counters[counted] += process_set.included()
    name = f"{counted}.{counters[counted]}"
    alone = not process_set.included() or process_set.size() == 1
    if op == ReduceOp.Adasum and not alone:
        _change_class(optimizer, AdasumOptimizer)
        GradientHooks.release([entry.parameter for entry in named])
        optimizer.__dict__.update(_named=named, _reduction_options=options, _name=name)
        return optimizer
    names = {entry.parameter: entry.name for entry in named}

    def make(optimizer: optim.Optimizer) -> GradientHooks | None:
        """Create hooks on the current parameters of `optimizer`."""
        if alone:
            return None
        context = current()
        present = [
            # Parameters of groups that were added later have no name.
            NamedParameter(names.get(param, f"{number}.{place}"), param)
            for number, group in enumerate(optimizer.param_groups)
            for place, param in enumerate(group["params"])
            if param.requires_grad
        ]
        numbers = [assigned.get(entry.parameter, 0) for entry in present]
        sparse, capacity = sparse_parameters(optimizer), context.world.settings.bucket_mb * 2**20
        buckets = make_buckets(present, numbers, sparse, int(capacity), options, name)
        owner = ref(optimizer)

        def note() -> dict[str, str]:
            averages, alive = options.op == ReduceOp.Average, owner()
            if alive is None:
                return {}
            asked_size = context.asked_size
            return script_checks.describe_rank(alive, averages=averages, asked_size=asked_size)

        GradientHooks.release([entry.parameter for entry in present])
        return GradientHooks(present, buckets, passes, note)

    _change_class(optimizer, ReducingOptimizer)
    optimizer.__dict__.update(_make_hooks=make, _synchronized=False, _skips_synchronize=False)
    optimizer.__dict__["_parameter_names"] = names  # Horovod scripts read this attribute
    optimizer.__dict__["_gradient_hooks"] = make(optimizer)
    return optimizer


def _change_class(optimizer: optim.Optimizer, kind: type[optim.Optimizer]) -> None:
    """Change the class of `optimizer` to one derived from `kind` and its own class."""
    own = type(optimizer)
    if issubclass(own, ReducingOptimizer | AdasumOptimizer):
        raise BadCall(
            "This optimizer is already a DistributedOptimizer: call hvd.DistributedOptimizer once."
        )
    optimizer.__dict__.pop("step", None)  # a scheduler's wrapper, which would hide the new `step`
    optimizer.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})


def _named_parameters(optimizer: optim.Optimizer, given: Named | None) -> list[NamedParameter]:
    """Return the optimizer's parameters with their names. Raises BadCall if names are invalid."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if given is None:
        return [NamedParameter(f"noname.{index}", param) for index, param in enumerate(params)]
    pairs = list(given)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise BadCall(
            "named_parameters needs pairs of a name and a parameter, such as "
            "model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise BadCall(
            f"named_parameters has these names twice: {', '.join(twice)}. Give each parameter a "
            "different name."
        )
    names = {param: name for name, param in pairs}
    missing = [param for param in params if param not in names]
    if missing:
        shapes = ", ".join(str(tuple(param.shape)) for param in missing[:5])
        raise BadCall(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters, of shape "
            f"{shapes}: pass the parameters of all models that it trains."
        )
    return [NamedParameter(names[param], param) for param in params]


def _group_numbers(named: Sequence[NamedParameter], groups: Groups) -> dict[nn.Parameter, int]:
    """Return each parameter's group number, from 1, or 0 if the parameter is in no group.

    Raises BadCall if the groups are invalid.
    """
    if isinstance(groups, int):
        if groups < 0:
            raise BadCall(f"num_groups must be 0 or more, not {groups}.")
        count = len(named)
        numbers = [1 + index * groups // count if groups else 0 for index in range(count)]
        return {entry.parameter: n for entry, n in zip(named, numbers, strict=True)}
    found: dict[nn.Parameter, int] = {}
    known: set[Tensor] = {entry.parameter for entry in named}
    for number, group in enumerate(groups or (), start=1):
        for param in group:
            if param not in known or param in found:
                raise BadCall(
                    f"groups has a parameter of shape {tuple(param.shape)} twice, or one that the "
                    "optimizer does not have: list each parameter of the optimizer at most once."
                )
            found[param] = number
    return found


def _check_passes(passes: int) -> int:
    if passes < 1:
        raise BadCall(f"backward_passes_per_step must be 1 or more, not {passes}.")
    return passes


class AdasumOptimizer(optim.Optimizer):
    """Mixin for op=hvd.Adasum. Each rank steps separately, and Adasum combines the changes."""

    _named: Sequence[NamedParameter]
    _reduction_options: ReductionOptions
    _name: str
    _opt_called: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's own gradients, then combine the changes across ranks.

        Each parameter's change is replaced by the Adasum of all ranks' changes.
        """
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
        """Run the wrapped optimizer's own `step()`, without communication."""
        super().step()

    def synchronize(self) -> None:
        """No-op, because each rank uses its own gradients."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise HookOrder, as Horovod does."""
        raise HookOrder(
            "optimizer.skip_synchronize() has no meaning with Adasum, which combines whole steps: "
            "leave it out."
        )
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """No-op, because `step` uses the summed gradients of all earlier backward passes."""
