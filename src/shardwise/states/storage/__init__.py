"""Where the bytes of a state are stored: in device memory, on the host, or on a disk."""
