"""Print the data received on standard input."""

import sys

print(f"read {sys.stdin.read()!r}")
