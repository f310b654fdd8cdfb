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
from lockstep.launch.processes import fork_server
from lockstep.tensors.allocator import prepare

if TYPE_CHECKING:
    from lockstep.jobfile import JobFile

SETTINGS = {
    "batch-size": "samples of the global batch",
    "epochs": "passes through the data (default: 1, where steps isn't given)",
    "steps": "stop after that many updates",
    "lr-scheduler-every": "epoch or step: when the scheduler moves on (default: epoch)",
    "seed": "of weights, order, augmentation, dropout (default: 0)",
    "shuffle": "a new order for each epoch (default: true)",
    "accumulate": "micro-batches of each global batch (default: 1)",
    "clip-norm": "largest norm of all gradients together (default: none)",
    "nonfinite": "raise, or skip: what to do with a loss or gradients that are not finite "
    "(default: raise)",
    "nonfinite-limit": "updates in a row that may be skipped (default: 10)",
    "accept-differences": "train also where results depend on where a batch is cut (default: "
    "false)",
    "check-every": "compare batches with parts of them in updates 1, 2, 4, ... and every so "
    "many-th (default: 0)",
    "init": "weights to begin with: a safetensors file, a run, a folder with model.safetensors "
    "(default: none)",
    "init-strict": "refuse weights that don't all fit; false takes those that do (default: true)",
    "sync-batchnorm": "BatchNorm over all replicas (default: false)",
    "channels-last": "images in that memory layout (default: false)",
    "precision": "fp64, fp32, tf32, bf16, fp16, or none: as the model was built (default: none)",
    "compile": "by torch.compile; a word is its mode (reduce-overhead, max-autotune, ...) or "
    "backend (default: false)",
    "activation-checkpointing": "auto, or names of blocks with commas between (default: none)",
    "fused": "fused optimizer (default: where right)",
    "keep-memory": "of a step for the next one, on CPU devices (default: false)",
    "eval-batch-size": "samples of an evaluation batch (default: batch-size)",
    "log-every": "steps, epochs (2epochs, 0.5epochs) or a time (10min) between records and lines "
    "(default: each epoch)",
    "eval-every": "likewise between evaluations (default: each epoch)",
    "save-every": "likewise between checkpoints; by steps or a time, each epoch is saved too "
    "(default: each epoch)",
    "best": "a metric and max or min: the weights to keep as the best (default: eval_loss:min)",
    "keep": "checkpoints, the newest (default: 2)",
    "save-frozen": "in checkpoints and weights, what the model has frozen; false builds it anew "
    "(default: true)",
    "loader-workers": "processes that fetch, for each rank (default: by the cores and the dataset)",
    "tensorboard": "also write events for TensorBoard (default: false)",
}
"""The settings of a Job, as options. A test holds this list against Job's own."""

_SWITCHES = {
    "shuffle",
    "init-strict",
    "sync-batchnorm",
    "channels-last",
    "fused",
    "keep-memory",
    "compile",
    "save-frozen",
    "tensorboard",
}


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an option that is a finite number above 0."""

    def number(word: str) -> float:
        if not 0 < (value := kind(word)) < math.inf:
            raise ValueError
        return value

    number.__name__ = "number above 0"  # what the parser calls it
    return number


def check_writable(option: str, file: str | None) -> None:
    """Find out now, not after the work, that a file can't be written; nothing is left of the try.

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
    """The settings of a job, and the parameters of its own: ``--batch-size 32 --set lr=0.1``.

    ``without`` those that the command has other options for.
    """
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of the job function; may be repeated",
    )
    group = parser.add_argument_group("settings of the job (these win over the file)")
    own = {name: what for name, what in SETTINGS.items() if name not in without}
    parser.set_defaults(settings=tuple(name.replace("-", "_") for name in own))
    for name, what in own.items():
        if name in _SWITCHES:
            group.add_argument(f"--{name}", nargs="?", const="true", metavar="BOOL", help=what)
        else:
            group.add_argument(f"--{name}", metavar="VALUE", help=what)


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
    """The job file that was named, with its parameters and settings."""
    from lockstep.jobfile import JobFile

    return JobFile(options.job, job_parameters_in(options), settings_in(options))


def add_placement(parser: argparse.ArgumentParser) -> None:
    """A strategy, its settings and its devices."""
    parser.add_argument(
        "--strategy",
        help="single, dp, ddp, fsdp, mp, pp, hogwild, or a product such as ddp=2xpp=2 (default: "
        "single on one device, "
        "ddp on several)",
    )
    parser.add_argument(
        "--devices", default="auto", help="auto, 4, 2xcpu, cuda, cuda:0,2 (default: auto)"
    )
    parser.add_argument(
        "--backend", help="of the process group (default: nccl on CUDA, gloo elsewhere)"
    )
    parser.epilog = (
        "Each setting of a strategy is an option too: --strategy pp --help lists those of pp."
    )
    parser.add_argument(
        "--map",
        metavar="FILE_OR_JSON",
        help='of mp and pp, which layer is on which device: \'{"stem": 0, "layer3": 1}\' '
        "(default: found by measuring)",
    )
    parser.set_defaults(of_strategy=())


def add_strategy(parser: argparse.ArgumentParser, name: str) -> None:
    """The settings of the strategy of that name. This imports torch, so it is done only where
    one is asked for.
    """
    from lockstep.errors import StrategyError
    from lockstep.strategies import kind_of

    try:
        described = kind_of(name).settings()
    except StrategyError:  # which is said when the strategy is chosen
        return
    group = parser.add_argument_group(f"settings of {name}")
    for setting, what in described.items():
        group.add_argument(
            f"--{setting.replace('_', '-')}", metavar="VALUE", help=what.replace("%", "%%")
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
            raise InputError(
                f"{option} is a setting of a strategy: name that too (--strategy {having[-1]})"
            )
        if having:
            named(strategy or "", **{setting: ""})


def strategy_in(options: argparse.Namespace) -> Any:
    """The strategy's name, or the strategy itself where settings of its own were given."""
    settings = _given(options, ["map", *options.of_strategy])
    if not settings:
        return options.strategy
    if options.strategy is None:
        raise InputError("--map is a setting of a strategy: name that too (--strategy pp)")
    from lockstep.pipelining.device_map import read_map
    from lockstep.strategies import named

    if "map" in settings:
        settings["device_map"] = read_map(settings.pop("map"))
    return named(options.strategy, **settings)


def warm_up(options: argparse.Namespace, *, surely: bool = False) -> None:
    """Before this process imports torch: huge pages, and start the server of ranks, where some
    may be needed.
    """
    prepare()
    several = options.devices not in (None, "auto", "1", "1xcpu", "cpu")
    if surely or "=" in (options.strategy or "") or (options.strategy in ("ddp", None) and several):
        fork_server.start()
