"""What functions of a sharded model's parameters give, and write, within ``whole_parameters``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from lockstep.launch.world import World

BOUND = 1e-10


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": nn.functional.mse_loss,
    "huber_loss": nn.functional.huber_loss,
    "kl_div": lambda a, b: nn.functional.kl_div(
        a.log_softmax(1), b.softmax(1), reduction="batchmean"
    ),
    "binary_cross_entropy": lambda a, b: nn.functional.binary_cross_entropy(
        a.sigmoid(), b.sigmoid()
    ),
    "unique": lambda a, b: a.round().unique(),
    "nonzero": lambda a, b: (a > b).nonzero(),
    "masked_select": lambda a, b: a.masked_select(b > 0),
    "cdist": torch.cdist,
    "einsum": lambda a, b: torch.einsum("ij,ij->", a, b),
    "softmax": lambda a, b: a.softmax(0),
    "singular values": lambda a, b: torch.linalg.svdvals(a),
    "written to": lambda a, b: torch.zeros(a.shape, dtype=a.dtype).add_(a).mul_(b),
    "given by out": lambda a, b: torch.add(a, b, out=torch.empty(a.shape, dtype=a.dtype)),
}


def test_functions_of_parameters_give_within_whole_parameters_what_they_give_on_one_device() -> (
    None
):
    """Found by trial: a mean squared error of unequal shards was wrong, and what DTensors don't
    know failed.
    """

    def owns(world: World) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 7), nn.Linear(4, 7)
        ).double()  # which only has to have a forward
        one = [layer.weight.detach().clone() for layer in model]
        step = lockstep.parallelize(model, nn.MSELoss(), adam, strategy="fsdp", precision="fp64")
        apart = []
        for name, function in FUNCTIONS.items():
            wanted = function(*one)
            with step.whole_parameters(), torch.no_grad():
                found: Any = function(model[0].weight, model[1].weight)
                found = found.full_tensor() if hasattr(found, "full_tensor") else found
            if found.shape != wanted.shape or (found - wanted).abs().max() > BOUND:
                apart.append(name)
        return apart

    assert lockstep.launch(owns, devices="3xcpu") == [[]] * 3


def swapped(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def of_data(a: Tensor) -> None:
    """What is kept of a parameter goes on being its memory."""
    kept = a.data
    a.data *= 0.5
    a.data += 1
    kept.mul_(kept.norm())


def of_row(a: Tensor) -> None:
    row, data = a.data[2], a.data
    a.mul_(2)
    row.add_(row.norm())
    data.mul_(3)
    a.mul_(row.norm())


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "index_copy_": lambda a, b: a.index_copy_(0, torch.tensor([2, 6]), b[:2]),
    "cumsum_": lambda a, b: a.cumsum_(0),
    "renorm_": lambda a, b: a.renorm_(2, 0, 0.5),
    "fill_diagonal_": lambda a, b: a.fill_diagonal_(1.0),
    "put_": lambda a, b: a.put_(torch.tensor([1, 9]), torch.ones(2, dtype=a.dtype)),
    "eye_": lambda a, b: nn.init.eye_(a),
    "constant_": lambda a, b: nn.init.constant_(a, 0.3),
    "add, with out": lambda a, b: torch.add(a, b, out=a),
    "data of a row": lambda a, b: a[3].data.zero_(),
    "a row of data": lambda a, b: a.data[3].detach().zero_(),
    "vsplit": lambda a, b: a.vsplit([2, 5])[1].zero_(),
    "unfold": lambda a, b: a.unfold(0, 2, 2).zero_(),
    "as_strided": lambda a, b: a.as_strided((5,), (5,)).zero_(),
    "T": lambda a, b: a.T[2].zero_(),
    "to inf": lambda a, b: a.masked_fill_(a > 0, -math.inf).clamp_(-2),
    "over its largest": lambda a, b: a.div_(a.norm(math.inf)).add_(
        torch.linalg.vector_norm(b, ord=math.inf, dim=0)
    ),
    "two rows": lambda a, b: swapped(a[0], a[5]),
    "two parts": lambda a, b: (a[:3], a[3:], a[:3].mul_(2), a[3:].mul_(3)),
    "init of rows": lambda a, b: (nn.init.constant_(a[2:4], 0.5), nn.init.zeros_(a[:, 1])),
    "rows in a list": lambda a, b: torch._foreach_add_([a[1], b[2]], 1.0),
    "inplace=True": lambda a, b: nn.functional.relu(a[1:3], inplace=True),
    "data that stays": lambda a, b: of_data(a),
    "a row that stays": lambda a, b: of_row(a),
    "a row": lambda a, b: a.mul_(torch.arange(4.0)),
    "a column": lambda a, b: a.div_(a.norm(dim=1, keepdim=True)),
    "other rows": lambda a, b: a.copy_(a[torch.tensor([6, 5, 4, 3, 2, 1, 0])]),
    "_foreach_copy_": lambda a, b: torch._foreach_copy_(
        [a, b], [torch.ones_like(a), torch.ones(7, 4, dtype=a.dtype)]
    ),
    "_foreach_lerp_": lambda a, b: torch._foreach_lerp_([a], [b], 0.5),
}


def test_parameters_of_the_optimizer_that_were_taken_outside_are_the_models_within() -> None:
    """Found by trial: each rank clipped by the norm of its own part; and parameters had one
    address.
    """

    def owns(world: World) -> tuple[float, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 2)).double()
        expected = float(torch.stack([p.detach().norm() for p in model.parameters()]).norm())
        step = lockstep.parallelize(model, nn.MSELoss(), adam, strategy="fsdp", precision="fp64")
        parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
        with step.whole_parameters():
            found = float(torch.stack([p.detach().norm() for p in parameters]).norm())
            return found - expected, len({p.data_ptr() for p in model.parameters()})

    assert all(
        abs(apart) < BOUND and number == 4
        for apart, number in lockstep.launch(owns, devices="3xcpu")
    )


def test_writes_to_parameters_within_whole_parameters_are_those_of_one_device() -> None:
    """Found by trial: some left a shard of another shape."""

    def owns(world: World) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 7), nn.Linear(4, 7)).double()
        before = [layer.weight.detach().clone() for layer in model]
        step = lockstep.parallelize(model, nn.MSELoss(), adam, strategy="fsdp", precision="fp64")
        apart = []
        for name, write in WRITES.items():
            wanted = [value.clone() for value in before]
            write(*wanted)
            with step.whole_parameters(), torch.no_grad():
                for layer, value in zip(model, before, strict=True):
                    layer.weight.copy_(value)
                write(*(layer.weight for layer in model))
            found = step.state_dict()["model"]
            if any(
                (found[f"{i}.weight"] - value).abs().max() > BOUND for i, value in enumerate(wanted)
            ):
                apart.append(name)
        return apart

    assert lockstep.launch(owns, devices="3xcpu") == [[]] * 3
