"""Runs the flash attention of Transformers models on full sequences, as in the method "ulysses".

Transformers looks the kernel up in a table of functions. While an engine with `--context` exists,
the table has a function that exchanges tokens for heads before and after the kernel:

    (rows, heads, own length, features)  ──▶  to_heads  ──▶  kernel  ──▶  to_parts

Offsets of documents (`cu_seq_lens_q`) are those of full sequences, and so are unchanged. A trial
runs in fp64, which the kernels do not support, and replaces them with plain arithmetic.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.model import varlen_attention
from shardwise.model.unit_hooks import untraced
from shardwise.parallel.context.attention import ContextRun, active_run
from shardwise.parallel.context.methods import whole_heads
from shardwise.parallel.context.token_exchange import gather, to_parts


def install(kernel: str, run: ContextRun) -> None:
    """Replace `kernel`, a model's `attn_implementation`, unless it is already replaced."""
    if kernel not in _REPLACEMENTS:
        _REPLACEMENTS[kernel] = _Replacement(kernel)
    _REPLACEMENTS[kernel].runs.append(run)


def uninstall(kernel: str, run: ContextRun) -> None:
    """Restore `kernel`, unless another run still needs the replacement. Safe to call twice."""
    found = _REPLACEMENTS.get(kernel)
    if found is None or run not in found.runs:
        return
    found.runs.remove(run)
    if not found.runs:
        del _REPLACEMENTS[kernel]
        found.restore()


class _Replacement:
    """The replacement of one kernel in the table of Transformers, for the runs of all engines."""

    def __init__(self, kernel: str) -> None:
        self.runs: list[ContextRun] = []
        self._positions: Tensor | None = None
        self._whole_positions: Tensor | None = None
        table = _table()
        self._kernel, self._plain = kernel, table[kernel]
        # A bound method is a new object each time, and the table must have one of them.
        self._function = table[kernel] = self._attend

    def restore(self) -> None:
        # If other code has replaced the function since, it still calls this replacement, which then
        # passes all calls on.
        if _table()[self._kernel] is self._function:
            _table()[self._kernel] = self._plain

    @untraced
    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        run = active_run()
        if run is None or run not in self.runs:
            return self._plain(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
        is_trial = run.agree is not None or run.is_on_whole_sequences
        kernel = varlen_attention.attend if is_trial else self._plain
        if run.is_on_whole_sequences:
            return kernel(module, query, key, value, attention_mask, **options)
        run.note_call("attention", self._problem(run, query, key, options))
        positions = options.get("position_ids")
        if positions is not None:  # the kernel may read from them where documents begin
            # Once per forward pass, because all layers get the same tensor.
            if run.calls == 1 or positions is not self._positions:
                whole = gather(positions, 1, run.lengths, run.group)
                self._positions, self._whole_positions = positions, whole
            options["position_ids"] = self._whole_positions
        query, key, value = whole_heads([query, key, value], run.lengths, run.group)
        result, _ = kernel(module, query, key, value, attention_mask, **options)
        # (rows, length, heads, features)
        return to_parts(result.transpose(1, 2), run.lengths, run.group).transpose(1, 2), None

    def _problem(
        self, run: ContextRun, query: Tensor, key: Tensor, options: dict[str, Any]
    ) -> str | None:
        """Return a message saying why the kernel cannot run on full sequences, or None."""
        own, heads = run.lengths[run.group.rank], query.size(1)
        if (query.size(2), key.size(2)) != (own, own):
            return (
                f"attention over queries and keys of lengths {query.size(2)} and {key.size(2)}, "
                f"but this worker has {own} of {sum(run.lengths)} tokens. Cross-attention and "
                "caches of keys are not possible yet: train without --context"
            )
        if heads % run.group.size:
            return (
                f"{heads} attention heads cannot be spread evenly, as {self._kernel} needs. Write "
                'attn_implementation="sdpa"'
            )
        if options.get("s_aux") is not None:
            return (
                f"{self._kernel} with sinks, which have a value for each head. Write "
                'attn_implementation="sdpa"'
            )
        return None


_REPLACEMENTS: dict[str, _Replacement] = {}
"""The replacements of kernels that the engines of this process use, by kernel."""


def _table() -> Any:
    """Return the attention functions of Transformers, by name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS
