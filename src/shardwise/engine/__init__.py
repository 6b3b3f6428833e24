"""The engine, which runs backward and step on the states.

Called by users, and its parts:

engine.py              Engine, with everything that users call
engine_state.py        the state that the parts of an engine share
backward.py            weights losses, seeds autograd, collects gradients (accumulation)
step.py                reduces, exchanges, clips, updates, clears
state_access.py        whole parameters, averages, plain optimizer state
random_state.py        the random generators of a rank
engines.py             several engines, saved together

Creating an engine:

engine_spec.py         models, optimizers, settings and groups of ranks
user_objects.py        prepares the user's objects, follows their changes, gives them back
build.py               lays out the three states, and takes them apart
unit_assignment.py     the unit that each parameter is gathered with
initial_values.py      rank 0's values for all ranks, memory for meta tensors
consistency.py         checks that all ranks have the same model, options and writes
tensor_parallel.py, pipeline_parallel.py   their checks, and splitting the model

In a step:

gradient_weighting.py  the weight of a loss, the seed of autograd, the one division
gradient_hooks.py      refuses hooks on parameters that are not linear and see a part of a gradient
loss_accumulation.py   the weights and losses since the last step
exchange.py            the one small collective of a step
step_statistics.py     the reports of ranks, and their totals
exact_mode.py          checks and sums of the exact mode
closures.py            checks of steps with a closure
recording.py           records the results of each step, for `shardwise verify`
diagnosis.py           finds the parameter, rank and samples of a gradient that is not finite

Plain tensors (for checkpoints see the package checkpoint/):

whole_tensors.py       whole parameters, exports
plain_state_dict.py    builds and loads plain optimizer state_dicts
whole_optimizer.py     whole state for the methods of a user's optimizer

Messages to the user:

usage_checks.py        refuses lines that would be silently wrong
loss_terms.py          reads from the graph of a loss how many items it is a mean over
start_lines.py, describe.py   the lines at the start, and the table of describe()
"""

from shardwise.engine.engine import Engine
from shardwise.engine.engines import Engines
from shardwise.states.step_totals import StepStats

__all__ = ["Engine", "Engines", "StepStats"]
