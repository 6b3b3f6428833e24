"""Stores a state's bytes in device memory, in host memory, or on a disk."""
