"""Islands are groups of ranks that step apart, and exchange parameters or gradients.

hooks.py               chooses what an engine calls around its steps, and checks its settings
parameter_averaging.py each island makes its own updates; every H steps they average parameters
bounded_staleness.py   all islands make the same updates, from gradients that are S steps old
anchor.py              the last common parameters, and the outer optimizer's step
difference_exchange.py what is in transit of the differences to the anchor
delayed_sums.py        what is in transit of gradient sums
wire.py                compression of what is sent
checkpoint.py, checkpoint_tensors.py  what islands add to a checkpoint
elastic/               islands that end and come back while the others go on
"""
