"""The engine: backward and step, and what they are made of.

engine.py       what an engine is made of; whole tensors, state, exports
backwards.py    backward: seeds autograd
stepping.py     step: reduces, exchanges, updates; whole gradients in between
closures.py     steps with a closure
drawing.py      what random numbers are a function of
takeover.py     models and optimizers made ready, followed, given back
spec.py       what an engine is made from
assembly.py     from models and optimizers to the three states, and back for a rebuild
sectioning.py   which unit each parameter belongs to
starting.py     the values that training starts from
alike.py        that all ranks built the same model
exact_mean.py   weights, and the one division
window.py       what a step has seen, and what ranks tell each other of it
exchange.py     the one small collective of a step
access.py       whole tensors for the user
habits.py       what users write by habit and would be silently wrong
diagnosis.py    a gradient that is not finite: whose
resumable.py    track, save, resume, load
checkpoints.py  what stands beside the tensors, and a save on its way
saving.py       every rank its byte ranges, then one name
loading.py      each rank what it holds, whoever wrote it
inventory.py    the tensors of an engine by name
start_lines.py  what is on, said at the start
describe.py     what lies where, as a table
figures.py      numbers as a person reads them
several.py      several engines, saved as one
"""

from shardwise.engine.engine import Engine
from shardwise.engine.engines import Engines
from shardwise.engine.step_statistics import StepStats

__all__ = ["Engine", "Engines", "StepStats"]
