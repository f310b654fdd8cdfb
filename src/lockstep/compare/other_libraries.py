"""Peers: the same job by other means, each as a person would write it, started by torchrun in fresh
processes.

They have the same model, loss, optimizer, dataset and global batch; the loop, the sampler and what
moves gradients are theirs. Their sampler gives other batches than ours, so their numbers aren't
held against anybody's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cloudpickle

from lockstep.compare.entries import Entry
from lockstep.compare.timed_run import Tried
from lockstep.errors import InputError, RunError, nearest
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch.world import now

PACKAGES = {"torch": "torch", "fabric": "lightning", "accelerate": "accelerate"}
"""By name, what has to be installed."""


def check_peers(names: Sequence[str]) -> tuple[str, ...]:
    """The same names.

    Raises:
        InputError: there is none of that name, or it isn't installed.
    """
    for name in names:
        if name not in PACKAGES:
            raise InputError(f'there is no peer "{name}": {nearest(name, list(PACKAGES))}')
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise InputError(
                f"{name} isn't installed here: pip install {PACKAGES[name]}, or leave it out"
            )
    return tuple(names)


def attempt_peer(job: Job | JobFile, entry: Entry, *, seconds: float) -> Tried:
    """Time a peer as ``timed_run.attempt`` times a way.

    Raises:
        InputError: the loop by hand hasn't got a setting of the job, or the job can't be sent to
            other processes.
        RunError: it failed.
    """
    source = with_settings(job, entry.way.settings)
    _refuse(the_job(source))
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        plan, out = Path(folder, "plan"), Path(folder, "found.json")
        try:
            plan.write_bytes(
                cloudpickle.dumps((entry.way.strategy, source, entry.devices, seconds))
            )
        except Exception as error:
            raise InputError(
                f"{entry.name}: the job can't be sent to other processes: {error}"
            ) from error
        asked = now()
        _run(entry, plan, out)
        found = json.loads(out.read_text())
    return Tried(
        found["rate"], found["first"], tuple(found["peaks"]), started=found["started"] - asked
    )


def _refuse(job: Job) -> None:
    usual = {
        "accumulate": 1,
        "sync_batchnorm": False,
        "compile": False,
        "activation_checkpointing": None,
    }
    for name, value in usual.items():
        if getattr(job, name) != value:
            raise InputError(f"{name}: the loop by hand hasn't got it")
    if job.precision not in (None, "fp32", "bf16"):
        raise InputError(f"precision: the loop by hand hasn't got {job.precision}")


def _run(entry: Entry, plan: Path, out: Path) -> None:
    """Start the ranks, and wait for ``out``."""
    first = entry.devices[0]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": str(first.threads)}
    if first.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        numbers = visible.split(",") if visible else None
        mine = [str(d.index) if numbers is None else numbers[d.index] for d in entry.devices]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={len(entry.devices)}"]
    command = [
        sys.executable,
        "-m",
        *torchrun,
        "-m",
        "lockstep.compare.other_library_loop",
        str(plan),
        str(out),
    ]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate()
    except BaseException:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    # A rank that leaves gloo's group a moment after the other may abort there; by then all is done
    # and written.
    if not out.is_file():
        said = re.search(
            r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)$", errors, re.MULTILINE
        )
        raise RunError(
            f"{entry.name}: {said[1] if said else f'it ended with {process.returncode}'}"
        )
