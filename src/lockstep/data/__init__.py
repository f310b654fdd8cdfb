"""The data: global batches, each process's share of them, and the loader that fetches it.

::

    shares.py    which samples make global batch k of an epoch, and which of them a process gets
    fetch.py     samples made into (inputs, targets), with random numbers that belong to the sample
    workers.py   the same in loader workers
    ahead.py     copied to an accelerator while the batch before is used
    loader.py    all of that, epoch by epoch
    inputs.py    datasets of which only the inputs are wanted
    source.py    the dataset of a job, or the callable that gives one
"""

from lockstep.data.fetch import Fetcher
from lockstep.data.loader import Loader, SharedLoader, batches
from lockstep.data.shares import Batch, Part, mixed, permutation, share_sizes
from lockstep.data.source import resolve
from lockstep.data.workers import default_workers

__all__ = [
    "Batch",
    "Fetcher",
    "Loader",
    "Part",
    "SharedLoader",
    "batches",
    "default_workers",
    "mixed",
    "permutation",
    "resolve",
    "share_sizes",
]
