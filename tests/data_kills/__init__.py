"""Kills ranks while they train, resumes at other sizes, and looks for each sample in the log.

trying.py      draws, runs and judges a training with kills
__main__.py    the command
"""
