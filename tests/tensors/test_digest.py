"""What stands for the bits of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.checkpoint.safe_file import write_tensors
from lockstep.tensors.digest import digest
from lockstep.verify.measures import row_ids


@pytest.mark.parametrize("kind", ["expanded", "every third"])
def test_a_single_element_may_have_any_stride(kind: str, tmp_path: Path) -> None:
    """Found by trial: a sample's label, expanded to its one window, ended in a raw error of
    PyTorch's.
    """
    its = torch.tensor(3.0).expand(1) if kind == "expanded" else torch.arange(3.0, 6.0)[::3][:1]
    assert its.stride() != (1,) and digest(its) == digest(torch.tensor([3.0]))
    write_tensors(tmp_path / "its.safetensors", {"its": its}, {})
    assert torch.equal(load_file(tmp_path / "its.safetensors")["its"], torch.tensor([3.0]))
    assert row_ids(its, None, 1) == row_ids(torch.tensor([3.0]), None, 1)
