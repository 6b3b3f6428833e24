"""`python -m shardwise` is the `shardwise` command."""

from shardwise.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
