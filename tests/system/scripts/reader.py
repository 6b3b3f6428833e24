"""Say what comes in on standard input."""

import sys

print(f"read {sys.stdin.read()!r}")
