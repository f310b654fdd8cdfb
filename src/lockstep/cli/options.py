"""What several commands have among their options: a strategy and its devices, a job's settings and
parameters; and how each command answers, for people or as JSON.

Nothing here imports torch at the top.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import InputError
from lockstep.job import SETTINGS, Job
from lockstep.launch.processes import fork_server
from lockstep.run.run_folder import json_text
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


Answer = tuple[int, dict[str, Any]]
"""What a command returns: the exit code, and what ``--json`` writes."""

SCHEMA = 1
"""The version of all JSON objects: within it, fields are added and never renamed."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option by which a command answers as JSON."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the answer as JSON, and all else on standard error",
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option of commands that log their progress."""
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="print errors, notes and the result only",
    )


def answered(options: argparse.Namespace) -> int:
    """Run a command, and write its answer as JSON where that is asked for.

    Returns:
        The exit code.
    """
    elsewhere = _printing_on_stderr() if options.json else contextlib.nullcontext()
    code: int
    with elsewhere:
        code, answer = options.function(options)
    if options.json and is_first():
        sys.stdout.write(json_text({"schema": SCHEMA, "command": options.command, **answer}))
    return code


def is_first() -> bool:
    """Return whether this process is the one that prints, under torchrun too."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _printing_on_stderr() -> Iterator[None]:
    """Let what this process, its ranks and its libraries print go to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


_SETTINGS = {
    "data": "batch_size epochs steps shuffle seed loader_workers",
    "optimization": "accumulate clip_norm lr_scheduler_every fused sync_batchnorm loss_over init "
    "init_strict",
    "precision, speed and memory": "precision compile channels_last activation_checkpointing "
    "keep_memory",
    "checks": "nonfinite nonfinite_limit accept_differences check_every",
    "evaluation": "eval_every eval_at_start eval_batches eval_batch_size best",
    "checkpoints and logging": "save_every keep save_frozen log_every tensorboard",
}
"""The settings of a job by what they are about."""


def add_settings(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """Add the settings of a job, and the parameters of its function: ``--batch-size 32``, ``--set
    lr=0.1``.

    ``without`` those that the command has other options for.
    """
    group = parser.add_argument_group("settings of the job (these override the file)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of the job function; may be repeated",
    )
    texts = described_fields(Job)
    chosen = []
    for about, names in _SETTINGS.items():
        group = parser.add_argument_group(about)
        for name in names.split():
            if name not in without:
                chosen.append(name)
                _add_setting(group, name, texts[name])
    parser.set_defaults(settings=tuple(chosen))


def _add_setting(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    """Add a setting of a job, with the first sentence of its field's text."""
    sentence = text.split(". ")[0].rstrip(".").replace("(None:", "(default:")
    default = getattr(Job, name, None)
    if default is not None:
        sentence += f" (default: {str(default).lower()})"
    how: dict[str, Any] = {"metavar": "VALUE"}
    if "bool" in str(SETTINGS[name]):
        how = {"nargs": "?", "const": "true", "metavar": "BOOL"}
    group.add_argument(f"--{name.replace('_', '-')}", help=sentence, **how)


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


def add_placement(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add a strategy, its settings and its devices; return the group of these options."""
    group = parser.add_argument_group("where and how")
    group.add_argument(
        "--strategy",
        help="single, dp, ddp, fsdp, mp, pp, hogwild, or a product such as ddp=2xpp=2 (default: "
        "single on one device, ddp on several); --strategy pp --help lists the settings of pp",
    )
    group.add_argument(
        "--devices",
        default="auto",
        help="auto, 4, 2xcpu, cuda, cuda:0,2 (default: auto)",
    )
    group.add_argument(
        "--map",
        metavar="FILE_OR_JSON",
        help='which layer is on which device, for mp and pp: \'{"stem": 0, "layer3": 1}\' '
        "(default: found by measuring)",
    )
    parser.set_defaults(of_strategy=())
    return group


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
