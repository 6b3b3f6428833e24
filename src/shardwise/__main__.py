"""Runs the `shardwise` command, also as `python -m shardwise`."""

# Don't import anything else here: Ctrl-C during an import would show Python's traceback.
import signal


def main() -> int:
    """Import the command line, run it and return the exit code.

    Ctrl-C during the imports terminates the process without a traceback, as in other commands.
    """
    # Keep the current handler if SIGINT is ignored (under nohup).
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        except ValueError:  # outside the main thread, which alone receives signals
            is_ours = False
    from shardwise.cli.main import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
