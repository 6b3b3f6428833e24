"""Runs the `shardwise` command, also as `python -m shardwise`."""

import signal


def main() -> int:
    """Import the command line and run it; returns the exit code.

    Ctrl-C during the imports ends the process as it ends other commands, without a traceback.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where it is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shardwise.cli import main as run

    signal.signal(signal.SIGINT, before)
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
