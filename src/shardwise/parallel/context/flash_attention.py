"""Runs the flash attention of Transformers models on full sequences, as in the method "ulysses".

Transformers looks the kernel up in a table of functions. While an engine with `--context` exists,
the table has a function that exchanges tokens for heads before and after the kernel:

    (rows, heads, own length, features)  ──▶  to_heads  ──▶  kernel  ──▶  to_parts

Offsets of documents (`cu_seq_lens_q`) are those of full sequences, and so are unchanged. A trial
runs in fp64, which the kernels do not support, and replaces them with plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise.model import varlen_attention
from shardwise.model.unit_hooks import untraced
from shardwise.parallel.context.attention import ContextRun, active_run
from shardwise.parallel.context.methods import whole_heads
from shardwise.parallel.context.token_exchange import gather, to_parts


class FlashAttention:
    """The replacement of one kernel in the table of Transformers.

    Args:
        kernel: Name of the kernel, the model's `attn_implementation`.
        run: The engine's context run.
    """

    def __init__(self, kernel: str, run: ContextRun) -> None:
        self._kernel, self._run = kernel, run
        self._plain: Callable[..., Any] | None = None
        # A bound method is a new object each time, and the table must have one of them.
        self._function = self._attend

    def install(self) -> None:
        """Replace the kernel."""
        table = _table()
        self._plain = table[self._kernel]
        table[self._kernel] = self._function

    def uninstall(self) -> None:
        """Restore the kernel, unless another engine has replaced it since. Safe to call twice."""
        if self._plain is not None and _table()[self._kernel] is self._function:
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
        run = self._run
        assert self._plain is not None
        if active_run() is not run:
            return self._plain(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
        is_trial = run.agree is not None or run.is_on_whole_sequences
        kernel = varlen_attention.attend if is_trial else self._plain
        if run.is_on_whole_sequences:
            return kernel(module, query, key, value, attention_mask, **options)
        run.note_call("attention", self._problem(query, key, options))
        positions = options.get("position_ids")
        if positions is not None:  # the kernel may read from them where documents begin
            options["position_ids"] = gather(positions, 1, run.lengths, run.group)
        query, key, value = whole_heads([query, key, value], run.lengths, run.group)
        result, _ = kernel(module, query, key, value, attention_mask, **options)
        # (rows, length, heads, features)
        return to_parts(result.transpose(1, 2), run.lengths, run.group).transpose(1, 2), None

    def _problem(self, query: Tensor, key: Tensor, options: dict[str, Any]) -> str | None:
        """Return a message saying why the kernel cannot run on full sequences, or None."""
        run = self._run
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


def _table() -> Any:
    """Return the attention functions of Transformers, by name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS
