"""Runs a program and passes it its local rank as an argument, as DeepSpeed's launcher does.

    python -m shardwise.launch.local_rank COUNT WORD ...

This runs the command `WORD ...`, with `--local_rank=N` inserted after the first COUNT words.
"""

import os
import sys

from shardwise.net.launchers import detection as launcher_detection


def main(arguments: list[str]) -> None:
    """Replace this process with the program.

    Args:
        arguments: COUNT, followed by the words of the command.
    """
    count, *words = arguments
    place = int(count)
    local_rank = launcher_detection.identify().local_rank
    line = [*words[:place], f"--local_rank={local_rank}", *words[place:]]
    # exec discards buffered output.
    sys.stdout.flush()
    os.execvp(line[0], line)


if __name__ == "__main__":
    main(sys.argv[1:])
