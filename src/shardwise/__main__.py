"""Runs the `shardwise` command, also as `python -m shardwise`."""

# Don't import anything else here: Ctrl-C during an import would show Python's traceback. `signal`
# takes milliseconds to import, but this built-in module, on which it is based, does not.
import _signal  # type: ignore[import-not-found]


def main() -> int:
    """Import the command line, run it and return the exit code.

    Ctrl-C during the imports terminates the process without a traceback, as in other commands.
    """
    # Keep the current handler if SIGINT is ignored (under nohup).
    is_ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if is_ours:
        try:
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        except ValueError:  # outside the main thread, which alone receives signals
            is_ours = False
    from shardwise.cli.main import main as run

    if is_ours:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
