"""Runs `torch.nn.attention.flex_attention` on full sequences, or on queries and all keys.

Models import the function by its name, and compile it: `torch.compile(flex_attention)`. To find
these calls too, the function's code object is replaced while an engine with `--context` exists. A
call in the engine's model then exchanges tokens as a call of scaled_dot_product_attention does
(methods.py). It runs torch's code on them, compiled if the call was.

The functions that a call gets see the numbers that they would see in a single process:

    score_mod(score, b, h, q, kv)     h is a head, q and kv are positions
    mask_mod(b, h, q, kv)             of a BlockMask, which is made again for full sequences

Tensors of this rank's tokens that they capture are gathered. A trial compares the ranks' tensors,
whose parts differ in length, so it knows which dimension of a captured tensor is the sequence. The
kernels do not support fp64, so a trial computes attention with plain operations.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from shardwise.parallel.context.attention import ContextRun, active_run
from shardwise.parallel.context.captured_tensors import with_tensors
from shardwise.parallel.context.methods import AttentionCall
from shardwise.parallel.context.token_exchange import gather

MOST_PAIRS = 1 << 26
"""Number of query-key pairs that `whole_mask` computes at once."""

CHECKED = 16
"""Number of masks whose blocks are read. Reading them waits for a GPU."""

# Private, so it may be missing. A function around it would be compiled.
_set_compiler: Any = getattr(torch._C._dynamo.eval_frame, "set_eval_frame", None)


def install(run: ContextRun) -> None:
    """Replace the code of torch's function, unless another run has already replaced it."""
    if missing() is not None:  # a trial refuses calls
        return
    if not _RUNS:
        _prepare()
        _torchs().__code__ = _call_replacement.__code__
    _RUNS.append(run)


def uninstall(run: ContextRun) -> None:
    """Restore the code, unless another run still needs the replacement. Safe to call twice."""
    if run in _RUNS:
        _RUNS.remove(run)
        # If other code has replaced it since, it still calls this replacement.
        if not _RUNS and _torchs().__code__ is _call_replacement.__code__:
            _torchs().__code__ = _plain().__code__


def missing() -> str | None:
    """Return the name of something that torch lacks for calls of flex attention, or None."""
    frames = torch._C._dynamo.eval_frame
    for name in ("set_eval_frame", "set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy"):
        if not hasattr(frames, name):
            return f"torch._C._dynamo.eval_frame.{name}"
    try:
        _torchs()
    except LookupError:
        return "the original function, because other code has replaced it"
    return None


def whole_mask(mod: Any, sizes: Sequence[int], like: BlockMask | None, device: Any) -> BlockMask:
    """Return the BlockMask of `mod`, which torch would compute for all queries at once.

    Args:
        mod: mask_mod(b, h, q, kv).
        sizes: The numbers of rows, heads, queries and keys.
        like: Has the sizes of blocks, unless it is None.
        device: The device of the mask.
    """
    rows, heads, queries, keys = sizes
    blocks: dict[str, Any] = {} if like is None else {"BLOCK_SIZE": like.BLOCK_SIZE}
    height = 128 if like is None else like.BLOCK_SIZE[0]
    chunk = max(MOST_PAIRS // (rows * heads * keys * height), 1) * height
    pieces = []
    # Masks are cached, and the next forward pass may train.
    with torch.inference_mode(mode=False), torch.no_grad():
        for first in range(0, queries, chunk):
            size = min(chunk, queries - first)
            shifted = _Numbers(0, first).of_mask(mod)
            pieces.append(
                create_block_mask(shifted, rows, heads, size, keys, device=device, **blocks)
            )
        if len(pieces) == 1:
            pieces[0].mask_mod = mod
            return pieces[0]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(piece, name) for piece in pieces], 2)
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        }
        return BlockMask.from_kv_blocks(
            **joined,
            BLOCK_SIZE=pieces[0].BLOCK_SIZE,
            mask_mod=mod,
            seq_lengths=(queries, keys),
        )


def moved(mask: BlockMask, device: Any) -> BlockMask:
    """Return `mask` and the tensors that its mask_mod captures on `device`."""
    found = mask.to(device)
    found.mask_mod = with_tensors(mask.mask_mod, lambda _, tensor, __: tensor.to(device))
    return found


@dataclass(frozen=True)
class _Numbers:
    """The numbers of the first head and the first query that a rank computes."""

    head: int
    query: int

    def of_mask(self, mod: Any) -> Any:
        """Return a mask_mod that passes numbers of the whole model to `mod`."""
        head, query = self.head, self.query

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
            return mod(b, h + head, q + query, kv)

        return mask_mod

    def of_score(self, mod: Any) -> Any:
        """Return a score_mod that passes numbers of the whole model to `mod`, or None for None."""
        head, query = self.head, self.query

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
            return mod(score, b, h + head, q + query, kv)

        return None if mod is None else score_mod


@dataclass(frozen=True)
class FlexCall(AttentionCall):
    """A call of flex_attention. `plain` is torch's function, or `reference` in a trial."""

    run: ContextRun
    score_mod: Any
    block_mask: BlockMask | None
    options: dict[str, Any] = field(default_factory=dict)

    prefers_heads = True  # "gathered" does not balance the work of causal masks

    def problem(self) -> str | None:
        """Return a message saying why the mask or the device is unsupported, or None."""
        run, mask = self.run, self.block_mask
        own, total = run.lengths[run.group.rank], sum(run.lengths)
        has_heads = self.score_mod is not None or (mask is not None and mask.shape[1] > 1)
        if run.splits_heads and has_heads:
            return (
                "flex_attention with a score_mod, or a BlockMask for several heads, whose heads "
                "--tensor splits: the mod would get the numbers of heads of one worker. Start "
                "without --tensor, or pass a BlockMask for one head (H=None)"
            )
        if mask is not None:
            lengths = tuple(mask.shape[-2:])
            if len(mask.shape) != 4 or lengths not in [(own,) * 2, (total,) * 2, (run.total,) * 2]:
                return (
                    f"a BlockMask for {lengths[0]} queries and {lengths[1]} keys, but this worker "
                    f"has {own} of {total} tokens. {_MAKE_MASKS}"
                )
            if mask.mask_mod is noop_mask and bool(mask.sparsity()):
                return (
                    "a BlockMask of blocks without a mask_mod, which masks for whole sequences "
                    "need: pass mask_mod= to BlockMask.from_kv_blocks"
                )
            if mask.shape[1] not in (1, self.query.size(1)):
                return f"a BlockMask for {mask.shape[1]} heads, of {self.query.size(1)}"
        if run.agree is None:
            check = getattr(flex, "_validate_device", None)  # private
            try:
                if check is not None:
                    check(self.query, self.key, self.value)
            except NotImplementedError:
                return (
                    f"flex_attention of torch {torch.__version__} has no backward pass on devices "
                    f"of type {self.query.device.type}. Train on a GPU, or call "
                    "torch.nn.functional.scaled_dot_product_attention "
                    '(attn_implementation="sdpa" for models of Transformers)'
                )
        return None

    def compute(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        """Run the function for some heads or for some queries, with all keys."""
        run = self.run
        rank, lengths = run.group.rank, run.lengths
        # `query` has full sequences for some heads, or this rank's part of them for all heads.
        has_all = query.size(2) == sum(lengths)
        numbers = _Numbers(rank * query.size(1), 0) if has_all else _Numbers(0, sum(lengths[:rank]))
        result = self.plain(
            query,
            key,
            value,
            score_mod=numbers.of_score(_whole_mod(self.score_mod, run, "score_mod")),
            block_mask=self._mask(numbers, query, key),
            **self.options | {"enable_gqa": query.size(1) != key.size(1)},
        )
        # The sums of scores are exchanged as results with one feature are.
        return pytree.tree_map_only(Tensor, lambda x: x if x.ndim == 4 else x[..., None], result)

    def _mask(self, numbers: _Numbers, query: Tensor, key: Tensor) -> BlockMask | None:
        """Return the BlockMask of full sequences for the heads and queries from `numbers` on."""
        mask, run = self.block_mask, self.run
        if mask is None:
            return None
        known = _MASKS.setdefault(mask, {})
        is_trial = run.agree is not None
        is_part = mask.shape[-1] == run.lengths[run.group.rank]
        place = tuple(run.lengths), numbers, query.size(1), is_trial
        # A mask of a part has a copy of captured tensors, which the model may change in place
        # before the next forward pass.
        current = run.number if is_part else 0
        if known.get(place, (None, None))[0] != current:
            rows, heads = mask.shape[0], 1 if mask.shape[1] == 1 else query.size(1)
            is_made = not is_trial and (is_part or query.size(2) != key.size(2))
            # The next forward pass may train.
            with torch.inference_mode(mode=False), torch.no_grad():
                if is_made:
                    _check_blocks(mask, run)
                mod = _whole_mod(mask.mask_mod, run, "mask_mod") if is_part else mask.mask_mod
                shifted = numbers.of_mask(mod)
                if is_made:
                    sizes = rows, heads, query.size(2), key.size(2)
                    made = whole_mask(shifted, sizes, mask, query.device)
                else:  # a trial's function only calls the mod
                    made = _sliced(mask, numbers.head, heads, shifted)
            known[place] = current, made
        return known[place][1]


def _sliced(mask: BlockMask, first: int, heads: int, mod: Any) -> BlockMask:
    """Return the part of `mask` for `heads` heads from `first` on, with another mask_mod."""
    sliced = copy.copy(mask) if heads == 1 else mask[:, first : first + heads]
    sliced.mask_mod = mod
    return sliced


def _check_blocks(mask: BlockMask, run: ContextRun) -> None:
    """Raise ModelError if the blocks of `mask` are not those of its mask_mod. Collective.

    Later masks on a GPU, which must not wait for their values, fail with a device-side assertion.
    """
    whole = whole_mask(mask.mask_mod, mask.shape, mask, mask.kv_num_blocks.device)
    is_same = torch.stack(
        [
            (_dense(whole) <= _dense(mask)).all(),  # partial blocks may be more than needed
            (_dense(mask, full=True) <= _dense(whole, full=True)).all(),
        ]
    ).all()
    problem = (
        "a BlockMask whose blocks are not those of its mask_mod, from which a mask for whole "
        "sequences is made. Compute the blocks in the mask_mod: create_block_mask(mask_mod, ...)"
    )
    run.checked_masks += 1
    if run.checked_masks > CHECKED and not is_same.is_cpu:
        torch._assert_async(is_same, f"--context {run.group.size}: {problem}")
    elif not all(run.group.gather_plain(bool(is_same))):
        raise run.error(f"flex_attention gets {problem}")


def _dense(mask: BlockMask, *, full: bool = False) -> Tensor:
    """Return a boolean for each block: whether `mask` computes it, or computes all of its pairs."""
    if not full:
        return mask.to_dense().bool()
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        return torch.zeros_like(mask.to_dense(), dtype=torch.bool)
    blocks = BlockMask.from_kv_blocks(
        mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=mask.BLOCK_SIZE
    )
    return blocks.to_dense().bool()


def _whole_mod(mod: Any, run: ContextRun, kind: str) -> Any:
    """Return `mod` with gathered tensors in place of this rank's parts. Collective."""
    if mod is None:
        return None
    if run.agree is not None:
        _note_captured(mod, run, kind)
    code = getattr(mod, "__code__", type(mod))

    def whole(name: str, tensor: Tensor, can_replace: bool) -> Tensor:
        # All ranks must raise the same error, so the lengths of all ranks count.
        possible = {dim for dim, size in enumerate(tensor.shape) if size in run.lengths}
        if not possible or not can_replace:
            return tensor
        known = run.captured.get((kind, code, name, tensor.ndim))
        found = f"the {kind} of flex_attention captures {_last(name)} {tuple(tensor.shape)}, "
        if known is None:
            raise run.error(
                f"{found}which the trial before training did not see. Capture it in each forward "
                "pass"
            )
        choices = {dims & possible for dims in known}
        if len(choices) > 1:
            raise run.error(
                f"{found}and another layer captures a tensor of this name whose dimensions are "
                "different ones. Use different names"
            )
        dims = sorted(choices.pop())
        return gather(tensor, dims[0], run.lengths, run.group) if dims else tensor

    return with_tensors(mod, whole)


def _note_captured(mod: Any, run: ContextRun, kind: str) -> None:
    """Find the sequence dimensions of captured tensors in a trial. Collective.

    Raises ModelError on all ranks if a tensor cannot be gathered.
    """
    mine: dict[tuple[str, int, bool], list[int]] = {}
    own, code = run.lengths[run.group.rank], getattr(mod, "__code__", type(mod))

    def note(name: str, tensor: Tensor, can_replace: bool) -> Tensor:
        dims = [dim for dim, size in enumerate(tensor.shape) if size == own]
        mine[name, tensor.ndim, can_replace] = dims
        return tensor

    with_tensors(mod, note, reads_globals=True)
    # JSON has no tuples.
    listed = run.group.gather_plain([[*key, dims] for key, dims in mine.items()])
    everyone = [{(name, ndim, can): dims for name, ndim, can, dims in each} for each in listed]
    if len({tuple(key for key in each if key[2]) for each in everyone}) > 1:
        raise run.error(f"the {kind} of flex_attention captures other tensors on other workers")
    for key in everyone[0]:
        if not all(key in each for each in everyone):  # global variables
            continue
        name, ndim, can_replace = key
        # A trial's parts have different lengths, so no other dimension fits on all ranks.
        dims = [dim for dim in everyone[0][key] if all(dim in each[key] for each in everyone)]
        if dims and not can_replace:
            raise run.error(
                f"the {kind} of flex_attention reads {_last(name)}, which has this worker's "
                f"tokens, from a module or a global variable. {_CAPTURE}"
            )
        if len(dims) > 1:
            raise run.error(
                f"the {kind} of flex_attention captures {_last(name)}, whose dimensions "
                f"{' and '.join(map(str, dims))} have this worker's tokens. {_CAPTURE}"
            )
        run.captured.setdefault((kind, code, name, ndim), set()).add(frozenset(dims))


def _last(name: str) -> str:
    """Return the name of a captured tensor without those of functions around it."""
    return name.rpartition(":")[2]


_MAKE_MASKS = "Make masks in the model's forward, or for whole sequences before the batch is split"

_CAPTURE = (
    "Each worker has values for its own tokens only. Assign tensors with one value for each token, "
    "such as the numbers of documents, to a local variable of the function that defines the mod, "
    "and compute with pairs of tokens inside the mod"
)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    return_aux: Any = None,
) -> Any:
    """Compute flex_attention with plain operations, which support any dtype and dispatch modes.

    The arguments and results are torch's, except that only the `mask_mod` of a BlockMask is used.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    del enable_gqa, kernel_options
    copies = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = query @ key.mT * (query.size(3) ** -0.5 if scale is None else scale)
    numbers = [torch.arange(size, device=query.device) for size in scores.shape]
    with TransformGetItemToIndex():  # vmap cannot convert numbers to Python integers
        if score_mod is not None:
            scores = _for_all_pairs(score_mod, (0,))(scores, *numbers)
        if block_mask is not None:
            allowed = _for_all_pairs(block_mask.mask_mod, ())(*numbers)
            scores = scores.masked_fill(~allowed, -torch.inf)
    highest = scores.amax(-1)
    nothing = highest.detach() == -torch.inf  # queries without keys
    weights = scores.masked_fill(nothing[..., None], 0.0).softmax(-1)
    result = weights.masked_fill(nothing[..., None], 0.0) @ value
    sums = scores.masked_fill(nothing[..., None], 0.0).logsumexp(-1)
    sums = sums.masked_fill(nothing, -torch.inf)
    if return_aux is not None:
        asked = {"lse": sums, "max_scores": highest.detach()}
        return result, flex.AuxOutput(
            **{name: x if getattr(return_aux, name) else None for name, x in asked.items()}
        )
    return (result, sums) if return_lse else result


def _for_all_pairs(mod: Any, first: tuple[int, ...]) -> Any:
    """Map `mod` over rows, heads, queries and keys. `first` are the dims of a leading argument."""
    for axis in (3, 2, 1, 0):
        mod = torch.vmap(mod, in_dims=(*first, *(0 if n == axis else None for n in range(4))))
    return mod


def _call_replacement(*args: Any, **kwargs: Any) -> Any:
    # torch's function has this code, but its own global variables.
    import sys

    return sys.modules["shardwise.parallel.context.flex_attention"].attend(*args, **kwargs)


def attend(*args: Any, **kwargs: Any) -> Any:
    """Compute a call of flex_attention, in or outside of an engine's model."""
    # The compiler of the running frames, or None. It must not see the exchanges.
    compiler = _set_compiler(None)
    try:
        return _attend(compiler, *args, **kwargs)
    finally:
        _set_compiler(compiler)


def _attend(compiler: Any, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(_plain()).bind(*args, **kwargs)
    bound.apply_defaults()
    options = dict(bound.arguments)
    tensors = query, key, value = [options.pop(name) for name in ("query", "key", "value")]
    if has_torch_function(tensors):  # see attention.py
        _set_compiler(compiler)  # a mode calls the function again
        try:
            return handle_torch_function(_torchs(), tensors, *tensors, **options)
        finally:
            _set_compiler(None)
    run = active_run()
    if run is None and _RUNS:
        _RUNS[-1].check_outside(query)
    is_trial = run is not None and (run.agree is not None or run.is_on_whole_sequences)

    def plain(*args: Any, **kwargs: Any) -> Any:
        _set_compiler(compiler)
        try:
            return _plain()(*args, **kwargs)
        finally:
            _set_compiler(None)

    if run is not None and run.in_stages:
        raise run.error(
            "flex_attention with --context and --pipeline is not supported. Leave one of the two "
            "flags out, or call torch.nn.functional.scaled_dot_product_attention "
            '(attn_implementation="sdpa" for models of Transformers)'
        )
    if run is not None and run.is_on_whole_sequences:
        _check_whole(options["block_mask"], query, run)
    kernel = reference if is_trial else plain
    if run is None or run.is_on_whole_sequences or run.is_inside_heads:
        return kernel(query, key, value, **options)
    call = FlexCall(
        query,
        key,
        value,
        mask=None,
        dropout=0.0,
        is_causal=False,
        scale=None,
        plain=kernel,
        run=run,
        score_mod=options.pop("score_mod"),
        block_mask=options.pop("block_mask"),
        options=options,
    )
    first = pytree.tree_leaves(result := run.attend(call))[0]
    return pytree.tree_map_only(Tensor, lambda x: x if x is first else x.squeeze(3), result)


def _check_whole(mask: BlockMask | None, query: Tensor, run: ContextRun) -> None:
    """Raise ModelError if a trial on whole sequences gets a mask for other sequences."""
    if mask is not None and mask.shape[-1] not in (query.size(2), run.total):
        raise run.error(
            f"flex_attention gets a BlockMask for {mask.shape[-1]} keys that was not made in the "
            f"model's forward, but sequences have {run.total} tokens. {_MAKE_MASKS}"
        )


@functools.cache
def _torchs() -> Any:
    """Return torch's function, also if its module has a wrapper that compiles it.

    Raises LookupError if the module has other code in its place.
    """
    found: Any = flex.flex_attention
    while hasattr(found, "_torchdynamo_orig_callable"):
        found = found._torchdynamo_orig_callable
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType) or found.__globals__ is not flex.__dict__:
        raise LookupError
    return found


@functools.cache
def _plain() -> Any:
    """Return torch's function with its own code, also while the code is replaced."""
    function = _torchs()
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


@functools.cache
def _prepare() -> None:
    """Copy torch's function, and prepare the functions here for the compiler."""
    _plain()
    # The first two keep the compiler of their callers. It compiles torch's function.
    _run_untraced(_call_replacement, "DEFAULT")
    _run_untraced(attend, "DEFAULT")
    _run_untraced(_attend, "SKIP")


def _run_untraced(function: Any, inner: str) -> None:
    """Run `function` between two compiled graphs, and the calls in it as `inner` says."""
    frames = torch._C._dynamo.eval_frame
    actions = frames._FrameAction
    strategy = frames._FrameExecStrategy(actions.SKIP, getattr(actions, inner))
    frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = (
        "flex_attention with --context exchanges tokens between two graphs: leave fullgraph=True "
        "out"
    )


_RUNS: list[ContextRun] = []
"""The runs of all engines of this process, the oldest first."""

_MASKS: WeakKeyDictionary[BlockMask, dict[Any, tuple[int, BlockMask]]] = WeakKeyDictionary()
"""The masks of full sequences that were made from a model's masks, which all layers share. The
integer is the number of the forward pass, or 0 if the mask does not depend on it."""
