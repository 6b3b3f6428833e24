"""The engine runs backward and step on the states.

What users call, and what works behind it:

engine.py              Engine, the list of what users may call
engine_state.py        what the parts of an engine share
backward.py            weights losses, seeds autograd, collects gradients (accumulation)
step.py                reduces, exchanges, clips, updates, clears
state_access.py        whole parameters, averages, plain optimizer state
random_state.py        the generators of a rank
engines.py             several engines, saved as one

Making an engine:

engine_spec.py         models, optimizers, settings and groups of ranks
user_objects.py        prepares the user's objects, follows their changes, gives them back
build.py               lays out the three states, and takes them apart
unit_assignment.py     the unit that each parameter is gathered with
initial_values.py      rank 0's values for all, memory for meta tensors
consistency.py         all ranks have the same model, options and writes
tensor_parallel.py, pipeline_parallel.py   what they exclude; applied to the model

In a step:

gradient_weighting.py  the weight of a loss, the seed of autograd, the one division
gradient_hooks.py      refuses hooks on parameters that would see a part and are not linear
loss_accumulation.py   the weights and losses since the last step
exchange.py            the one small collective of a step
step_statistics.py     what ranks report, and the totals of all
exact_mode.py          the same for the exact mode
closures.py            steps with a closure
recording.py           writes down what a step computed, for `shardwise verify`
diagnosis.py           who is to blame for a gradient that is not finite

Plain tensors (checkpoints are a package of their own, checkpoint/):

whole_tensors.py       whole parameters, exports
plain_state_dict.py    plain optimizer state_dicts, made and taken

What is said to the user:

usage_checks.py        refuses lines that would be silently wrong
loss_terms.py          reads what a loss is a mean over from its graph
start_lines.py, describe.py
"""

from shardwise.engine.engine import Engine
from shardwise.engine.engines import Engines
from shardwise.engine.step_statistics import StepStats

__all__ = ["Engine", "Engines", "StepStats"]
