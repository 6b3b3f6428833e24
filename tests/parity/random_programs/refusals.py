"""The valid refusals: a program that gets one has asked for something impossible.

Any other refusal is a finding: a program that plain PyTorch runs should run.
"""

import re

RIGHT: dict[str, str] = {
    r"are means over different kinds of items": "their weights are unclear without weight=",
    r"needs whole tensors, but with --off": "each worker, or span of a file, has a part",
    r"found nothing to split": "without a layer to split, --tensor would train copies",
    r"zero-bubble splits backward in two": "both halves would gather, or recompute, everything",
    r"several stages on each worker .* Write loss = engine.forward_backward": "in a plain loop "
    "nobody knows which of a worker's stages is next",
    r"Register the modules in the order of their use": "a stage would wait for a later one",
    r"depends on values, which the ranks of other stages do not have": "shapes must be known "
    "where a tensor is not",
    r"Stage \d+ .* has nothing to train": "its worker would have no part in any update",
    r"engine.uneven\(\) with --pipeline": "no worker has all layers",
    r"add_param_group after sw.Engine\(...\) with --pipeline": "whose layers they are is settled",
    r"Start without --pipeline to use gradients inside of a loss": "each worker has a part of the "
    "graph",
    r"PlacementError: The row .* is not legal": "the table of rows says so",
    r"hold tensors of torch.complex": "safetensors, the format of checkpoints, has no such type",
    r"max_norm=.* rescales in forward the rows": "each worker would rewrite the rows that it sees",
    r"sparse(, | gradients only, )which flat buckets cannot hold": "gradients are in flat buckets",
    r"gave this worker a stand-in that does not count": "rows that are cut by hand",
    r"was written (while sharded|\(\w+\) while it is sharded)": "whole parameters are written in "
    "full_parameters(write=True)",
    r"ParameterAccess: .* was read \(\w+\) while it is sharded": "a worker holds a part",
    r"copy_ writes a value that only one stage has into a tensor that all ranks have": "an average "
    "by hand of what other workers have",
    r"--activations recomputed runs .* again as one block, but with --pipeline": "a unit "
    "that is on several workers cannot be run again as one",
    r"--exact \d+: the gradient of .* Write --no-overlap": "sums have already started",
    r"Some batches of the step have a further loss and others do not": "it may be a mean over "
    "either batch or both",
    r"mean over [\d.,]+ items \(cross_entropy\), weighed by .* in engine.forward_backward "
    "weight=": "the other stages of a pipeline do not see the labels",
    r"changes its input in place. Its forward runs again in backward": "its input is gone",
    r"\(--pipeline\) went into a torch.autograd.Function": "its backward is not on all stages",
    r"Model has \d+ layer\(s\) \(.*\), fewer than \d+ stages": "each stage needs a layer",
}
"""Patterns of messages, and why the refusal is valid."""


def why(words: str) -> str | None:
    """Return why an error with these words is valid, or None if it is unexpected."""
    flat = " ".join(words.split())
    return next((why for pattern, why in RIGHT.items() if re.search(pattern, flat)), None)
