"""Islands: groups of ranks that step separately, and exchange parameters or gradients.

hooks.py               chooses what an engine calls around its steps, and checks its settings
parameter_averaging.py each island updates separately; every H steps islands average parameters
bounded_staleness.py   all islands make the same updates, from gradients that are S steps old
anchor.py              the last common parameters, and the outer optimizer's step
difference_exchange.py sends differences to the anchor, and applies their mean
delayed_sums.py        sends gradient sums, and applies them some steps later
wire.py                compression of messages
checkpoint.py, checkpoint_tensors.py  the islands' part of a checkpoint
elastic/               islands that can fail and return while the others train
"""
