"""Memory that a step frees is kept for the next one, and given back when the training is over."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from lockstep.tensors.allocator import freed_memory_kept, prepare
prepare()
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(20 * 2**20).fill_(1.0)  # 80 MiB: more than glibc ever keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

bare = resident()
outside = [faults() for _ in range(3)]
with freed_memory_kept():
    inside = [faults() for _ in range(60)]
    held = resident()
left = resident()
again = [faults() for _ in range(3)]
print(min(outside), max(inside[30:]), held - bare, left - bare, min(again))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_large_block_is_mapped_once_while_memory_is_kept_and_goes_back_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    outside, inside, held, left, again = map(int, done.stdout.split())
    assert inside <= outside // 10
    assert again >= outside // 2
    assert held < 1600  # the blocks of 80 of the first rounds, and not one for each of 60
    assert left < 40
