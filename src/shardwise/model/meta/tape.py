"""Records operations on tensor memory on a tape. Any part of the tape can be replayed.

A *content* is the data in a storage at a point in time. An *operation* computes contents from other
contents. Operations see each tensor argument as a view (dtype, size, stride, offset) of a storage.
Views therefore need no separate record, and a write through one view is visible in all of them.
Random operations store the state of their generator (5 KB), so each can be replayed without the
preceding draws.

The tape holds only contents that are still needed. Contents that have been completely overwritten
are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from shardwise.errors import ModelError
from shardwise.model.precision import creating
from shardwise.tiers.host_memory import mapped, trim
from shardwise.world.randomness import generator_of


@dataclass(frozen=True)
class Content:
    """The content of a storage after an operation: the operation's result number `slot`."""

    operation: TapedOperation
    slot: int


@dataclass(frozen=True)
class RecordedMemory:
    """A storage before an operation. `content` is None if its previous data is not needed."""

    content: Content | None
    size: int  # bytes
    device: torch.device
    written: bool


@dataclass(frozen=True)
class Layout:
    """A tensor's view of its storage. Sizes are in elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def view(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor with this layout in `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def bytes(self) -> int:
        """Return the size in bytes. Elements that overlap in memory are each counted."""
        return self.size.numel() * self.dtype.itemsize

    def fills(self, storage_bytes: int) -> bool:
        """Return whether the tensor covers each of a storage's `storage_bytes` exactly once."""
        if self.bytes() != storage_bytes:
            return False
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            # Visit dims by increasing stride. A gap or an overlap breaks the chain.
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument of an operation: a view of the operation's memory number `memory`."""

    memory: int
    layout: Layout


@dataclass(frozen=True)
class RecordedDraws:
    """The state of an operation's generator before the operation runs."""

    device: torch.device
    state: Tensor


@dataclass(frozen=True)
class AllocatedStorage:
    """A storage that an operation allocates for result number `result`."""

    result: int
    layout: Layout
    size: int  # bytes


# Compare by identity: operations are dict keys, and equal calls are different operations.
@dataclass(eq=False)
class TapedOperation:
    """A call that can be replayed: its function, arguments, memories and random state."""

    function: Callable[..., Any]
    args: Sequence[Any]  # tensors as TensorArgument, generators as None
    kwargs: dict[str, Any]
    memories: Sequence[RecordedMemory]
    seed: RecordedDraws | None  # only if it is random
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    allocated: list[AllocatedStorage] = field(default_factory=list)

    def contents(self) -> Iterator[Content]:
        """Iterate over the contents that the operation needs, without repetition."""
        return iter({memory.content: None for memory in self.memories if memory.content})

    def written(self) -> list[int]:
        """Return the indices of the memories that the operation writes.

        Their contents are the operation's first slots. Allocated storages follow.
        """
        return [index for index, memory in enumerate(self.memories) if memory.written]

    def run(
        self, storages: Sequence[UntypedStorage], advance: torch.Generator | None = None
    ) -> list[UntypedStorage]:
        """Replay the operation on `storages` (one per memory), and return the resulting contents.

        Every generator stays unchanged except `advance`, which advances as if the operation had
        drawn from it.
        """

        def tensor(leaf: Any) -> Any:
            return (
                leaf.layout.view(storages[leaf.memory])
                if isinstance(leaf, TensorArgument)
                else leaf
            )

        args, kwargs = map_leaves(tensor, self.args), map_leaves(tensor, self.kwargs)
        with torch.no_grad(), _recorded_environment(self.seed, self.default_dtype, advance):
            results = self.function(*args, **kwargs)
        results_in_order = leaves(results)
        fresh = [
            _storage_of_result(results_in_order[storage.result], storage)
            for storage in self.allocated
        ]
        return [storages[index] for index in self.written()] + fresh


def leaves(value: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return leaves(list(value.values())) if isinstance(value, dict) else [value]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same nested structure with `function` applied to each leaf.

    torch's own helpers keep references to the leaves (here tensors) until garbage collection runs.
    """
    if isinstance(value, (list, tuple)):
        items = [map_leaves(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    return function(value)


def copy_content(tensor: Tensor) -> tuple[Content, Layout]:
    """Return a copy of `tensor` as a content, and its layout.

    Used for values that no operation on the tape computes.
    """
    copy = tensor.detach().clone()
    layout = Layout.of(copy)
    # `copy` is stored in the operation, and each replay clones it.
    operation = TapedOperation(copy.clone, (), {}, [], None)
    operation.allocated.append(AllocatedStorage(0, layout, copy.untyped_storage().nbytes()))
    return Content(operation, 0), layout


def replay(content: Content) -> UntypedStorage:
    """Recompute `content` in new memory. Generators do not change.

    Runs all operations that `content` depends on. Peak memory is the size of all contents needed at
    the same time. For the usual initialisations, this is only the result.
    """
    order = _order([content])
    # The number of times each content is still needed, by operations and by the caller.
    uses = Counter(needed for operation in order for needed in operation.contents())
    uses[content] += 1
    held: dict[Content, UntypedStorage] = {}
    for operation in order:
        storages = [_storage_for(memory, held, uses) for memory in operation.memories]
        # Drop each content after its last use, so that no large content is held twice.
        for needed in operation.contents():
            uses[needed] -= 1
            if not uses[needed]:
                held.pop(needed, None)
        for slot, storage in enumerate(_repeat(operation, storages)):
            if uses[Content(operation, slot)]:
                held[Content(operation, slot)] = storage
    # Temporaries of many sizes are freed. Without this call the C library's heap keeps growing.
    give_back(sum(storage.size for operation in order for storage in operation.allocated))
    return held[content]


def perform(operation: TapedOperation, generator: torch.Generator) -> None:
    """Run `operation` only for its effect on `generator`."""
    storages = [
        replay(memory.content) if memory.content else new_storage(memory.size, memory.device)
        for memory in operation.memories
    ]
    _repeat(operation, storages, generator)


def default_generator(device: torch.device) -> torch.Generator:
    if device.type != "meta":
        return generator_of(device)
    raise ModelError(
        f"on_meta cannot record random numbers drawn on {device}. Build the model on the CPU "
        "inside the block."
    )


def _repeat(
    operation: TapedOperation,
    storages: Sequence[UntypedStorage],
    advance: torch.Generator | None = None,
) -> list[UntypedStorage]:
    try:
        return operation.run(storages, advance)
    except RuntimeError as error:
        raise ModelError(
            f"The operation {operation.function} cannot be replayed: {error}. Build the model "
            "without on_meta, or remove this operation from its initialisation."
        ) from error


def _order(targets: Sequence[Content]) -> list[TapedOperation]:
    """Return the operations that `targets` depend on, in execution order."""
    # Use an explicit stack, because a chain of operations may exceed Python's recursion limit.
    done: dict[TapedOperation, None] = {}
    stack = [(target.operation, False) for target in targets]
    while stack:
        operation, ready = stack.pop()
        if operation in done:
            continue
        if ready:
            done[operation] = None
            continue
        stack.append((operation, True))
        stack += [(needed.operation, False) for needed in operation.contents()]
    return list(done)


def _storage_for(
    memory: RecordedMemory, held: dict[Content, UntypedStorage], uses: Counter[Content]
) -> UntypedStorage:
    """Return the storage for `memory`, or a copy if it is written while still needed elsewhere."""
    if memory.content is None:
        return new_storage(memory.size, memory.device)
    storage = held[memory.content]
    if not memory.written or uses[memory.content] == 1:
        return storage
    copy: UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copy


def _storage_of_result(tensor: Tensor, recorded: AllocatedStorage) -> UntypedStorage:
    """Return a result's storage, copied if its layout differs from the recorded one.

    Shapes were computed on the meta device, whose kernels may choose different strides.
    """
    storage = tensor.untyped_storage()
    if Layout.of(tensor) == recorded.layout and storage.nbytes() == recorded.size:
        return storage
    storage = new_storage(recorded.size, tensor.device)
    recorded.layout.view(storage).copy_(tensor)
    return storage


@contextmanager
def _recorded_environment(
    seed: RecordedDraws | None, dtype: torch.dtype, advance: torch.Generator | None
) -> Iterator[None]:
    """Context manager that restores an operation's default dtype and generator state.

    A replayed operation draws from the default generator, even if it was originally passed a
    different one. From the same state, both produce the same numbers.
    """
    generator = default_generator(seed.device) if seed else None
    before = generator.get_state() if generator else None
    try:
        if generator and seed:
            generator.set_state(seed.state)
        with creating(dtype):
            yield
        if generator and advance:
            advance.set_state(after := generator.get_state())
            before = after if advance is generator else before
    finally:
        if generator and before is not None:
            generator.set_state(before)


_MAPPED = 2**20  # bytes; a storage of at least this size gets its own memory mapping
_TRIMMED = 2**26  # bytes; trim the heap whenever this many bytes have been freed

_freed = 0


def new_storage(size: int, device: torch.device) -> UntypedStorage:
    """Return an uninitialised storage of `size` bytes.

    A large storage has its own memory mapping, so freeing it leaves no hole in the heap.
    """
    if device.type == "cpu" and size >= _MAPPED:
        return mapped(size).untyped_storage()
    storage: UntypedStorage = UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]
    return storage


def give_back(size: int) -> None:
    """Report that `size` bytes of tensors are or soon will be free. Occasionally trim the heap."""
    global _freed
    _freed += size
    if _freed >= _TRIMMED:
        _freed = 0
        trim()
