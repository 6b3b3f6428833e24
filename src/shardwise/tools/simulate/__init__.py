"""Simulates a run of days on many devices: the time lost to failures, saves and slow devices.

- failure_classes.py: the catalogue of failures: kinds, rates, and the hardware they take down
- run_model.py: the model of a run, the causes of lost time, and the slowest of many devices
- trial.py: one run from start to end, event by event
- island_trial.py: the same with islands: a failure stops only the islands that it hits
- outcome.py: the result of a run, and the account of its time
- slow_links.py: the time of a boundary on the links between islands
- goodput.py: many trials, their spread, and the best interval between checkpoints
- flags.py: the command `shardwise simulate`
- command.py: runs the trials and shows the results
- report.py: the request and the result, in sentences and as JSON
- pictures.py: the plots and the page

Equal ranks are simulated as one: failures of n components are one Poisson process of n times the
rate, and the slowest of n devices is drawn from the n-th power of one device's distribution.
"""
