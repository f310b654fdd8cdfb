"""The command: parsing only.

Nothing here may import torch before the words are understood: a wrong word is answered at once, and where ranks will be
needed their server starts to import torch while this process does.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import lockstep
from lockstep.cli import compare_command as comparing
from lockstep.cli import pipeline_commands as pipelining
from lockstep.cli import verify_command as verifying
from lockstep.cli.interrupt import Interrupt
from lockstep.cli.options import above_zero, add_knobs, add_settings, check_writable, knobs_in, settings_in
from lockstep.errors import InputError, LockstepError, RankFailed, near_names, nearest, own_traceback
from lockstep.launch.processes import fork_server
from lockstep.tensors.allocator import prepare


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest word, and exits with 2."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"argument COMMAND: invalid choice: '([^']*)'", message):
            # Of the parser that has the commands, so that a new one is known here by itself.
            known = [n for a in self._actions if isinstance(a, argparse._SubParsersAction) for n in a.choices]
            message = f'there is no command "{wrong[1]}"; {nearest(wrong[1], known)}'
        raise InputError(f"{message} ({self.prog} --help lists all)")

    def unknown(self, words: list[str], others: Mapping[str, _Parser]) -> InputError:
        """What to say of words that no option takes; ``others`` are the parsers of all commands."""
        word = words[0].split("=")[0]
        if not word.startswith("-"):
            return InputError(f'"{word}" is one word too many ({self.prog} --help lists what there is)')
        having = [name for name, parser in others.items() if word in parser._option_string_actions]
        options = list(self._option_string_actions)
        if near_names(word, options):
            what = f"; {nearest(word, options)}"
        elif having:
            what = f": {' and '.join(having)} {'has' if len(having) == 1 else 'have'} one"
        elif "--set" in options:
            what = f": for a parameter of the job's function write --set {word.strip('-')}=VALUE"
        else:
            what = ""
        return InputError(f"there is no option {word} here{what} ({self.prog} --help lists all)")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command with these words; gives the exit code (the table is in docs/verify.md)."""
    before = signal.signal(signal.SIGTERM, _terminated)
    words = list(sys.argv[1:] if words is None else words)
    # The other commands keep nothing before they are done; a training has said what it keeps.
    kept = "" if words[:1] == ["train"] else "; nothing was kept"
    interrupt = Interrupt(f"lockstep: stopped by Ctrl-C{kept}")
    try:
        return _ended(_run(words))
    except LockstepError as error:
        if interrupt.just_now():
            return interrupt.said()
        if isinstance(error, RankFailed) and error.traceback:
            _say(error.traceback.rstrip())
        if isinstance(error, InputError) and _is_one_of_many():
            # torchrun's ranks are refused alike: rank 0 says it, and torchrun ends the others meanwhile.
            time.sleep(1.0)
        _say(f"lockstep: {error}")
        return _ended(error.exit_code)
    except KeyboardInterrupt:
        return interrupt.said()
    except Exception as error:
        if interrupt.just_now():
            return interrupt.said()
        if _is_for_want_of_another(error):
            _say(f"lockstep: rank {os.environ['RANK']} stopped because another rank did")
            return _ended(1)
        # The person's own code, run in this process: its traceback is what helps.
        _say(own_traceback(error).rstrip())
        first = str(error).splitlines()[0] if str(error) else ""
        where = "".join(f" ({n})" for n in getattr(error, "__notes__", []) if n.startswith("raised in stage"))
        _say(f"lockstep: the run failed: {type(error).__name__}: {first}{where}")
        return _ended(1)
    finally:
        interrupt.over()
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    # In one piece, so that torchrun's ranks don't write into one another's lines.
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _is_one_of_many() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def _is_for_want_of_another(error: Exception) -> bool:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    from lockstep.launch.processes.failure_records import looks_like_peers

    return looks_like_peers(error)


def _ended(code: int) -> int:
    """The exit code. Under torchrun the process ends here and now.

    Threads of gloo's that outlive their group ask for Python's lock while Python goes away, and now and then abort the
    process of a training that is done (torch 2.13: "terminate called without an active exception").
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(143)


def _run(words: list[str]) -> int:
    parser, commands = _parser()
    options, rest = parser.parse_known_args(words)
    if rest:
        raise commands.get(options.command, parser).unknown(rest, commands)
    if options.command is None:
        parser.print_help()
        return 0
    result: int = options.function(options)
    return result


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="lockstep", description="Train an ordinary PyTorch model on many devices, with the numbers of one."
    )
    parser.set_defaults(command=None)
    parser.add_argument("--version", action="version", version=f"lockstep {lockstep.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    train = commands.add_parser("train", help="train a job", allow_abbrev=False)
    train.add_argument("job", nargs="?", help="a Python file with a `job`; left out with --resume, the run's own")
    _add_placement(train)
    train.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with the run in this folder: with its own strategy and devices, or any others",
    )
    train.add_argument("--folder", default="runs", help="where the run's folder is made (default: runs)")
    train.add_argument("--tensorboard", action="store_true", help="also write events for TensorBoard")
    train.add_argument("--profile", action="store_true", help="show where the time of a few steps goes; write traces")
    add_settings(train)
    train.set_defaults(function=_train, devices=None)  # auto, or those of the run that is resumed

    evaluate = commands.add_parser("evaluate", help="evaluate a run, or an untrained job", allow_abbrev=False)
    evaluate.add_argument("what", help="the folder of a run, or a job file")
    _add_placement(evaluate)
    evaluate.add_argument("--best", action="store_true", help="the weights of the lowest evaluation loss")
    add_settings(evaluate)
    evaluate.set_defaults(function=_evaluate)

    predict = commands.add_parser("predict", help="a run's outputs for each sample of a dataset", allow_abbrev=False)
    predict.add_argument("run", help="the folder of a run")
    predict.add_argument(
        "data",
        nargs="?",
        default="eval",
        help="eval (the default) or train: the job's own, eval:NAME: one of several evaluation sets; "
        "FILE.py:NAME: a dataset, or a function that gives one",
    )
    predict.add_argument(
        "--out",
        metavar="FILE",
        help=".npy, .npz, .safetensors or .jsonl (default: in the run's folder, predictions-DATA)",
    )
    predict.add_argument("--overwrite", action="store_true", help="replace the file where it is there already")
    _add_placement(predict)
    predict.add_argument("--best", action="store_true", help="the weights of the lowest evaluation loss")
    add_settings(predict)
    predict.set_defaults(function=_predict)

    tune = commands.add_parser("tune", help="try which settings make a job faster here", allow_abbrev=False)
    tune.add_argument("job", help="a Python file with a `job`")
    tune.add_argument("--strategy", help="try this one only (default: dp, ddp, and one device)")
    tune.add_argument("--devices", default="auto", help="those that may be used (default: all accelerators or cores)")
    tune.add_argument("--rounds", type=above_zero(int), default=3, help="turns of each setting (default: 3)")
    tune.add_argument("--seconds", type=above_zero(float), default=2.0, help="of a turn, at least (default: 2)")
    tune.add_argument("--json", metavar="FILE", help="also write what was found to this file")
    add_knobs(tune)
    add_settings(tune)
    tune.set_defaults(function=_tune)

    compare = commands.add_parser("compare", help="strategies side by side, measured", allow_abbrev=False)
    compare.epilog = "with --epochs each is also trained for so many, for its losses and metrics"
    comparing.add_compare(compare)
    add_knobs(compare)
    add_settings(compare)
    compare.set_defaults(function=_compare)

    partition = commands.add_parser("partition", help="which layers go to which device", allow_abbrev=False)
    pipelining.add_partition(partition)
    add_knobs(partition)
    add_settings(partition)
    partition.set_defaults(function=_partition)

    schedule = commands.add_parser("schedule", help="a pipeline's schedule as a picture", allow_abbrev=False)
    pipelining.add_schedule(schedule)

    report = commands.add_parser("report", help="a page of a run, or of a comparison", allow_abbrev=False)
    report.add_argument("folder", help="the folder of a run, or of a comparison")
    report.set_defaults(function=lambda options: comparing.report(options.folder))

    verify = commands.add_parser("verify", help="the same numbers as one device, or why not", allow_abbrev=False)
    verifying.add_verify(verify)
    _add_placement(verify)
    add_settings(verify)
    verify.set_defaults(function=_verify)

    devices = commands.add_parser("devices", help="what is here", allow_abbrev=False)
    devices.set_defaults(function=_devices)
    return parser, dict(commands.choices)


def _add_placement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy", help="single, dp, ddp, mp, pp or hogwild (default: single on one device, ddp on several)"
    )
    parser.add_argument("--devices", default="auto", help="auto, 4, 2xcpu, cuda, cuda:0,2 (default: auto)")
    parser.add_argument("--backend", help="of the process group (default: nccl on CUDA, gloo elsewhere)")
    pipelining.add_settings(parser)
    add_knobs(parser)


def _strategy(options: argparse.Namespace) -> Any:
    """The strategy's name, or the strategy itself where settings of its own were given."""
    given = {
        "microbatches": options.microbatches,
        "split_size": options.split_size,
        "schedule": options.schedule,
        "device_map": options.map,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if not settings:
        return options.strategy
    if options.strategy is None:
        option = next(iter(settings)).removeprefix("device_").replace("_", "-")
        raise InputError(f"--{option} is a setting of a strategy: name that too (--strategy pp)")
    from lockstep.pipelining.device_map import read_map
    from lockstep.strategies import named

    if options.map is not None:
        settings["device_map"] = read_map(options.map)
    return named(options.strategy, **settings)


def _train(options: argparse.Namespace) -> int:
    if options.job is None and options.resume is None:
        raise InputError("train: name a job file (a Python file with a `job`), or --resume a run")
    _warm_up(options)
    from lockstep.jobfile import JobFile
    from lockstep.train import train
    from lockstep.training.run import job_of

    knobs, settings = knobs_in(options.set), settings_in(options)
    job = JobFile(options.job, knobs, settings) if options.job is not None else job_of(options.resume, knobs, settings)
    train(
        job,
        strategy=_strategy(options),
        devices=options.devices,
        resume=options.resume,
        folder=options.folder,
        backend=options.backend,
        tensorboard=options.tensorboard,
        profile=options.profile,
    )
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    _warm_up(options)
    from lockstep.train import evaluate

    values = evaluate(
        options.what,
        strategy=_strategy(options),
        devices=options.devices,
        backend=options.backend,
        best=options.best,
        knobs=knobs_in(options.set),
        **settings_in(options),
    )
    if os.environ.get("RANK", "0") != "0":
        return 0
    for name, value in values.items():
        print(f"{name} {value:.6g}")
    return 0


def _predict(options: argparse.Namespace) -> int:
    _warm_up(options)
    from lockstep.prediction.predict import predict

    word = options.data.rpartition(":")[2] + ("-best" if options.best else "")
    predict(
        options.run,
        options.data,
        options.out or os.path.join(options.run, f"predictions-{word}"),
        strategy=_strategy(options),
        devices=options.devices,
        backend=options.backend,
        best=options.best,
        overwrite=options.overwrite,
        knobs=knobs_in(options.set),
        **settings_in(options),
    )
    return 0


def _tune(options: argparse.Namespace) -> int:
    if options.json is not None:
        check_writable("--json", options.json)
    _warm_up(options)
    import json

    from lockstep.compare.tune import tune
    from lockstep.jobfile import JobFile

    found = tune(
        JobFile(options.job, knobs_in(options.set), settings_in(options)),
        strategy=options.strategy,
        devices=options.devices,
        rounds=options.rounds,
        seconds=options.seconds,
        told=lambda line: print(line, flush=True),
    )
    if options.json is not None:
        with open(options.json, "w") as file:
            json.dump(found.as_dict(), file, indent=2)
    return 0


def _compare(options: argparse.Namespace) -> int:
    _warm_up(options, surely=True)
    return comparing.compare(options, knobs_in(options.set), settings_in(options))


def _partition(options: argparse.Namespace) -> int:
    prepare()
    return pipelining.partition(options, knobs_in(options.set), settings_in(options))


def _verify(options: argparse.Namespace) -> int:
    _warm_up(options, surely=options.devices == "auto" and options.strategy in ("ddp", None))
    return verifying.verify(options, _strategy(options), knobs_in(options.set), settings_in(options))


def _devices(options: argparse.Namespace) -> int:
    from lockstep.launch.device_table import table

    print(table())
    return 0


def _warm_up(options: argparse.Namespace, *, surely: bool = False) -> None:
    """Before this process imports torch: huge pages, and start the server of ranks, where some may be needed."""
    prepare()
    if surely or (options.strategy in ("ddp", None) and options.devices not in (None, "auto", "1", "1xcpu", "cpu")):
        fork_server.start()


if __name__ == "__main__":
    sys.exit(main())
