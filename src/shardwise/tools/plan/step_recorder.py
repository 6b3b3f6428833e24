"""StepRecorder: records a step's operators, and the lifetimes of the tensors that they create.

Parameters are fake tensors (torch.subclasses.FakeTensorMode), which have shapes but no storage. All
tensors computed from them are fake as well. Tensors that the script computes only from its own data
stay real. Masks and lengths therefore have values, while layers need neither memory nor time.

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
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

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
"""Operators that read the value of a tensor, and their names in messages."""


_COPIES = ("_to_copy", "cat", "clone", "copy_", "stack")
"""Operators that copy elements, which torch does not tag as pointwise."""

_READ_AGAIN = {
    # One pass over a row for its maximum and one for the sum, before the pass that writes.
    "_softmax": (0, 0),
    "_log_softmax": (0, 0),
    # One pass for the sum of the gradient, which softmax multiplies by its result.
    "_softmax_backward_data": (0, 1),
    "_log_softmax_backward_data": (0,),
    # A second kernel computes the gradient of the weight.
    "native_layer_norm_backward": (0, 1),
}
"""By operator, the indices of tensors that CUDA's kernels read again (PyTorch's
aten/src/ATen/native/cuda, SoftMax.cu and layer_norm_kernel.cu)."""

_UNREAD = {"nll_loss_forward": (0,), "nll_loss_backward": (1,)}
"""By operator, the indices of tensors of which CUDA's kernels read at most one number per row."""

_ROW = 48 * 2**10
"""Size in bytes of the longest softmax row that a CUDA kernel reads once, into shared memory."""


@dataclass(eq=False)
class _Memory:
    """A live storage, with its size and the operation that created it."""

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
    """The unit, line of user code and layer of an operator."""

    unit: int
    line: str
    layer: int


@dataclass(frozen=True)
class _Call:
    """A completed operator call.

    `inputs` are the tensors among its arguments, and `outputs` are the tensors among its results.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    inputs: list[Tensor]
    outputs: list[Tensor]


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Executes operators on fake tensors, and records them while `active` is true.

    The engine sets `active`, `unit`, `layer` and `backward` as the step proceeds.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.active = False
        """Whether the forward or backward pass of a training step is running."""
        self.unit = -1
        self.layer = 0
        self.backward = False
        self.on_cuda = False
        """Whether to count the memory traffic of CUDA's kernels, which differs from the CPU's."""
        self.operations: list[Operation] = []
        self.tensors: list[TensorLife] = []
        self.assumed: dict[Assumption, int] = {}
        self._alive: dict[int, _Memory] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._ignored: set[int] = set()
        self._origin: dict[int, _Place] = {}
        """The place of each forward operator, by autograd's sequence number."""
        self._last = _Place(-1, "", 0)

    # -- interface --------------------------------------------------------------------------

    def ignore(self, tensor: Tensor) -> None:
        """Exclude the memory of `tensor` (a parameter or buffer) from the record."""
        self._ignored.add(tensor.untyped_storage()._cdata)

    def end(self) -> None:
        """End the recording. For tensors that are still alive, record a lifetime that ends now."""
        # Iterate over a copy, because `_died` removes the entry.
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
        """Run the operator `func` and record it."""
        del types
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        is_fake = any(isinstance(each, FakeTensor) for each in inputs)
        # A fake tensor has no value. Assume that it is 0, and report the assumption.
        if func in _VALUES and is_fake:
            return self._assume(func, args)
        if func is aten.nonzero.default and is_fake:
            return self._assume_nonzero(args[0])
        # prim operators only return properties such as the device, and allocate no memory.
        if not self.active or func.namespace == "prim":
            return func(*args, **kwargs)
        place = self._place()
        for tensor in inputs:
            key = _key(tensor)
            if key is not None and key not in self._alive and key not in self._ignored:
                # No recorded operator created this tensor, so it is (part of) the batch.
                self._be_born(key, tensor, -1, "batch", -1, "")
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
        """Run `func` and return its result.

        Operators that take no tensors and create floating-point tensors return fake tensors.
        """
        # Otherwise torch.zeros(...) in a script would allocate memory, and everything computed from
        # its result alone would be real.
        if not inputs and _makes_floats(func, kwargs):
            with self.fake:
                return func(*args, **kwargs)
        # torch has no usable fake implementation of some CPU kernels.
        if is_fake and (stand_in := STAND_INS.get(func)) is not None:
            return stand_in(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if not is_fake:
                raise
            raise UsageError(
                f"{line or 'the script'} cannot be observed: {func} needs the values of a tensor, "
                f"but plan does not compute the step ({type(error).__name__}). Give this line a "
                "fixed shape, or measure a real run with shardwise scale."
            ) from error

    def _assume(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return 0 or False in place of a fake tensor's value, and record the assumption."""
        value: Any = False
        dtype = args[0].dtype
        if func is aten._local_scalar_dense.default and dtype != torch.bool:
            value = 0.0 if dtype.is_floating_point else 0
        self.assume(f"{_VALUES[func]} = {value}")
        return value

    def _assume_nonzero(self, mask: Tensor) -> Tensor:
        """Return fake indices for `nonzero()` of a mask without values.

        For a vector, assume that every element is set. For any other mask, assume as many set
        elements as its last dim has entries, as if each token were routed to one expert.
        """
        count = mask.shape[-1] if mask.ndim else 1
        self.assume(f"nonzero() of {tuple(mask.shape)} has {count} places")
        with self.fake:
            return torch.zeros((count, mask.ndim), dtype=torch.int64)

    def assume(self, what: str) -> None:
        """Record an assumption that was made in place of a missing value."""
        assumption = Assumption(what, user_line())
        self.assumed[assumption] = self.assumed.get(assumption, 0) + 1

    def current_unit(self) -> int:
        """Return the unit of the running operator. In a backward pass, it is the forward one's."""
        return self._place().unit

    def _place(self) -> _Place:
        """Return the running operator's place. A backward operator has its forward operator's."""
        if not self.backward:
            # Autograd numbers its nodes as the forward pass creates them. Store the place under
            # that number, because the backward pass reports it again.
            place = _Place(self.unit, user_line(), self.layer)
            self._origin.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
            self._last = place
            return place
        # A node without a recorded forward operator, such as one that accumulates gradients, gets
        # the place of the previous operator. During a recomputation `self.unit` is set, and takes
        # precedence because it is more accurate.
        node = torch._C._current_autograd_node()
        if node is not None and (origin := self._origin.get(node._sequence_nr())) is not None:
            self._last = origin
        return replace(self._last, unit=self.unit) if self.unit >= 0 else self._last

    # -- memory -----------------------------------------------------------------------------

    def _note(self, call: _Call, place: _Place) -> None:
        number = len(self.operations)
        # Views and in-place results share the storage of an input, so they are not new memory.
        before = set(self._alive) | self._ignored
        name = call.func._overloadpacket.__name__
        for tensor in call.outputs:
            key = _key(tensor)
            if key is not None and key not in before and key not in self._alive:
                self._be_born(key, tensor, number, name, place.unit, place.line)
        # Bytes read and written. A tensor changed in place is both read and written, so it counts
        # twice. This is a lower bound, because a kernel may read an input more than once.
        moved = sum(map(_nbytes, (*call.inputs, *call.outputs)))
        if self.on_cuda:
            moved += _further_traffic(name, call.inputs)
        dtype = str(call.outputs[0].dtype).removeprefix("torch.") if call.outputs else ""
        self.operations.append(
            Operation(
                name=name,
                flops=_flops(call.func, call.args, call.kwargs, call.out),
                # torch does not mark `_unsafe_view`, which reshapes a product, as a view.
                bytes=0 if call.func.is_view or name == "_unsafe_view" else moved,
                dtype=dtype,
                unit=place.unit,
                phase="backward" if self.backward else "forward",
                line=place.line,
                shapes=tuple(tuple(each.shape) for each in call.inputs),
                layer=place.layer,
                unvectorised=_is_unvectorised(call),
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
        # The lifetime ends when Python frees the storage, as the memory would be freed in a real
        # run.
        self._references[key] = weakref.ref(storage, lambda _: self._died(key))

    def _died(self, key: int, *, kept: bool = False) -> None:
        """Record that storage `key` was freed after the latest operator.

        `kept` is True if the step has ended and the storage is still alive.
        """
        memory = self._alive.pop(key, None)
        self._references.pop(key, None)
        # Ignored storages have no entry, and empty ones take no memory.
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
                # Created in the forward pass and freed in the backward pass, so autograd saved it.
                saved=memory.forward and self.backward,
                kept=kept and memory.born >= 0,
            )
        )


def user_line() -> str:
    """Return the innermost stack frame outside library code, such as "train.py:41"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Skip the frames of torch and of this package, to find the line that the user wrote.
        if _is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_place(trace: TracebackType | None) -> str:
    """Return the innermost traceback frame outside library code, such as "train.py:41"."""
    place = ""
    for frame, line in traceback.walk_tb(trace):
        if _is_users(frame.f_code.co_filename):
            place = f"{Path(frame.f_code.co_filename).name}:{line}"
    return place


@cache
def _is_users(path: str) -> bool:
    """Return whether the code at `path` is user code rather than library code."""
    return not path.startswith("<") and not str(Path(path).resolve()).startswith(_LIBRARIES)


def _key(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's storage, or None for a sparse tensor."""
    try:
        # The address of the C++ storage. It is the same for all views of the storage, and may be
        # reused once the storage is freed.
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse
        return None


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _further_traffic(name: str, inputs: list[Tensor]) -> int:
    """Return the bytes that CUDA's kernel of an operator reads in addition to its inputs."""
    if "softmax" in name and inputs[0].shape[-1:].numel() * inputs[0].element_size() <= _ROW:
        return 0
    again = sum(_nbytes(inputs[index]) for index in _READ_AGAIN.get(name, ()))
    return again - sum(_nbytes(inputs[index]) for index in _UNREAD.get(name, ()))


def _is_unvectorised(call: _Call) -> bool:
    """Return whether an element-wise operator or copy has tensors of different layouts or dtypes.

    CUDA's kernels read and write vectors of elements only if all tensors have the same shape,
    strides and dtype, or if they narrow fp32 to 16 bits.
    """
    operands = (*call.inputs, *call.outputs)
    tensors = [each for each in operands if each.numel() > 1 and each.layout == torch.strided]
    name = call.func._overloadpacket.__name__
    if not tensors or not (name in _COPIES or torch.Tag.pointwise in call.func.tags):
        return False
    if name in ("cat", "stack"):
        return not all(each.is_contiguous() for each in tensors)
    if len({(each.shape, each.stride()) for each in tensors}) > 1:
        return True
    sizes = [each.element_size() for each in tensors]
    return sizes[0] < sizes[-1] if name in _COPIES else len(set(sizes)) > 1


def _tensors(nest: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(nest) if isinstance(each, Tensor)]


def _makes_floats(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operator that takes no tensors returns a floating-point tensor."""
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    # Integers stay real, because they are indices and lengths whose values determine shapes.
    name = func._overloadpacket.__name__
    if name in ("arange", "randint", "randperm", "lift_fresh", "scalar_tensor"):
        return False
    return bool(dtype.is_floating_point) and str(kwargs.get("device", "cpu")) != "meta"


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    counted = flop_registry.get(packet)
    # torch's FLOP counter supports CUDA's attention kernels, but not the CPU's.
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop(*args[:3], out_val=out))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop(*args[:4], out_val=out))
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=out))
