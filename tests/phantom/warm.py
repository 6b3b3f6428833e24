"""Gives the process that imports it a simulated device; programs are forked from that process."""

from tests.phantom import rank

rank.become()
