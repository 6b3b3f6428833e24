"""Runs the `shardwise` command, also as `python -m shardwise`."""

import signal
import threading


def main() -> int:
    """Import the command line, run it and return the exit code.

    Ctrl-C during the imports terminates the process without a traceback, as in other commands.
    """
    # Keep the current handler if SIGINT is ignored (under nohup), or outside the main thread.
    is_ours = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    )
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shardwise.cli.main import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
