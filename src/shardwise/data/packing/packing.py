"""`sw.Packing`, the user's options for packing documents into rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from shardwise.data.packing.trial import check_model
from shardwise.errors import DataError

ATTENTION = ("mask", "positions", "flash", "cu_seqlens")


class Packing:
    """Puts documents end to end into rows of a fixed length. Pass it to `sw.Loader` as `pack`.

    The model is tested once, with a copy in fp64 on the CPU: its outputs and gradients must be the
    same for packed documents as for single documents. If packing changes the result, an error names
    the first module whose result differs. Hooks do not run in the test.

    A batch is a dict of tensors:

    - input_ids, int64 of shape (rows, row). Unused positions at the end of a row are 0.
    - labels, int64 of shape (rows, row): the sample's labels, or its input_ids. They are -100 at
      unused positions and at the first token of each document, because no earlier token of the
      same document predicts it. Models that shift labels themselves, as in Transformers, use them
      unchanged.
    - position_ids, int64 of shape (rows, row): they start at 0 in each document.
    - With attention="mask": attention_mask, bool of shape (rows, 1, row, row). Each token
      attends to itself and to the earlier tokens of its document.
    - With attention="flash": cu_seq_lens_q and cu_seq_lens_k, int32 of shape (documents + 1,): the
      start of each document in the flattened rows, and the end of the last one. The unused
      positions of a row form a document too. max_length_q and max_length_k, ints, are the length of
      the longest document.
    - With attention="cu_seqlens": cu_seqlens, int32 of shape (documents + 1,): the start of each
      document in the flattened rows, and the end of the last one. The unused positions of a row
      form a document too. max_seqlen, an int, is the length of the longest document.
    - Other fields of a sample with one value per token, 0 at unused positions. shift_labels, which
      hold the next token's label, are -100 there. With `--context`, models outside of Transformers
      need them, because the first label of the next part is not in this rank's part.

    Args:
        model: The model to train, or a smaller one of the same classes. False skips the test.
        row: Number of tokens in a row.
        attention: How the model learns where documents start, besides position_ids. "mask" is for
            models that pass a mask of four dims to attention. "positions" passes nothing else. It
            is for Transformers models with `config.use_cache=False`, which infer the documents from
            position_ids. "flash" is for Transformers models that use flash attention. In the test,
            plain arithmetic replaces the kernel, which does not run on the CPU. "cu_seqlens" is for
            your own variable-length attention kernels.
        call: Returns the scores of a batch, of shape (rows, row, ...), as `call(model, batch)`.
            Default: `model(**batch)` without labels.

    Raises:
        DataError: If an argument is invalid, or if packing changes the results of the model.

    Example:
        ```python
        loader = sw.Loader(
            dataset,
            tokens=32768,
            length=lambda sample: len(sample["input_ids"]),
            pack=sw.Packing(model, row=2048),
            micro_batch_tokens=4096,  # two rows
        )
        for step in loader.steps():
            for batch in step:
                engine.backward(model(**batch).loss)
            engine.step()
        ```
    """

    def __init__(
        self,
        model: nn.Module | Literal[False],
        row: int,
        *,
        attention: str = "mask",
        call: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
    ) -> None:
        if not isinstance(row, int) or isinstance(row, bool) or row < 1:
            raise DataError(f"row must be an integer of 1 or more, not {row!r}.")
        if attention not in ATTENTION:
            raise DataError(f"attention must be one of {', '.join(ATTENTION)}, not {attention!r}.")
        self.row, self.attention = row, attention
        if isinstance(model, nn.Module):
            check_model(model, attention, call)
        elif model is not False:
            raise DataError(
                f"Packing needs the model, to test that packing does not change its results, but "
                f"got {model!r}: write Packing(model, row={row})."
            )
