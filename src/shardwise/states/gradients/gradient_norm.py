"""Clips gradients by their global norm.

Each rank squares its intervals of the gradient sums, one bucket at a time as the sums complete
(`states/storage/squared_sums.py`). `engine/exchange.py` adds the squares of all ranks and pipeline
stages. The update multiplies gradients by `clip_coefficient` and divides them by the step's weight
in the same operation.

    bucket's sum ─▶ square_span ─┐
    bucket's sum ─▶ square_span ─┼─▶ exchange across ranks ─▶ sqrt ─▶ clip_coefficient
    ...                          ┘
"""


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of global 2-norm `norm` to `max_norm`.

    Returns 1 if `max_norm` is None. torch.nn.utils.clip_grad_norm_ uses the same formula.
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
