"""`shardwise verify --stock`: compares a distributed script of any library with one process.

Ranks and reference run the script unchanged. A hook at interpreter start (start/sitecustomize.py)
records in each of them what the optimizers get (recorder.py) and what the loaders yield
(batches.py). The reference is the script in one process, whose loaders yield the union of what the
ranks were given.

findings.py names the mistakes that records prove, metrics.py those of evaluations, and suspects.py
the possible causes of a difference, each with the alterations (alterations.py) that would remove
it. stock_flow.py tries them.
"""
