"""The command: parsing only.

Nothing here may import torch before the words are understood: a wrong word is answered at once, and
where ranks will be needed their server starts to import torch while this process does.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from lockstep.cli.compare_commands import add_compare, add_tune, add_verify
from lockstep.cli.machine_commands import add_devices, add_doctor
from lockstep.cli.options import (
    add_json,
    add_strategy,
    answered,
    refuse_settings,
    warm_up,
)
from lockstep.cli.pipeline_commands import add_partition
from lockstep.cli.run_commands import (
    add_audit,
    add_checkpoints,
    add_evaluate,
    add_export,
    add_predict,
    add_report,
    add_train,
)
from lockstep.errors import (
    InputError,
    LockstepError,
    RankFailed,
    near_names,
    nearest,
    own_traceback,
)


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line, with the nearest word, and exits with 2."""

    def __init__(self, function: Any = None, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **settings,
        )
        self.set_defaults(function=function)

    def shorten_usage(self) -> None:
        """Let the usage name what has to be given, and the other options by one word."""
        words = ["%(prog)s [options]"]
        for action in self._actions:
            name = action.metavar or action.dest
            if action.required:
                words += [*action.option_strings, str(name)]
            elif not action.option_strings:
                words.append(f"[{name}]")
        self.usage = " ".join(words)

    def error(self, message: str) -> NoReturn:
        wrong = re.search(
            r"argument COMMAND: invalid choice: '([^']*)' \(choose from (.*)\)", message
        )
        if wrong:
            known = re.findall(r"\w+", wrong[2])
            message = f'there is no command "{wrong[1]}"; {nearest(wrong[1], known)}'
        raise InputError(f"{message} ({self.prog} --help lists all)")

    def unknown(self, words: list[str]) -> InputError:
        """Return the error for words that no option takes."""
        word = words[0].split("=")[0]
        if not word.startswith("-"):
            return InputError(f'unexpected argument "{word}" ({self.prog} --help lists all)')
        options = list(self._option_string_actions)
        what = ""
        if near_names(word, options):
            what = f"; {nearest(word, options)}"
        elif "--set" in options:
            what = f": for a parameter of the job's function write --set {word.strip('-')}=VALUE"
        return InputError(f"there is no option {word} here{what} ({self.prog} --help lists all)")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command with these words; gives the exit code (see ``lockstep.errors``)."""
    before = signal.signal(signal.SIGTERM, _terminated)
    words = list(sys.argv[1:] if words is None else words)
    # The other commands keep nothing before they are done; a training has printed what it keeps.
    kept = "" if words[:1] == ["train"] else "; nothing was kept"
    try:
        return _ended(_run(words))
    except KeyboardInterrupt:
        _print_error(f"lockstep: stopped by Ctrl-C{kept}")
        return 130
    except Exception as error:
        return _ended(_report_error(error))
    finally:
        signal.signal(signal.SIGTERM, before)


def _report_error(error: Exception) -> int:
    """Print what went wrong, and return the exit code."""
    if isinstance(error, LockstepError):
        if isinstance(error, RankFailed) and error.traceback:
            _print_error(error.traceback.rstrip())
        if isinstance(error, InputError) and _under_torchrun() and os.environ["RANK"] != "0":
            # torchrun's ranks are refused alike: rank 0 reports it, and torchrun ends the others
            # meanwhile.
            time.sleep(1.0)
        _print_error(f"lockstep: {error}")
        return error.exit_code
    if _under_torchrun():
        from lockstep.launch.processes.failure_records import looks_like_peers

        if looks_like_peers(error):
            _print_error(f"lockstep: rank {os.environ['RANK']} stopped because another rank did")
            return 1
    # The person's own code, run in this process: its traceback is what helps.
    _print_error(own_traceback(error).rstrip())
    line = f"lockstep: the run failed: {type(error).__name__}: "
    line += str(error).split("\n")[0]
    for note in getattr(error, "__notes__", []):
        if note.startswith("raised in stage"):
            line += f" ({note})"
    _print_error(line)
    return 1


def _print_error(text: str) -> None:
    # In one piece, so that torchrun's ranks don't write into one another's lines.
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _under_torchrun() -> bool:
    return {"RANK", "LOCAL_RANK"} <= os.environ.keys()  # or by what speaks like it


def _ended(code: int) -> int:
    """Return the exit code. Under torchrun the process ends here and now.

    Threads of gloo's that outlive their group ask for Python's lock while Python goes away, and now
    and then abort the process of a training that is done (torch 2.13: "terminate called without an
    active exception").
    """
    if _under_torchrun():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(143)


def _run(words: list[str]) -> int:
    parser, commands = _parser()
    _complete(parser)
    asks_for_help = "-h" in words or "--help" in words
    if asks_for_help and "--strategy" in words[:-1] and words[0] in commands:
        add_strategy(commands[words[0]], words[words.index("--strategy") + 1])
    options, rest = parser.parse_known_args(words)
    if rest and hasattr(options, "of_strategy"):
        warm_up(options)  # what follows imports torch
        if options.strategy is not None:
            add_strategy(commands[options.command], options.strategy)
            options, rest = parser.parse_known_args(words)
        refuse_settings(rest, options.strategy)
    if rest:
        raise commands.get(options.command, parser).unknown(rest)
    if options.version:
        # Looking the versions up takes longer than parsing the words.
        from lockstep.version import versions

        print(versions())
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    return answered(options)


def _complete(parser: _Parser) -> None:
    """Complete the words of a command line, where a shell asks for them by argcomplete."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete

    argcomplete.autocomplete(parser)


_TASKS = {
    "train and resume": (add_train,),
    "use a run": (
        add_evaluate,
        add_predict,
        add_export,
        add_checkpoints,
        add_audit,
        add_report,
    ),
    "choose a strategy": (add_compare, add_verify, add_tune),
    "look at pipelines": (add_partition,),
    "this machine": (add_doctor, add_devices),
}
"""The commands by what a person wants to do."""

_EXAMPLES = """\
examples:
  lockstep train examples/digits.py --strategy ddp --devices 2
  lockstep train examples/digits.py --resume auto
  lockstep evaluate runs/digits-ddp-20261121-093000
  lockstep verify examples/digits.py --strategy pp --devices 2
  lockstep compare examples/digits.py --strategies ddp,pp --devices 2

lockstep COMMAND --help shows the options of a command, and examples.
"""


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="lockstep",
        usage="lockstep COMMAND [options]",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--version",
        action="store_true",
        help="print the versions of lockstep, torch and Python",
    )
    commands = parser.add_subparsers(
        prog="lockstep",
        dest="command",
        metavar="COMMAND",
        parser_class=_Parser,
        help=argparse.SUPPRESS,  # the description lists the commands
    )

    lines = ["Train an ordinary PyTorch model on many devices, with the results of one."]
    for task, adds in _TASKS.items():
        lines += ["", f"{task}:"]
        for add in adds:
            add(commands)
            listed = commands._choices_actions[-1]
            lines.append(f"  {listed.dest:12} {listed.help}")
            command = commands.choices[listed.dest]
            command.description = listed.help
            add_json(command)
            command.shorten_usage()
    parser.description = "\n".join(lines)
    return parser, dict(commands.choices)
