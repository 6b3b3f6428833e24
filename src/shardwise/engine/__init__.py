"""The engine: backward and step, and what they are made of.

engine.py       the algorithm: backward seeds autograd, step reduces, exchanges, updates
exact_mean.py   weights, and the one division
window.py       what a step has seen, and what ranks tell each other of it
assembly.py     from models and optimizers to the three states, and back for a rebuild
habits.py       what users write by habit and would be silently wrong
diagnosis.py    a gradient that is not finite: whose
start_lines.py  what is on, said at the start
"""

from shardwise.engine.engine import Engine
from shardwise.engine.window import StepStats

__all__ = ["Engine", "StepStats"]
