"""Makes islands elastic: a failed island is removed, restarted and readmitted while others train.

In a rank:

collectives.py   collectives over the participating islands; `join` connects a rank in sw.init
link.py          connects the rank to its host's broker
returns.py       saves a checkpoint for a returning island, and loads it there

In the launcher:

run.py           runs a job on this host
supervisor.py    detects failed islands, and decides which ones restart
workers.py       starts an island's ranks on one host
membership.py    decides which islands take part in an exchange
exchanges.py     completes exchanges between ranks over the brokers on all hosts
broker.py        holds the links to a host's ranks, and the files that ranks contribute

On several hosts:

hosts.py, remote.py  the launcher's side
agent.py             the agent's side
transfers.py         copies files between hosts
"""
