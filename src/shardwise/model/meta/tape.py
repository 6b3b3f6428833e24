"""Records what was done to the memory of tensors, so that any of it can be done again alone.

A *content* is what a storage holds at one moment; an *operation* makes contents out of others.
Operations know each tensor argument as a view (dtype, size, stride, offset) of a storage, so views
need no record of their own, and writing through one view is seen through all. Random operations
keep the state of their generator, 5 KB, so that each can be repeated without those before it.

Only contents that something still needs are held: what is overwritten whole is forgotten.
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
from shardwise.tiers.host_memory import mapped, trim
from shardwise.world.randomness import generator_of


@dataclass(frozen=True)
class Content:
    """What a storage holds after an operation: the one numbered `slot` of those it makes."""

    operation: Operation
    slot: int


@dataclass(frozen=True)
class RecordedMemory:
    """A storage as an operation finds it; without content, what it held does not matter."""

    content: Content | None
    size: int  # bytes
    device: torch.device
    written: bool


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie in its storage; sizes in elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def view(self, storage: UntypedStorage) -> Tensor:
        """The tensor of this layout in `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def bytes(self) -> int:
        """What the elements take, each counted once."""
        return self.size.numel() * self.dtype.itemsize

    def fills(self, storage_bytes: int) -> bool:
        """Whether each element of a storage of this size belongs to the tensor, once."""
        if self.bytes() != storage_bytes:
            return False
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class TensorArgument:
    """A tensor among an operation's arguments: a view of its memory number `memory`."""

    memory: int
    layout: Layout


@dataclass(frozen=True)
class RecordedDraws:
    """The state of the generator that an operation drew from, before it did."""

    device: torch.device
    state: Tensor


@dataclass(frozen=True)
class AllocatedStorage:
    """A storage that an operation allocates: that of its result number `result`."""

    result: int
    layout: Layout
    size: int  # bytes


@dataclass(eq=False)
class Operation:
    """A call that can be repeated: what is called, on which memories, with which randomness."""

    function: Callable[..., Any]
    args: Sequence[Any]  # tensors as Seen, generators as None
    kwargs: dict[str, Any]
    memories: Sequence[RecordedMemory]
    seed: RecordedDraws | None  # where it is random
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    made: list[AllocatedStorage] = field(default_factory=list)

    def contents(self) -> Iterator[Content]:
        """What it needs, each content once."""
        return iter({memory.content: None for memory in self.memories if memory.content})

    def written(self) -> list[int]:
        """The memories it writes; they are its first contents, what it allocates the next."""
        return [index for index, memory in enumerate(self.memories) if memory.written]

    def run(
        self, storages: Sequence[UntypedStorage], advance: torch.Generator | None = None
    ) -> list[UntypedStorage]:
        """Repeat it on `storages`, one per memory; returns its contents.

        The generator `advance` moves to where the operation leaves it, all others stay.
        """

        def tensor(leaf: Any) -> Any:
            return (
                leaf.layout.view(storages[leaf.memory])
                if isinstance(leaf, TensorArgument)
                else leaf
            )

        args, kwargs = exchanged(tensor, self.args), exchanged(tensor, self.kwargs)
        with torch.no_grad(), _ambience(self.seed, self.default_dtype, advance):
            results = self.function(*args, **kwargs)
        found = leaves(results)
        fresh = [_laid_out(found[made.result], made) for made in self.made]
        return [storages[index] for index in self.written()] + fresh


def leaves(value: Any) -> list[Any]:
    """What is in nested lists, tuples and dicts, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in leaves(each)]
    return leaves(list(value.values())) if isinstance(value, dict) else [value]


def exchanged(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nesting with `function` of each leaf.

    torch's own helpers for this keep the leaves, here tensors, until garbage is collected.
    """
    if isinstance(value, (list, tuple)):
        items = [exchanged(function, each) for each in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: exchanged(function, each) for key, each in value.items()}
    return function(value)


def kept(tensor: Tensor) -> tuple[Content, Layout]:
    """A content that is a copy of `tensor`: for values that no operation tells how to make."""
    copy = tensor.detach().clone()
    layout = Layout.of(copy)
    operation = Operation(copy.clone, (), {}, [], None)
    operation.made.append(AllocatedStorage(0, layout, copy.untyped_storage().nbytes()))
    return Content(operation, 0), layout


def replay(content: Content) -> UntypedStorage:
    """Make `content` again, in memory of its own; the generators stay as they are.

    Takes the time of the operations it came from and the memory of those contents that are
    needed at once, which is its own for the usual ways to fill a parameter.
    """
    order = _order([content])
    uses = Counter(needed for operation in order for needed in operation.contents())
    uses[content] += 1
    held: dict[Content, UntypedStorage] = {}
    for operation in order:
        storages = [_taken(memory, held, uses) for memory in operation.memories]
        for needed in operation.contents():
            uses[needed] -= 1
            if not uses[needed]:
                held.pop(needed, None)
        for slot, storage in enumerate(_repeat(operation, storages)):
            if uses[Content(operation, slot)]:
                held[Content(operation, slot)] = storage
    give_back(sum(made.size for operation in order for made in operation.made))
    return held[content]


def perform(operation: Operation, generator: torch.Generator) -> None:
    """Do `operation` for real, for what it does to `generator` alone."""
    storages = [
        replay(memory.content) if memory.content else new_storage(memory.size, memory.device)
        for memory in operation.memories
    ]
    _repeat(operation, storages, generator)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operations on `device` draw from."""
    if device.type != "meta":
        return generator_of(device)
    raise ModelError(
        f"on_meta cannot record random numbers drawn on {device}: build the model on the CPU "
        "inside the block."
    )


def _repeat(
    operation: Operation,
    storages: Sequence[UntypedStorage],
    advance: torch.Generator | None = None,
) -> list[UntypedStorage]:
    try:
        return operation.run(storages, advance)
    except RuntimeError as error:
        raise ModelError(
            f"The operation {operation.function} cannot be repeated: {error}. Build the model "
            "without on_meta, or keep this operation out of its initialisation."
        ) from error


def _order(targets: Sequence[Content]) -> list[Operation]:
    """The operations that make `targets`, each after those it needs."""
    done: dict[Operation, None] = {}
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


def _taken(
    memory: RecordedMemory, held: dict[Content, UntypedStorage], uses: Counter[Content]
) -> UntypedStorage:
    """The storage for `memory`: a copy where it will be written and others need it too."""
    if memory.content is None:
        return new_storage(memory.size, memory.device)
    storage = held[memory.content]
    if not memory.written or uses[memory.content] == 1:
        return storage
    copy: UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copy


def _laid_out(tensor: Tensor, made: AllocatedStorage) -> UntypedStorage:
    """The storage of a result, copied if it lies otherwise than was recorded.

    Shapes are found on the meta device, whose kernels may choose other strides.
    """
    storage = tensor.untyped_storage()
    if Layout.of(tensor) == made.layout and storage.nbytes() == made.size:
        return storage
    storage = new_storage(made.size, tensor.device)
    made.layout.view(storage).copy_(tensor)
    return storage


@contextmanager
def _ambience(
    seed: RecordedDraws | None, dtype: torch.dtype, advance: torch.Generator | None
) -> Iterator[None]:
    """The default dtype and generator as an operation found them.

    A repeated operation draws from the default generator, also where it was given another: at
    the same state both give the same.
    """
    present = torch.get_default_dtype()
    generator = default_generator(seed.device) if seed else None
    before = generator.get_state() if generator else None
    try:
        torch.set_default_dtype(dtype)
        if generator and seed:
            generator.set_state(seed.state)
        yield
        if generator and advance:
            advance.set_state(after := generator.get_state())
            before = after if advance is generator else before
    finally:
        torch.set_default_dtype(present)
        if generator and before is not None:
            generator.set_state(before)


_MAPPED = 2**20  # bytes from which a storage is worth a mapping of its own
_TRIMMED = 2**26  # bytes freed after which looking for them is worth the while

_freed = 0


def new_storage(size: int, device: torch.device) -> UntypedStorage:
    """A storage of `size` bytes, not initialised; a large one leaves no hole when it is freed."""
    if device.type == "cpu" and size >= _MAPPED:
        return mapped(size).untyped_storage()
    storage: UntypedStorage = UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]
    return storage


def give_back(size: int) -> None:
    """Report that `size` bytes of tensors were or will soon be freed; trims the heap at times."""
    global _freed
    _freed += size
    if _freed >= _TRIMMED:
        _freed = 0
        trim()
