"""What is not finite first, where it can't be looked for in every tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.data import Part
from lockstep.model.nonfinite import why_not_finite

NAN = float("nan")


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of nested tensors and CSR
@pytest.mark.parametrize("kind", ["csr", "nested", "coo", "meta"])
def test_tensors_whose_dtype_has_no_nan_are_left_alone(kind: str) -> None:
    """PyTorch can't look for NaN in them, and its error took the place of the reason."""
    integers = torch.eye(4, dtype=torch.int64)
    tensors: dict[str, Tensor] = {
        "csr": integers.to_sparse_csr(),
        "nested": torch.nested.nested_tensor(list(integers)),
        "coo": integers.to_sparse(),
        "meta": integers.to("meta"),
    }
    model = nn.Linear(3, 3)
    model.register_buffer("edges", tensors[kind])
    part = Part({"edges": tensors[kind], "x": torch.ones(4, 3)}, torch.full((4, 3), NAN), 4, 4)
    outputs = {"edges": tensors[kind], "logits": torch.ones(4, 3)}
    assert why_not_finite(model, part, outputs, first=True) == (
        "the targets of row 0 of the local batch have NaN, and the loss doesn't leave them out"
    )


def test_nan_in_complex_inputs_is_found() -> None:
    inputs = torch.ones(4, 3, dtype=torch.complex64)
    inputs[2, 1] = complex(0.0, NAN)
    reason = why_not_finite(nn.Linear(3, 3), Part(inputs, None, 4, 4), inputs, first=True)
    assert reason == (
        "the inputs of row 2 of the local batch have NaN: clean the data, or mask what is missing"
    )
