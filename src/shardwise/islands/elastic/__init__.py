"""Elastic islands: an island that fails is left out, starts again, and comes back.

In a rank:

collectives.py   collectives over the islands that take part; joins them in sw.init
link.py          the rank's end of the link to the broker of its host
returns.py       saves a checkpoint for an island that comes back, and loads it there

In the launcher:

run.py           runs a job on this host
supervisor.py    decides which island has failed, and which one starts again
workers.py       starts the ranks of one island on one host
membership.py    decides which islands take part in an exchange
exchanges.py     follows what ranks bring through the brokers of all hosts
broker.py        the links to the ranks of one host, and the files that ranks have brought

On several hosts:

hosts.py, remote.py  the launcher's side
agent.py             the agent's side
transfers.py         moves files between hosts
"""
