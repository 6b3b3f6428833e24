"""Runs the `shardwise` command, also as `python -m shardwise`."""

import signal
import threading


def main() -> int:
    """Import the command line and run it; returns the exit code.

    Ctrl-C during the imports ends the process as it ends other commands, without a traceback.
    """
    # Not if it is ignored, as under nohup, nor if another program runs this function in a thread.
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
