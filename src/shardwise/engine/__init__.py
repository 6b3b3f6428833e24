"""Implements the engine, which runs the backward pass and the step on a model's states.

Public interface and its implementation:

engine.py              Engine, with all methods that users call
engine_state.py        state shared by the modules below
backward.py            weights losses, runs autograd, collects and accumulates gradients
step.py                reduces, exchanges, clips, updates, clears
state_access.py        full parameters, EMA averages, plain optimizer state
random_state.py        seeds a rank's random generators
guarded.py             calls the guard around backward and step (--guard)
engines.py             saves and resumes several engines together

Creating an engine:

engine_spec.py         models, optimizers, settings and process groups of an engine
user_objects.py        prepares the user's objects, tracks changes to them, restores them
build.py               builds the parameter, gradient and optimizer states, and dismantles them
unit_assignment.py     assigns each parameter to the unit that gathers it
initial_values.py      broadcasts rank 0's values, allocates meta tensors
consistency.py         checks that all ranks have the same model, options and writes
tensor_parallel.py, pipeline_parallel.py   validate their settings and split the model

During a step:

gradient_weighting.py  computes a loss's weight, the autograd seed and the final divisor
gradient_hooks.py      rejects nonlinear hooks on parameters that see only part of a gradient
loss_accumulation.py   records weights and losses since the last step
exchange.py            the single small collective of each step
step_statistics.py     per-rank reports and their totals
exact_mode.py          checks and sums for exact mode
closures.py            checks for steps with a closure
recording.py           records each step's results for `shardwise verify`
diagnosis.py           finds the parameter, rank and samples behind a non-finite gradient

Plain tensors (for checkpoints, see the package checkpoint/):

whole_tensors.py       full parameters, exports
plain_state_dict.py    builds and loads plain optimizer state_dicts
whole_optimizer.py     full state for the methods of a user's optimizer

Messages to the user:

usage_checks.py        rejects calls that would silently give wrong results
loss_terms.py          reads from a loss's autograd graph how many items it averages over
start_lines.py, describe.py   the startup summary and the table of describe()
"""

from shardwise.engine.engine import Engine
from shardwise.engine.engines import Engines
from shardwise.parallel.expert.expert_counts import ExpertCounts
from shardwise.states.step_totals import StepStats

__all__ = ["Engine", "Engines", "ExpertCounts", "StepStats"]
