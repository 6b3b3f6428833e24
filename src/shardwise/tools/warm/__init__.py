"""Warm ranks, which are forked from a process that has imported torch and the script's packages."""
