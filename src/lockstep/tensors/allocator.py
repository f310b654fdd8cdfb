"""How the CPU's memory is asked for: in huge pages, and, where a job wants it, kept from step to
step.

glibc takes each large block from the system when it is asked for, and gives it back when it is
freed. So the activations of every step are pages that the kernel clears and maps anew, 4 KiB at a
time: up to 45 % of a step of MobileNetV2. Two things help:

- **Huge pages**, 2 MiB at a time, which PyTorch asks for where ``THP_MEM_ALLOC_ENABLE`` is set
  before its first tensor. Processes of Lockstep's own (the command, local ranks) have that.
- **Kept memory**: what a step frees stays with the process for the next one. The process then holds
  its largest step, and gaps: so it is a setting of the job (``keep_memory``), and ``lockstep tune``
  measures what it gains and costs.

Source: mallopt(3); ``c10/core/alignment.h`` and ``c10/core/impl/alloc_cpu.cpp`` of PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_DEFAULTS = ((_MMAP_MAX, 65536), (_TRIM_THRESHOLD, 128 * 1024))

_lock = threading.Lock()
_holders = 0


def prepare() -> None:
    """Ask for huge pages, in a process of Lockstep's own that has no tensor yet. A person's own
    setting stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if (libc := _glibc()) is not None:
        # Arenas of other threads hold blocks up to 64 MiB only; larger ones could not be kept
        # there.
        libc.mallopt(_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep what is freed from now on, as long as the process lives. Without glibc this does
    nothing.
    """
    global _holders
    with _lock:
        _holders += 1
        if _holders == 1 and (libc := _glibc()) is not None:
            libc.mallopt(_ARENA_MAX, 1)
            libc.mallopt(_MMAP_MAX, 0)
            libc.mallopt(_TRIM_THRESHOLD, -1)


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep it for a while; afterwards all that is free goes back to the system."""
    global _holders
    keep_freed_memory()
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and (libc := _glibc()) is not None:
                for option, value in _DEFAULTS:
                    libc.mallopt(option, value)
                libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
