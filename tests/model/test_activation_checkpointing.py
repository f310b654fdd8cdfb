"""Activation checkpointing: the same numbers, of blocks that were named or found."""

from __future__ import annotations

import dataclasses
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn

from lockstep import train
from lockstep.errors import JobError, StrategyError
from lockstep.model.activation_checkpointing import checkpoint_blocks, found_blocks, named_blocks
from lockstep.strategies.ddp import DDP

from harness import differences, parity, same_bits  # isort: skip
from zoo import SAMPLES, ZOO, Conv, drawn, sgd, slow
from zoo import _job as job_of

WAYS = [
    ("single", "1xcpu"),
    ("dp", "2xcpu"),
    pytest.param("dp", "3xcpu", marks=pytest.mark.slow),
    pytest.param(DDP(reduce="flat"), "2xcpu", marks=pytest.mark.slow),
    (DDP(reduce="overlapped"), "2xcpu"),
]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.drop(self.down(torch.tanh(self.up(x)))) * self.seen


class Residual(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Conv()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "devices"), WAYS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_checkpointed_blocks_give_the_same_numbers(way, devices, accumulate) -> None:
    job = job_of(Residual, optimizer=sgd, accumulate=accumulate, sync_batchnorm=accumulate == 1)
    if accumulate > 1:  # the running statistics of replicas are another story
        job = dataclasses.replace(
            job,
            model=lambda: nn.Sequential(Residual().blocks[0], Block(), nn.Linear(6, 3)),
            accept_differences=True,  # blocks count micro-batches, the reference's the same ones
        )
    found = parity(
        job.replace(activation_checkpointing="auto"),
        way,
        devices,
        against_settings={"activation_checkpointing": None},
    )
    assert found.worst < 1e-10
    assert all(found.moved.values())


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "devices"), WAYS)
def test_dropout_in_a_block_draws_the_same_mask_again(way, devices, tmp_path) -> None:
    """The masks are those of a run without checkpointing, so the weights are too."""
    job = dataclasses.replace(
        job_of(lambda: Residual(0.5), optimizer=sgd, precision="fp64", sync_batchnorm=True)
    )
    plain, checkpointed = (
        train(
            job.replace(activation_checkpointing=wanted),
            strategy=way,
            devices=devices,
            folder=tmp_path,
            quiet=True,
        )
        for wanted in (None, "blocks")
    )
    assert differences(job, checkpointed, plain).worst < 1e-10


class Gated(Block):
    """A block that draws from the generators of Python and numpy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.tensor([random.random(), np.random.rand()], dtype=x.dtype)
        return x + self.down(torch.tanh(self.up(x))) * gates[0] * gates[1]


def gated() -> nn.Module:
    return nn.Sequential(Gated(), Gated(), nn.Linear(6, 3))


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "devices"), [WAYS[0], *WAYS[3:]])
def test_numbers_of_python_and_numpy_are_drawn_again_the_same(way, devices, tmp_path) -> None:
    job = job_of(gated, optimizer=sgd, precision="fp64")
    plain, checkpointed = (
        train(
            job.replace(activation_checkpointing=wanted),
            strategy=way,
            devices=devices,
            folder=tmp_path,
            quiet=True,
        )
        for wanted in (None, "auto")
    )
    assert differences(job, checkpointed, plain).worst < 1e-10


def test_running_statistics_move_once(tmp_path) -> None:
    job = job_of(Normed, drawn(SAMPLES, 2, 7, 7), optimizer=sgd, precision="fp64")
    plain, checkpointed = (
        train(job, devices="1xcpu", folder=tmp_path, quiet=True, activation_checkpointing=wanted)
        for wanted in (None, "body")
    )
    assert same_bits(checkpointed.model(), plain.model())


class Cache:
    """As that of Hugging Face's models, where their config doesn't say use_cache=False."""

    def __init__(self) -> None:
        self.kept: dict[str, list[torch.Tensor]] = {}


class Caching(nn.Module):
    """Attends to all that is in a cache, and to what it puts there."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        its = cache.kept.setdefault(str(id(self)), [])
        its.append(self.keys(x))
        return x + torch.softmax(sum(its), dim=1) * self.values(x) * len(its)


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Caching() for _ in range(2)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache=cache)
        assert [len(its) for its in cache.kept.values()] == [1, 1]
        return self.out(x)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "devices"), [("single", "1xcpu"), ("dp", "2xcpu"), ("fsdp", "2xcpu")]
)
def test_a_cache_that_blocks_are_given_is_the_same_in_the_second_run(way, devices) -> None:
    job = job_of(WithCache, optimizer=sgd, activation_checkpointing="auto")
    assert (
        parity(job, way, devices, against_settings={"activation_checkpointing": None}).worst < 1e-12
    )


def test_a_call_of_a_block_with_objects_makes_no_class() -> None:
    """It took 80 us of each call, ten times what copies of small objects take."""
    model = WithCache()
    checkpoint_blocks(model, "auto")
    before = pickle.Pickler.__subclasses__(), pickle.Unpickler.__subclasses__()
    model(torch.randn(2, 6)).sum().backward()
    assert (pickle.Pickler.__subclasses__(), pickle.Unpickler.__subclasses__()) == before


def test_auto_finds_the_blocks_of_a_transformer_and_of_a_residual_net() -> None:
    transformer = nn.Transformer(8, 2, 3, 2, 16, batch_first=True)
    assert list(found_blocks(transformer)) == [
        *(f"encoder.layers.{i}" for i in range(3)),
        *(f"decoder.layers.{i}" for i in range(2)),
    ]
    stages = nn.Sequential(
        nn.Linear(6, 6), nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block(), Block())
    )
    assert list(found_blocks(stages)) == ["1.0", "1.1", "2.0", "2.1", "2.2"]


def test_dicts_of_layers_which_nobody_calls_are_no_blocks() -> None:
    """Found by trial: fsdp ended with a ValueError of ``fully_shard``."""
    layers = nn.ModuleList(
        nn.ModuleDict({"norm": nn.LayerNorm(6), "mix": nn.Linear(6, 6)}) for _ in range(2)
    )
    assert found_blocks(layers) == {}
    assert list(
        named_blocks(nn.ModuleDict({"layers": layers}), "layers", "blocks", StrategyError)
    ) == [
        "layers.0.norm",
        "layers.0.mix",
        "layers.1.norm",
        "layers.1.mix",
    ]
    within = nn.ModuleList(
        nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()])}) for _ in range(2)
    )
    assert list(found_blocks(within)) == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]


def test_names_stay() -> None:
    model = Residual()
    before = list(model.state_dict())
    checkpoint_blocks(model, "auto")
    assert list(model.state_dict()) == before
    assert isinstance(model.blocks[0], Block)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("blocs", 'no module "blocs"; did you mean "blocks"'),
        ("auto", "auto finds no list of like blocks"),
    ],
)
def test_blocks_that_are_not_there_are_told(wanted: str, says: str, tmp_path) -> None:
    job = job_of(
        Residual if wanted != "auto" else ZOO["mlp"].model, activation_checkpointing=wanted
    )
    with pytest.raises(JobError, match=says):
        train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)


def test_batch_norms_that_would_have_to_meet_in_backward_are_refused(tmp_path) -> None:
    job = job_of(
        Normed, drawn(SAMPLES, 2, 7, 7), sync_batchnorm=True, activation_checkpointing="body"
    )
    train(job, strategy="single", devices="1xcpu", folder=tmp_path / "single", quiet=True)
    with pytest.raises(JobError, match="choose blocks without"):
        train(job, strategy="dp", devices="2xcpu", folder=tmp_path / "dp", quiet=True)


def test_a_block_that_writes_its_input_is_refused_in_a_sentence(tmp_path) -> None:
    def model() -> nn.Module:
        blocks = (nn.Sequential(nn.SiLU(inplace=True), nn.Linear(6, 6)) for _ in range(3))
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(*blocks), nn.Linear(6, 3))

    job = job_of(model, activation_checkpointing="1")
    with pytest.raises(
        StrategyError, match=r"can't be computed a second time .* write its input in place"
    ):
        train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)


class Penalized(nn.Module):
    """Takes a gradient in forward, so that backward goes through the blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Residual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = self.body.blocks[1](self.body.blocks[0](x))
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return self.body.out(out + 0.01 * slope)


@pytest.mark.parametrize(
    ("way", "devices"), [("single", "1xcpu"), slow("dp", "2xcpu"), slow("ddp", "2xcpu")]
)
def test_backward_may_go_through_a_block_twice(way: str, devices: str) -> None:
    """Found by trial: it ended in an AttributeError."""
    job = job_of(Penalized, optimizer=sgd, activation_checkpointing="body.blocks")
    assert (
        parity(job, way, devices, against_settings={"activation_checkpointing": None}).worst < 1e-10
    )


class Summed(nn.Module):
    """Divides a gradient by its norm over the batch; blocks are checkpointed by the model
    itself, or by the setting.
    """

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks, self.reentrant = nn.ModuleList(Block() for _ in range(2)), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = (
                torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
                if self.reentrant
                else block(x)
            )
            if x.requires_grad:
                x.register_hook(lambda grad: grad / grad.norm())
        return self.out(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # of PyTorch, where none is computed
def test_gradients_of_checkpointed_blocks_are_held_to_being_sums(reentrant: bool, tmp_path) -> None:
    """Found by trial: the inspection couldn't go backward twice, and said nothing."""
    job = job_of(
        lambda: Summed(reentrant),
        activation_checkpointing=None if reentrant else "blocks",
        epochs=1,
    )
    with pytest.raises(StrategyError, match="for the whole batch is not the sum for its parts"):
        train(job, strategy="dp", devices="2xcpu", folder=tmp_path)
