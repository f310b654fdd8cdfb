"""The process of the command: ``lockstep``, or ``python -m lockstep``, as torchrun starts it."""

import gc
import sys

from lockstep.cli import main


def run() -> int:
    """Run the command with this process's words; gives the exit code."""
    code = main()
    # Else the person waits for most of a second after the last line, while Python looks through all that torch made.
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(run())
