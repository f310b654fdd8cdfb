"""The data: global batches, each process's share of them, and the loader that fetches it.

::

    order.py           the indices of an epoch
    shares.py          which samples make a global batch, and which of them a process gets
    own_batches.py     the batches of a loop of one's own, cut in micro-batches
    fetch.py           samples made into (inputs, targets), with random numbers of their own
    loader_workers.py  the same in loader workers
    costs.py           what samples cost, by which batches are cut
    loader.py          all of that, epoch by epoch
    copy_ahead.py      batches copied to an accelerator while the one before is used
    stream.py          the same for a stream: every rank reads it, and keeps its share
    dataset_state.py   the state of a dataset that has one
    source.py          the dataset of a job, or the callable that gives one; evaluation sets by name
    fingerprint.py     whether data are the same on every rank
    job_loaders.py     the loaders of a job, and of a loop of one's own
"""

from lockstep.data.job_loaders import batches, eval_loaders, job_loader
from lockstep.data.loader import AnyLoader, Loader
from lockstep.data.loader_workers import default_workers
from lockstep.data.order import permutation
from lockstep.data.shares import Batch, Part, mixed
from lockstep.data.source import is_stream, resolve, resolve_sets
from lockstep.data.stream import StreamLoader

__all__ = [
    "AnyLoader",
    "Batch",
    "Loader",
    "Part",
    "StreamLoader",
    "batches",
    "default_workers",
    "eval_loaders",
    "is_stream",
    "job_loader",
    "mixed",
    "permutation",
    "resolve",
    "resolve_sets",
]
