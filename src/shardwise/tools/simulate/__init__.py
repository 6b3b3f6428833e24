"""Simulates the time that a long run loses to failures, checkpoints and slow devices.

- failure_classes.py: reads failure classes: their rates, and the hardware that they take down
- run_model.py: the parameters of a run, the causes of lost time, and the slowest of many devices
- simulation.py: draws the events of a simulated run, which its two kinds below share
- trial.py: simulates one run, event by event
- island_trial.py: simulates one run with islands; a failure stops only the islands that it hits
- outcome.py: the result of a trial, and how it spent its time
- slow_links.py: the time that a synchronisation takes on the links between islands
- goodput.py: runs many trials, measures their spread, and finds the best checkpoint interval
- flags.py: defines the command `shardwise simulate`
- command.py: runs the trials and shows the results
- report.py: the request, and the result as sentences and as JSON
- pictures.py: the plots and the HTML page

Components are not simulated one by one. The failures of n components form a single Poisson process
with n times the rate, and the slowest of n devices follows from the n-th power of a device's
distribution function.
"""
