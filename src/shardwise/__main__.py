"""Runs the `shardwise` command as `python -m shardwise`."""

from shardwise.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
