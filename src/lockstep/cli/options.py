"""What several commands have among their options: a strategy and its devices, a job's settings and
parameters.

Nothing here imports torch at the top.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import FolderError, InputError
from lockstep.job import SETTINGS, Job
from lockstep.launch.processes import fork_server
from lockstep.settings import described_fields
from lockstep.tensors.allocator import prepare

if TYPE_CHECKING:
    from lockstep.jobfile import JobFile


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Make the type of an option that is a finite number above 0."""

    def number(word: str) -> float:
        if not 0 < (value := kind(word)) < math.inf:
            raise ValueError
        return value

    number.__name__ = "number above 0"  # what the parser calls it
    return number


def check_writable(option: str, file: str | None) -> None:
    """Refuse a file that can't be written, now and not after the work; the try leaves nothing.

    Raises:
        FolderError: it can't.
    """
    if file is None:
        return
    is_new = not os.path.exists(file)
    try:
        with open(file, "a"):
            pass
        if is_new:
            os.remove(file)
    except OSError as error:
        raise FolderError(f"{option} {file}: {error.strerror}") from error


def add_settings(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """Add the settings of a job, and the parameters of its function: ``--batch-size 32``, ``--set
    lr=0.1``.

    ``without`` those that the command has other options for.
    """
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of the job function; may be repeated",
    )
    group = parser.add_argument_group("settings of the job (these override the file)")
    names = []
    for name, text in described_fields(Job).items():
        if name not in SETTINGS or name in without:
            continue
        names.append(name)
        sentence = text.split(". ")[0].rstrip(".").replace("(None:", "(default:")
        default = getattr(Job, name, None)
        if default is not None:
            sentence += f" (default: {str(default).lower()})"
        option = f"--{name.replace('_', '-')}"
        if "bool" in str(SETTINGS[name]):
            group.add_argument(
                option,
                nargs="?",
                const="true",
                metavar="BOOL",
                help=sentence,
            )
        else:
            group.add_argument(
                option,
                metavar="VALUE",
                help=sentence,
            )
    parser.set_defaults(settings=tuple(names))


def settings_in(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given."""
    return _given(options, options.settings)


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def job_parameters_in(options: argparse.Namespace) -> dict[str, str]:
    """Return the parameters of the job that were given.

    Raises:
        InputError: one isn't ``key=value``.
    """
    parameters = {}
    for pair in options.set:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError(f"--set {pair}: write it as --set key=value")
        parameters[key] = value
    return parameters


def job_in(options: argparse.Namespace) -> JobFile:
    """Return the job file that was named, with its parameters and settings."""
    from lockstep.jobfile import JobFile

    return JobFile(options.job, job_parameters_in(options), settings_in(options))


def add_placement(parser: argparse.ArgumentParser) -> None:
    """Add a strategy, its settings and its devices."""
    parser.add_argument(
        "--strategy",
        help="single, dp, ddp, fsdp, mp, pp, hogwild, or a product such as ddp=2xpp=2 (default: "
        "single on one device, "
        "ddp on several)",
    )
    parser.add_argument(
        "--devices",
        default="auto",
        help="auto, 4, 2xcpu, cuda, cuda:0,2 (default: auto)",
    )
    parser.add_argument(
        "--backend", help="the backend of the process group (default: nccl on CUDA, gloo elsewhere)"
    )
    parser.epilog = (
        "Each setting of a strategy is an option too: --strategy pp --help lists those of pp."
    )
    parser.add_argument(
        "--map",
        metavar="FILE_OR_JSON",
        help='which layer is on which device, for mp and pp: \'{"stem": 0, "layer3": 1}\' '
        "(default: found by measuring)",
    )
    parser.set_defaults(of_strategy=())


def add_strategy(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the settings of the strategy of that name.

    This imports torch, so it is done only where a strategy is asked for.
    """
    from lockstep.errors import StrategyError
    from lockstep.strategies import kind_of

    try:
        described = kind_of(name).settings()
    except StrategyError:  # which is raised again when the strategy is chosen
        return
    group = parser.add_argument_group(f"settings of {name}")
    for setting, what in described.items():
        group.add_argument(
            f"--{setting.replace('_', '-')}",
            metavar="VALUE",
            help=what.replace("%", "%%"),
        )
    parser.set_defaults(of_strategy=tuple(described))


def refuse_settings(words: Sequence[str], strategy: str | None) -> None:
    """Refuse a setting of another strategy than the one that was named, or that of one where none
    was.

    Raises:
        InputError: with a strategy that has it.
    """
    from lockstep.strategies import STRATEGIES, named

    for word in words:
        option = word.split("=")[0]
        setting = option.removeprefix("--").replace("-", "_")
        having = [name for name, kind in STRATEGIES.items() if setting in kind.settings()]
        if having and strategy is None:
            example = "ddp" if "ddp" in having else having[-1]
            raise InputError(
                f"{option} belongs to a strategy: name the strategy, too (--strategy {example})"
            )
        if having:
            named(strategy or "", **{setting: ""})


def strategy_in(options: argparse.Namespace) -> Any:
    """Return the strategy's name, or the strategy itself where settings of its own were given."""
    settings = _given(options, ["map", *options.of_strategy])
    if not settings:
        return options.strategy
    if options.strategy is None:
        raise InputError("--map belongs to a strategy: name the strategy, too (--strategy pp)")
    from lockstep.pipelining.device_map import read_map
    from lockstep.strategies import named

    if "map" in settings:
        settings["device_map"] = read_map(settings.pop("map"))
    return named(options.strategy, **settings)


def warm_up(options: argparse.Namespace, *, surely: bool = False) -> None:
    """Ask for huge pages, and start the server of ranks where some may be needed, before this
    process imports torch.
    """
    prepare()
    several = options.devices not in (None, "auto", "1", "1xcpu", "cpu")
    if surely or "=" in (options.strategy or "") or (options.strategy in ("ddp", None) and several):
        fork_server.start()
