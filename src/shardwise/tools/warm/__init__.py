"""Warm ranks: forked from a process that has already imported torch and the script's packages."""
