"""What stands for the bits of tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.checkpoint.checksummed_file import write_tensors
from lockstep.tensors.digest import digest


@pytest.mark.parametrize("kind", ["expanded", "every third"])
def test_a_single_element_may_have_any_stride(kind: str, tmp_path: Path) -> None:
    """Found by trial: a sample's label, expanded to its one window, ended in a raw error of
    PyTorch's.
    """
    its = torch.tensor(3.0).expand(1) if kind == "expanded" else torch.arange(3.0, 6.0)[::3][:1]
    assert its.stride() != (1,) and digest(its) == digest(torch.tensor([3.0]))
    write_tensors(tmp_path / "its.safetensors", {"its": its}, {})
    assert torch.equal(load_file(tmp_path / "its.safetensors")["its"], torch.tensor([3.0]))


WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t.view(-1)[-1:].add_(1),
    lambda t: t.neg_(),
    lambda t: t.copy_(t.flip(0)),
    lambda t: t.copy_(t.flip(1)),
    lambda t: t.copy_(t.roll(1, 0)),
    lambda t: t[:2].neg_(),
    lambda t: t.mul_(3),
]


@pytest.mark.parametrize("size", [(2, 2), (7, 3), (1009, 40), (64, 1024)])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str
)
def test_a_digest_tells_whatever_was_written(dtype: torch.dtype, size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(5)
    tensor = (100 * torch.randn(size, generator=generator)).to(dtype)
    for write in WRITES:
        written = tensor.clone()
        assert digest(written) == digest(tensor) == digest(tensor.t().contiguous().t())
        write(written.data)
        assert digest(written) != digest(tensor)


def test_a_digest_is_the_same_for_any_number_of_threads() -> None:
    tensor = torch.randn(300_000)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(digest(tensor))
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
    assert digest(torch.zeros(0)) is None and digest(torch.ones(2, 2).to_sparse()) is None
