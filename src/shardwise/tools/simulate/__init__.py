"""Simulates a run of days on many devices: what failures, saves and slow devices leave of its time.

- failure_classes.py: the catalogue of what fails, how often, and what it takes with it
- run_model.py: a run as it is simulated, the causes of lost time, and the slowest of many devices
- trial.py: one run from its start to its end, event by event
- island_trial.py: the same of islands, of which a failure stops only those that it hits
- outcome.py: what came of a run, and the books of its time meanwhile
- slow_links.py: what the links between islands take at a boundary
- goodput.py: many trials, their spread, and the best interval between checkpoints
- flags.py: the command `shardwise simulate`
- command.py: makes the trials and shows what they found
- report.py: what was asked and found, in sentences and as JSON
- pictures.py: the plots and the page

Ranks that do the same are one: failures of n components are one Poisson process of n times the
rate, and the slowest of n devices is drawn from the n-th power of the distribution of one.
"""
