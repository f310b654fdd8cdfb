"""The process of the command: ``lockstep``, or ``python -m lockstep``, as torchrun starts it."""

import gc
import signal
import sys


def run() -> int:
    """Run the command with this process's words; gives the exit code."""
    try:
        from lockstep.cli.command import main
    except KeyboardInterrupt:
        sys.stderr.write("lockstep: stopped by Ctrl-C\n")
        return 130
    code = main()
    if (
        code == 130
    ):  # it has been printed: the same key pressed again ends the process, without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Else the person waits for most of a second after the last line, while Python looks through all
    # that torch made.
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(run())
