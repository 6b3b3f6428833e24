"""The refusals that are right: a program that meets one has asked for what cannot be had.

Everything else that is refused is a finding: a program that plain PyTorch runs should run.
"""

import re

RIGHT: dict[str, str] = {}
"""By a pattern of the message, why it is right to refuse."""


def why(words: str) -> str | None:
    """Why a refusal with these words is right; None where it is not known to be."""
    for pattern, reason in RIGHT.items():
        if re.search(pattern, words):
            return reason
    return None
