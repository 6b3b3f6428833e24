"""Elastic islands: a failed island is removed, starts again, and returns, while others train.

In a rank:

collectives.py   collectives over the islands that take part; joins them in sw.init
link.py          the rank's end of the link to the broker of its host
returns.py       saves a checkpoint for a returning island, and loads it there

In the launcher:

run.py           runs a job on this host
supervisor.py    decides which island has failed, and which one starts again
workers.py       starts the ranks of one island on one host
membership.py    decides which islands take part in an exchange
exchanges.py     completes exchanges between ranks over the brokers of all hosts
broker.py        holds the links to the ranks of one host, and the files that ranks contribute

On several hosts:

hosts.py, remote.py  the launcher's side
agent.py             the agent's side
transfers.py         copies files between hosts
"""
