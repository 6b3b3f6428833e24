"""Gives the process that imports it a simulated device: one that programs are forked from."""

from tests.phantom import rank

rank.become()
