"""Losses of ranks at random moments of a run with `--survive`, compared with the undisturbed run.

- drawing.py: draws the losses of a run from a seed
- model.py: the models that the script trains
- reference.py: computes the undisturbed run in one plain PyTorch process
- judging.py: runs `tests/system/scripts/survives.py` with the losses, and compares
- __main__.py: python -m tests.random_losses --losses 200 --seed 1
"""
