"""Storage of a state's bytes: in device memory, on the host, or on a disk."""
