"""StepRecorder watches the operators of forward and backward: what they compute, and how long the
memory that they make lives.

Parameters are fake tensors (torch.subclasses.FakeTensorMode): shapes without memory. Whatever is
computed from them is fake too, what the script computes from its own data stays real. So masks and
lengths have their values, and a batch costs what it weighs, but no layer costs anything.

    real batch ─┐
                ├─▶ operator ─▶ fake result ─▶ ... ─▶ loss
    fake weight ┘
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
import weakref
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from shardwise.errors import UsageError
from shardwise.tools.plan.fake_operators import STAND_INS
from shardwise.tools.plan.record import Assumption, Operation, TensorLife

aten = torch.ops.aten

_LIBRARIES = tuple(
    str(Path(each).resolve())
    for each in (
        *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
        str(Path(str(torch.__file__)).parent.parent),
        str(Path(__file__).parents[2]),
    )
)

_VALUES = {
    aten._local_scalar_dense.default: "item()",
    aten.equal.default: "torch.equal",
    aten.is_nonzero.default: "bool()",
}
"""Operators that ask for the value of a tensor."""


@dataclass(eq=False)
class _Memory:
    """A storage that is alive: what made it, and when."""

    nbytes: int
    born: int
    unit: int
    line: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    forward: bool


@dataclass(frozen=True)
class _Place:
    """What an operator belongs to: unit, the user's line, layer."""

    unit: int
    line: str
    layer: int


@dataclass(frozen=True)
class _Call:
    """An operator that has run: what it was given, the tensors of that, and what it gave."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    inputs: list[Tensor]
    outputs: list[Tensor]


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers, from when it is entered, what is asked of fake tensors; while `active` it records
    every operator.

    `active`, `unit`, `layer` and `backward` are set by whoever knows where the step is.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.active = False
        """Whether forward or backward of a step to train on is running."""
        self.unit = -1
        self.layer = 0
        self.backward = False
        self.operations: list[Operation] = []
        self.tensors: list[TensorLife] = []
        self.assumed: dict[Assumption, int] = {}
        self._alive: dict[int, _Memory] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._ignored: set[int] = set()
        self._origin: dict[int, _Place] = {}
        """By autograd's sequence number, where the forward was."""
        self._last = _Place(-1, "", 0)

    # -- what is asked of it ----------------------------------------------------------------

    def ignore(self, tensor: Tensor) -> None:
        """Let the memory of `tensor`, a parameter or a buffer, count as no activation."""
        self._ignored.add(tensor.untyped_storage()._cdata)

    def end(self) -> None:
        """The step is over: what is still alive lived until now."""
        for key in list(self._alive):
            self._died(key, kept=True)

    # -- operators --------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, and write down what it was."""
        del types
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        is_fake = any(isinstance(each, FakeTensor) for each in inputs)
        if func in _VALUES and is_fake:
            return self._assume(func, args)
        if func is aten.nonzero.default and is_fake:
            return self._assume_nonzero(args[0])
        # prim operators ask for facts such as a device, and make no memory.
        if not self.active or func.namespace == "prim":
            return func(*args, **kwargs)
        place = self._place()
        self._note_inputs(inputs)
        out = self._run(func, args, kwargs, inputs, is_fake, place.line)
        self._note(_Call(func, args, kwargs, out, inputs, _tensors(out)), place)
        return out

    def _run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        is_fake: bool,
        line: str,
    ) -> Any:
        """The result of `func`; floating tensors that are made from nothing are fake."""
        if not inputs and _makes_floats(func, kwargs):
            with self.fake:
                return func(*args, **kwargs)
        if is_fake and (stand_in := STAND_INS.get(func)) is not None:
            return stand_in(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if not is_fake:
                raise
            raise UsageError(
                f"{line or 'the script'} cannot be observed: {func} needs the values of a tensor, "
                f"and there are none without computing it ({type(error).__name__}). Give the step "
                "a fixed shape at this line, or measure a real run with shardwise scale."
            ) from error

    def _assume(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The value of a tensor that has none: zero, which is written down."""
        value: Any = False
        dtype = args[0].dtype
        if func is aten._local_scalar_dense.default and dtype != torch.bool:
            value = 0.0 if dtype.is_floating_point else 0
        self.assume(f"{_VALUES[func]} = {value}")
        return value

    def _assume_nonzero(self, mask: Tensor) -> Tensor:
        """The places of a mask without values: all of a vector; else as many as its last dimension
        is long, as where each token goes to one expert."""
        count = mask.shape[-1] if mask.ndim else 1
        self.assume(f"nonzero() of {tuple(mask.shape)} has {count} places")
        with self.fake:
            return torch.zeros((count, mask.ndim), dtype=torch.int64)

    def assume(self, what: str) -> None:
        """Write down what was taken for a value that is not there."""
        found = Assumption(what, user_line())
        self.assumed[found] = self.assumed.get(found, 0) + 1

    def _place(self) -> _Place:
        """What the operator belongs to."""
        if not self.backward:
            found = _Place(self.unit, user_line(), self.layer)
            self._origin.setdefault(torch._C._autograd._get_sequence_nr() - 1, found)
            self._last = found
            return found
        node = torch._C._current_autograd_node()
        if node is not None and (origin := self._origin.get(node._sequence_nr())) is not None:
            self._last = origin
        return replace(self._last, unit=self.unit) if self.unit >= 0 else self._last

    # -- memory -----------------------------------------------------------------------------

    def _note_inputs(self, inputs: list[Tensor]) -> None:
        """What comes in without having been made here is the batch."""
        for tensor in inputs:
            key = _key(tensor)
            if key is not None and key not in self._alive and key not in self._ignored:
                self._be_born(key, tensor, -1, "batch", -1, "")

    def _note(self, call: _Call, place: _Place) -> None:
        number = len(self.operations)
        # Views, and what is changed in place, have the storage of an input: no new memory.
        before = set(self._alive) | self._ignored
        name = call.func._overloadpacket.__name__
        for tensor in call.outputs:
            key = _key(tensor)
            if key is not None and key not in before and key not in self._alive:
                self._be_born(key, tensor, number, name, place.unit, place.line)
        # Read and written; a tensor that is changed in place is both, and counts twice.
        moved = sum(each.numel() * each.element_size() for each in (*call.inputs, *call.outputs))
        dtype = str(call.outputs[0].dtype).removeprefix("torch.") if call.outputs else ""
        self.operations.append(
            Operation(
                name=name,
                flops=_flops(call.func, call.args, call.kwargs, call.out),
                bytes=0 if call.func.is_view else moved,
                dtype=dtype,
                unit=place.unit,
                phase="backward" if self.backward else "forward",
                line=place.line,
                shapes=tuple(tuple(each.shape) for each in call.inputs),
                layer=place.layer,
            )
        )

    def _be_born(
        self, key: int, tensor: Tensor, number: int, source: str, unit: int, line: str
    ) -> None:
        storage = tensor.untyped_storage()
        self._alive[key] = _Memory(
            storage.nbytes(),
            number,
            unit,
            line,
            source,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            not self.backward,
        )
        self._references[key] = weakref.ref(storage, lambda _: self._died(key))

    def _died(self, key: int, *, kept: bool = False) -> None:
        """The storage `key` is free; it was there for the last operator. `kept`: it is not."""
        memory = self._alive.pop(key, None)
        self._references.pop(key, None)
        if memory is None or memory.nbytes == 0:
            return
        self.tensors.append(
            TensorLife(
                memory.nbytes,
                memory.born,
                max(len(self.operations) - 1, memory.born),
                memory.unit,
                memory.line,
                memory.source,
                memory.shape,
                memory.dtype,
                saved=memory.forward and self.backward,
                kept=kept and memory.born >= 0,
            )
        )


def user_line() -> str:
    """Where the script is: the innermost line that is in no library, as "train.py:41"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_place(trace: TracebackType | None) -> str:
    """The same of an exception."""
    found = ""
    for frame, line in traceback.walk_tb(trace):
        if _is_users(frame.f_code.co_filename):
            found = f"{Path(frame.f_code.co_filename).name}:{line}"
    return found


@cache
def _is_users(path: str) -> bool:
    """Whether code at `path` is in no library."""
    return not path.startswith("<") and not str(Path(path).resolve()).startswith(_LIBRARIES)


def _key(tensor: Tensor) -> int | None:
    """What names the memory of a tensor; None for one that has no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse
        return None


def _tensors(nest: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(nest) if isinstance(each, Tensor)]


def _makes_floats(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator without inputs makes a floating tensor that is better without memory."""
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    name = func._overloadpacket.__name__
    if name in ("arange", "randint", "randperm", "lift_fresh", "scalar_tensor"):
        return False
    return bool(dtype.is_floating_point) and str(kwargs.get("device", "cpu")) != "meta"


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    counted = flop_registry.get(packet)
    if counted is None and packet.__name__ == "_scaled_dot_product_flash_attention_for_cpu":
        return int(sdpa_flop(*args[:3], out_val=out))
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=out))
