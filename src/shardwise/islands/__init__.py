"""Islands: groups of ranks that average their parameters or gradients now and then.

anchor.py           the parameters of the last exchange, and the outer optimizer's step
island_exchange.py  the exchange between islands
delayed_sums.py     sums that are used some steps later
wire.py             compression of what is exchanged
"""
