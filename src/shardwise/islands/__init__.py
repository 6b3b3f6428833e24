"""Trains in islands: groups of ranks that step separately and exchange parameters or gradients.

hooks.py               selects the engine's step hooks, and checks its settings
parameter_averaging.py islands update separately, and average parameters every H steps
bounded_staleness.py   all islands apply the same updates, from gradients that are S steps old
anchor.py              stores the last common parameters, and applies outer updates
difference_exchange.py sends differences from the anchor, and applies their mean
delayed_sums.py        sends gradient sums, and returns their total some steps later
wire.py                compresses messages
checkpoint.py, checkpoint_tensors.py  save and load the islands' part of a checkpoint
elastic/               lets islands fail and return while the other islands continue to train
"""
