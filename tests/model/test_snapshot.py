"""Snapshots: when two values are the same."""

from __future__ import annotations

import pytest
import torch

from lockstep.model.snapshot import same

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64])
def test_nan_is_nan_in_another_dtype_too(dtype: torch.dtype) -> None:
    one = torch.tensor([NAN, 1.0])
    assert same(one, one.to(dtype)) and same(one.to(dtype), one.to(dtype))
    assert not same(one, torch.tensor([NAN, 2.0], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16, torch.bool])
def test_values_whose_dtype_has_no_nan_differ(dtype: torch.dtype) -> None:
    value = torch.tensor([0, 1], dtype=dtype)
    assert same(value, value.clone()) and not same(value, torch.zeros_like(value))
