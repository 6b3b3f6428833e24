"""Decides which programs make sense in plain PyTorch and under the promise."""

from tests.parity.random_programs import blocks
from tests.parity.random_programs.optimizers import BY_SIGN, REAL_ONLY
from tests.parity.random_programs.program import Net, Optimizer, Part, Phase, Program, Step

CYCLED = {"adam", "adamw", "adamax", "nadam", "radam"}
"""Optimizers with a beta1, which OneCycleLR uses in place of momentum."""

STREAM_ROWS = 12
"""Rows of each batch of a stream. Every number of workers divides it, so that batches of a sharded
stream have the same rows as in the whole stream."""

SPLITTABLE = {"residual", "hooked", "gated", "late:2", "late:4", "in_training", "adapter"}
SPLITTABLE |= {"attention", "multi_head", "encoder", "decoder", "experts:3", "experts:5"}
"""Blocks that --tensor may split."""


def looks_across(program: Program) -> bool:
    """Return whether a forward pass depends on the combination or number of its rows."""
    names = {name for net in program.nets for name in net.blocks}
    return bool(names & (blocks.ACROSS_ROWS | blocks.COUNT_FORWARDS))


def counts_forwards(program: Program) -> bool:
    """Return whether a program depends on the number of forward passes."""
    return any(name in blocks.COUNT_FORWARDS for net in program.nets for name in net.blocks)


def sensible(program: Program) -> bool:
    """Return whether plain PyTorch runs the program, and the promise covers its result."""
    return (
        all(_sensible_net(net, first=i == 0) for i, net in enumerate(program.nets))
        and all(_sensible_optimizer(each, program) for each in program.optimizers)
        and all(_sensible_phase(phase, program) for phase in program.phases)
        and not (program.family == "gan" and any(n.checkpoint == "reentrant" for n in program.nets))
        and not (len(program.phases) > 1 and (counts_forwards(program) or program.average))
        and all(_sensible_step(step, program) for _, step in program.steps())
        and _same_batches(program)
    )


def _sensible_net(net: Net, *, first: bool) -> bool:
    if net.tied and ("sparse", True) in net.embedding:  # the head's gradient is dense
        return False
    over_time = any(name in blocks.OVER_TIME for name in net.blocks)
    if net.checkpoint and {*net.blocks} & {"hooked", "in_place", *blocks.COUNT_FORWARDS}:
        return False
    if net.checkpoint == "reentrant" and not first:
        return False
    return (net.modality == "tokens" or not (over_time or net.tied or net.embedding)) and (
        first or net.modality == "features"
    )


def _sensible_optimizer(optimizer: Optimizer, program: Program) -> bool:
    names = {name for net in program.nets for name in net.blocks}
    if optimizer.name in BY_SIGN and names & blocks.ZERO_GRADIENTS:
        return False
    if optimizer.name in REAL_ONLY and "complex" in names:
        return False
    if optimizer.schedule == "one_cycle" and not (
        optimizer.name in CYCLED or "momentum" in dict(optimizer.options)
    ):
        return False
    sparse = any(("sparse", True) in net.embedding for net in program.nets)
    if (optimizer.name == "sparse_adam") > sparse:
        return False
    if optimizer.name in ("muon", "sparse_adam") and not optimizer.rest:
        return False
    return not (optimizer.later and (optimizer.rest or program.family == "gan"))


def _sensible_phase(phase: Phase, program: Program) -> bool:
    """Return whether a phase makes sense; not BatchNorm over micro-batches, for example."""
    config = phase.config
    if config.tensor > 1 and not any(name in SPLITTABLE for name in program.nets[0].blocks):
        return False
    if any(("scale_grad_by_freq", True) in net.embedding for net in program.nets) and (
        config.size > 1 or config.micro_batch_size or config.exact or config.microbatches
    ):
        return False  # it counts within one forward, as the start lines say
    if looks_across(program):
        parts = config.pipeline > 1 or config.call == "forward_backward"
        if parts and config.microbatches != 1:
            return False
        return config.micro_batch_size is None and config.exact is None
    evaluates = any("evaluate" in event for step in phase.steps for event in step.before)
    several = any(len(step.parts[0].losses) > 1 for step in phase.steps)
    # It refuses world.share, and several backwards of a batch.
    return config.exact is None or not (evaluates or several)


def _sensible_step(step: Step, program: Program) -> bool:
    if step.ahead and not all(_explicit(p) and len(p.losses) == 1 for p in step.parts):
        return False
    if any(("sparse", True) in net.embedding for net in program.nets) and (
        step.clip is not None or any({"l2", "norms"} & {*part.losses} for part in step.parts)
    ):
        return False  # torch clips only dense gradients, and sparse optimizers take no others
    sums = [part.losses[0] == "sum" for part in step.parts]
    if any(sums) and not all(sums):  # one step, one reduction
        return False
    return all(_sensible_part(part, program) for part in step.parts)


def _sensible_part(part: Part, program: Program) -> bool:
    net = program.nets[0]
    if looks_across(program) and part.cuts is not None:
        return False
    if program.synchronised and part.rows < 4:
        return False
    over_items = {"ignored", "class_weights"} & {*part.losses}
    if over_items and (net.modality != "tokens" or len(part.losses) > 1 or part.shared):
        return False
    if counts_forwards(program) and len(part.losses) > 1:
        return False
    if "tokens" in part.losses and (net.modality != "tokens" or len(part.losses) > 1):
        return False
    if "sum" in part.losses and (
        len(part.losses) > 1 or _explicit(part) or part.cuts is not None or part.shared
    ):
        return False
    own = {"penalty", "method", "functional", "hook"} & {*part.losses}
    if own and (program.family != "one" or net.checkpoint):
        return False
    return not (net.modality == "tokens" and "penalty" in part.losses)


def _same_batches(program: Program) -> bool:
    """Return whether a Loader can give these batches: equal sizes, one part per step."""
    if program.feed == "share":
        return True
    if program.feed == "stream" and any(
        part.rows != STREAM_ROWS or part.losses[0] == "sum"
        for _, step in program.steps()
        for part in step.parts
    ):
        return False
    steps = [step for _, step in program.steps()]
    rows = [step.parts[0].rows for step in steps]
    return all(len(step.parts) == 1 for step in steps) and (
        {*rows[:-1]} <= {rows[0]} and rows[-1] <= rows[0]
    )


def _explicit(part: Part) -> bool:
    return part.explicit or part.factor != 1 or "tokens" in part.losses
