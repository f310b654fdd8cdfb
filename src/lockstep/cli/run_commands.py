"""What makes a run, and what is done with it: ``lockstep train``, ``evaluate``, ``predict``,
``export``, ``checkpoints``, ``audit`` and ``report``.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

from lockstep.cli.options import (
    Answer,
    above_zero,
    add_placement,
    add_quiet,
    add_settings,
    is_first,
    job_in,
    job_parameters_in,
    settings_in,
    strategy_in,
    warm_up,
)
from lockstep.errors import InputError
from lockstep.run.stop_request import GRACE
from lockstep.run.terminal import words_of


def add_train(commands: Any) -> None:
    """Options of ``train``."""
    parser = commands.add_parser(
        "train",
        function=_train,
        help="train a job, or resume a run",
        epilog="""\
examples:
  lockstep train job.py --strategy ddp --devices 2 --epochs 5 --set lr=0.05
  lockstep train job.py --strategy pp --microbatches 4 --devices 2
  lockstep train --resume runs/job-ddp-20261121-093000 --devices 4 --epochs 9
""",
    )
    parser.add_argument(
        "job",
        nargs="?",
        help="a Python file with a `job` (default with --resume: the job file of the run)",
    )
    add_quiet(parser)
    group = add_placement(parser)
    group.add_argument(
        "--folder",
        default="runs",
        help="where the run's folder is made (default: runs)",
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="show where the time of a few steps goes; write traces",
    )
    group.add_argument(
        "--audit",
        action="store_true",
        help="record the samples of each update; lockstep audit RUN reports them",
    )
    _add_stopping(parser)
    add_settings(parser)
    parser.set_defaults(devices=None)  # auto, or those of the run that is resumed


def _add_stopping(parser: argparse.ArgumentParser) -> None:
    """Add what a training does when it is stopped, and how it goes on."""
    group = parser.add_argument_group("stop and restart")
    group.add_argument(
        "--resume",
        metavar="RUN",
        help="resume the run in this folder, with its own strategy and devices or with others; "
        "auto: the newest unfinished run of this job, or a new run",
    )
    _add_job_file(group)
    group.add_argument(
        "--grace",
        type=above_zero(float),
        default=GRACE,
        metavar="SECONDS",
        help="seconds allowed for the current step to finish after Ctrl-C, SIGTERM or SIGUSR1 "
        "(default: 30)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="end the run after this long without progress; 0 is never (default: 1800)",
    )
    group.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart ranks of this machine that were lost, from the last checkpoint, at most "
        "N times (default: 0)",
    )


def _train(options: argparse.Namespace) -> Answer:
    if options.job is None and options.resume in (None, "auto"):
        raise InputError("train: name a job file (a Python file with a `job`), or --resume a run")
    if options.job_file is not None and (options.job is not None or options.resume is None):
        raise InputError("--job replaces the job file of --resume RUN: give one job file only")
    warm_up(options)
    from lockstep.launch import started_as_rank, started_ranks
    from lockstep.train import train
    from lockstep.training.run import job_of

    if options.job is not None:
        job = job_in(options)
    else:
        its = job_parameters_in(options), settings_in(options)
        read = functools.partial(
            job_of, options.resume, *its, job=options.job_file, trust=options.trust_job
        )
        job = started_ranks.read_by_first(read) if started_as_rank() else read()
    run = train(
        job,
        strategy=strategy_in(options),
        devices=options.devices,
        resume=options.resume,
        folder=options.folder,
        profile=options.profile,
        quiet=options.quiet and "notes",
        audit=options.audit,
        grace=options.grace,
        restarts=options.restarts,
        timeout=options.timeout,
    )
    if options.quiet and is_first():
        results = {"loss": run.summary["loss"], **run.summary["metrics"]}
        print("  ".join(words_of(results)))
        print(f"run: {run.folder}")
    return 0, {"folder": run.folder, **run.summary}


def add_evaluate(commands: Any) -> None:
    """Options of ``evaluate``."""
    parser = commands.add_parser(
        "evaluate",
        function=_evaluate,
        help="evaluate a run, or an untrained job",
        epilog="""\
examples:
  lockstep evaluate runs/job-ddp-20261121-093000 --best
  lockstep evaluate job.py --init weights.safetensors --devices 1
""",
    )
    parser.add_argument("what", help="the folder of a run, or a job file")
    add_placement(parser)
    _add_weights(parser)


def _evaluate(options: argparse.Namespace) -> Answer:
    warm_up(options)
    from lockstep.training.evaluate_run import evaluate

    values = evaluate(options.what, **_how(options))
    if is_first():
        for name, value in values.items():
            print(f"{name} {value:.6g}")
    return 0, {"metrics": values}


def add_predict(commands: Any) -> None:
    """Options of ``predict``."""
    parser = commands.add_parser(
        "predict",
        function=_predict,
        help="write a run's outputs for each sample of a dataset",
        epilog="""\
examples:
  lockstep predict runs/job-ddp-20261121-093000
  lockstep predict runs/job-ddp-20261121-093000 new.py:images --out new.npy
""",
    )
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument(
        "data",
        nargs="?",
        default="eval",
        help="eval (default) or train: a dataset of the job; eval:NAME: one of several "
        "evaluation sets; FILE.py:NAME: a dataset, or a function that returns one",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=".npy, .npz, .safetensors or .jsonl (default: in the run's folder, predictions-DATA)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the file if it exists",
    )
    add_placement(parser)
    _add_weights(parser)


def _predict(options: argparse.Namespace) -> Answer:
    warm_up(options)
    from lockstep.prediction.predict import predict

    name = f"predictions-{options.data.rpartition(':')[2]}"
    if options.best:
        name += "-best"
    elif options.weights is not None:
        name += f"-{Path(options.weights).stem}"
    out = options.out or os.path.join(options.run, name.replace(".", "_"))
    file = predict(options.run, options.data, out, overwrite=options.overwrite, **_how(options))
    return 0, {"file": file}


def add_export(commands: Any) -> None:
    """Options of ``export``."""
    parser = commands.add_parser(
        "export",
        function=_export,
        help="write a run's model as a file for other programs",
        epilog="""\
examples:
  lockstep export runs/job-ddp-20261121-093000 --format onnx
  lockstep export runs/job-ddp-20261121-093000 --format safetensors --best
""",
    )
    parser.add_argument("run", help="the folder of a run")
    add_quiet(parser)
    parser.add_argument(
        "--format",
        required=True,
        metavar="NAME",
        help="safetensors, torch-export, onnx or tensorrt",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the file to write (default: exported.ENDING in the run's folder)",
    )
    parser.add_argument(
        "--dynamic",
        default="batch",
        help="batch: batches of any size and sequences of any length; none: one shape",
    )
    parser.add_argument(
        "--tolerance",
        type=above_zero(float),
        help="the largest difference from the run (default: 1e-4; 1e-9 in float64)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the file if it exists",
    )
    _add_weights(parser)


def _export(options: argparse.Namespace) -> Answer:
    from lockstep.export import export

    names = ("format", "dynamic", "tolerance", "overwrite", "best", "weights", "trust_job")
    words = {name: getattr(options, name) for name in names} | settings_in(options)
    made = export(
        options.run,
        options.out,
        job=options.job_file,
        job_parameters=job_parameters_in(options),
        quiet=options.quiet and "notes",
        **words,
    )
    if options.quiet:
        print(f"exported: {made.path}")
    return 0, {
        "file": made.path,
        "bytes": os.path.getsize(made.path),
        "difference": made.difference,
    }


def add_checkpoints(commands: Any) -> None:
    """Options of ``checkpoints``."""
    parser = commands.add_parser(
        "checkpoints",
        function=_checkpoints,
        help="list the checkpoints of a run",
        epilog="""\
example:
  lockstep checkpoints runs/job-ddp-20261121-093000 --verify
""",
    )
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read all checkpoints and compare the checksums",
    )


def add_audit(commands: Any) -> None:
    """Options of ``audit``."""
    parser = commands.add_parser(
        "audit",
        function=_audit,
        help="report which samples a run has used, and how often",
        epilog="""\
examples:
  lockstep train job.py --audit
  lockstep audit runs/job-ddp-20261121-093000
""",
    )
    parser.add_argument("run", help="the folder of a run that was trained with --audit")


def _checkpoints(options: argparse.Namespace) -> Answer:
    """List the checkpoints; the code is 1 where one is damaged."""
    from lockstep.training.run import checkpoints_of

    lines, found = checkpoints_of(options.run, verify=options.verify)
    print("\n".join(lines))
    is_damaged = any(checkpoint["damaged"] for checkpoint in found)
    return int(is_damaged), {"verified": options.verify, "checkpoints": found}


def _audit(options: argparse.Namespace) -> Answer:
    """Add up what all starts of a run have used.

    The code is 1 where a sample was used twice, or never.
    """
    from lockstep.training.records.audit import added_up

    lines, found = added_up(options.run)
    print("\n".join(lines))
    return int(not found["right"]), found


def _add_weights(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job and weights")
    group.add_argument(
        "--best",
        action="store_true",
        help="the weights of the best evaluation",
    )
    what = "other weights: a safetensors file in the run's folder (ema.safetensors), or elsewhere"
    group.add_argument(
        "--weights",
        metavar="FILE",
        help=what,
    )
    _add_job_file(group)
    add_settings(parser, without=["best"])


def _add_job_file(parser: argparse._ActionsContainer) -> None:
    what = "the job file of the run, instead of the one that its folder names"
    parser.add_argument(
        "--job",
        dest="job_file",
        metavar="FILE",
        help=what,
    )
    what = "run the job file that the run's folder names, even if it has changed since the training"
    parser.add_argument(
        "--trust-job",
        action="store_true",
        help=what,
    )


def add_report(commands: Any) -> None:
    """Options of ``report``."""
    parser = commands.add_parser(
        "report",
        function=_report,
        help="make a page of a run",
        epilog="""\
example:
  lockstep report runs/job-ddp-20261121-093000
""",
    )
    parser.add_argument("folder", help="the folder of a run")


def _report(options: argparse.Namespace) -> Answer:
    """Write the page of a run."""
    from lockstep.training.records.run_page import write_page

    page = write_page(options.folder)
    print(page)
    return 0, {"file": page}


def _how(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that ``evaluate`` and ``predict`` have in common."""
    return {
        "strategy": strategy_in(options),
        "devices": options.devices,
        "best": options.best,
        "weights": options.weights,
        "job_parameters": job_parameters_in(options),
        "job": options.job_file,
        "trust_job": options.trust_job,
        **settings_in(options),
    }
