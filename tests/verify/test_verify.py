"""``verify``: each cause planted and named, no false alarm, and what a person reads."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job, cli
from lockstep.data import Batch, Part
from lockstep.errors import InputError, StrategyError
from lockstep.launch.layout import Layout
from lockstep.model.losses.loss import Loss
from lockstep.run.events import Caveat
from lockstep.strategies.ddp import DDP, DDPStep
from lockstep.strategies.dp import DP, DPStep
from lockstep.strategies.pp import PP
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result
from lockstep.strategies.strategy import Strategy
from lockstep.tensors.pytree import each
from lockstep.verify import Verification
from lockstep.verify.cause_search import Diagnosis
from lockstep.verify.cause_texts import CAUSES

from batch_dependent_models import Averaging, Jittering, Noisy, NoisyGradient, SelfWriting  # isort: skip
from zoo import (  # isort: skip
    LENGTHS,
    SAMPLES,
    ZOO,
    Conv,
    drawn,
    labels,
    mlp,
    plain_sgd,
    sgd,
    tokens_and_next,
)

MLP = ZOO["mlp"]
DEVICES = "2xcpu"


def verified(job: Any, strategy: Any, **settings: Any) -> Verification:
    devices = "1xcpu" if strategy == "single" else DEVICES
    return lockstep.verify(job, strategy=strategy, devices=devices, whole=True, **settings)


def names(found: Verification) -> set[str]:
    assert not found, "it was to be found unequal"
    return {cause.kind for cause in found.causes}


# ---- equal, and nothing else said ----------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru, self.out = nn.Embedding(11, 6), nn.GRU(6, 8), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(self.words(tokens).transpose(0, 1))[0][-1])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(nn.functional.dropout(x, 0.1, self.training))


ORDINARY: dict[str, tuple[Job, Any]] = {
    "momentum under dp": (ZOO["momentum"], "dp"),
    "adamw with groups by name": (ZOO["adamw with groups by name"], "ddp"),
    "batch norm with sync_batchnorm": (ZOO["convolutions with sync_batchnorm"], "ddp"),
    "batch norm with sync_batchnorm under dp": (ZOO["convolutions with sync_batchnorm"], "dp"),
    "batch norm under pp": (
        ZOO["convolutions with sync_batchnorm"].replace(sync_batchnorm=False),
        PP(microbatches=2),
    ),
    "dropout under mp": (dataclasses.replace(MLP, model=Dropping), "mp"),
    "tied weights and ignored tokens": (ZOO["ignored tokens and tied weights"], "ddp"),
    "a GRU": (
        dataclasses.replace(
            MLP,
            model=Recurrent,
            train_data=torch.utils.data.TensorDataset(
                torch.arange(SAMPLES * 5).view(-1, 5) % 11, labels(SAMPLES, 3)
            ),
            eval_data=None,
        ),
        "dp",
    ),
    "a layer unused on one rank": (ZOO["a layer unused on one rank"], "ddp"),
    "clipping with accumulation": (ZOO["clipping with accumulation"], "dp"),
    "a schedule by step": (ZOO["a schedule by step"], "dp"),
    "a stream that draws": (ZOO["a stream that draws"], "ddp"),
    "lengths that vary, padded": (ZOO["lengths that vary, padded by collate, in groups"], "dp"),
    "a buffer that counts": (ZOO["a buffer that counts and extra state"], "dp"),
    "a batch that leaves a rank empty": (ZOO["a last batch that leaves a rank empty"], "ddp"),
    "sparse gradients": (ZOO["sparse gradients, and an empty rank"], "dp"),
    "complex parameters": (ZOO["complex parameters"], "dp"),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow if i % 3 else ()) for i, k in enumerate(ORDINARY)],
)
def test_an_ordinary_model_gets_no_false_alarm(kind: str) -> None:
    job, strategy = ORDINARY[kind]
    found = verified(job, strategy)
    assert found, found
    assert found.worst < 1e-10
    assert found.precision == "float64"
    assert found.causes == ()


@pytest.mark.slow
def test_a_small_gpt_of_hugging_face_gets_no_false_alarm() -> None:
    """Its loss is computed in float32 whatever the model is in, which only measured noise tells
    from a fault.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    tokens = torch.randint(40, (13, 8), generator=torch.Generator().manual_seed(0))
    job = Job(
        model=lambda: transformers.GPT2LMHeadModel(config),
        loss=lambda said, y: (said.loss * len(y), len(y)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train_data=[({"input_ids": t, "labels": t}, t) for t in tokens],
        batch_size=4,
    )
    found = verified(job, "dp")
    assert found, found


class Packing(nn.Module):
    """Takes its sequences padded, and packs them inside."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = (x[:, 0] > 0) + 2
        steps = x.view(len(x), 3, 2)
        packed = nn.utils.rnn.pack_padded_sequence(
            steps, lengths, batch_first=True, enforce_sorted=False
        )
        return self.out(
            nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0].sum(dim=1)
        )


class Annealed(nn.Module):
    """A loss that counts its calls, of which there is one in each update."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.calls += 1
        penalty = outputs.square().sum() * self.calls.clamp(max=20) / 20
        return nn.functional.cross_entropy(outputs, targets, reduction="sum") + penalty, len(
            targets
        )


EASILY_MISJUDGED = {
    "sequences packed inside": {"model": Packing},
    "a loss that counts its calls": {"loss": Annealed(), "metrics": {}, "eval_data": None},
    "weights of classes": {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))},
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", EASILY_MISJUDGED)
def test_what_is_easily_misjudged_gets_no_false_alarm(kind: str) -> None:
    found = verified(dataclasses.replace(MLP, **EASILY_MISJUDGED[kind]), "ddp")
    assert found, found
    assert found.precision == "float64"
    assert found.worst < 1e-10


def test_a_plain_model_gets_no_note_under_fsdp() -> None:
    """Found by users: what verify itself watches layers with was reported as hooks that the
    model got later.
    """
    found = verified(MLP, "fsdp")
    assert found, found
    assert found.notes == ()


def test_the_course_has_the_smaller_last_batch_and_two_of_the_second_epoch() -> None:
    found = verified(MLP, "dp")
    assert found.comparison is not None
    assert [(u.epoch, u.batch, u.samples) for u in found.comparison.updates] == [
        (1, 1, 8),
        (1, 2, 8),
        (1, 4, 5),
        (2, 1, 8),
        (2, 2, 8),
    ]
    assert found.comparison.evaluation.keys() == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("samples", "wanted"),
    [(18, [8, 8, 2, 8, 8]), (16, [8, 8, 8, 8]), (9, [8, 1, 8, 1]), (5, [5, 5])],
)
def test_the_smaller_last_batch_is_there_whatever_the_number_of_batches(
    samples: int, wanted: list[int]
) -> None:
    data = TensorDataset(drawn(samples, 6), labels(samples, 3))
    found = verified(MLP.replace(train_data=data), "dp")
    assert found, found
    assert found.comparison is not None and [u.samples for u in found.comparison.updates] == wanted


class Casting(nn.Module):
    """Computes in float32, whatever its inputs and parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.net[0].weight.dtype != torch.float32:
            raise RuntimeError("expected scalar type Float but found Double")
        return self.net(x)


def test_a_model_without_float64_is_held_against_measured_noise() -> None:
    found = verified(dataclasses.replace(MLP, model=Casting), "ddp")
    assert found, found
    assert found.precision == "float32"
    assert found.worst < 1e-4


class CastingNorms(Casting):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_what_adam_makes_of_a_gradient_that_is_rounding_is_no_difference(precision: str) -> None:
    """A bias before a batch norm has the gradient zero, but for rounding, and Adam steps by the
    rate all the same.
    """

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-12)

    model = CastingNorms if precision == "float32" else lambda: CastingNorms().net
    job = dataclasses.replace(MLP, model=model, optimizer=adamw, sync_batchnorm=True)
    found = verified(job, "dp")
    assert found.precision == precision
    assert found, found


def test_a_model_without_float64_that_parts_is_found_too() -> None:
    found = verified(dataclasses.replace(MLP, model=CastingNorms), "dp")
    assert names(found) == {"batchnorm"}


# ---- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_batch_norm_per_replica_is_named_with_its_layer_and_its_setting(way: str) -> None:
    job = ZOO["convolutions with sync_batchnorm"].replace(sync_batchnorm=False)
    found = verified(job, way)
    assert names(found) == {"batchnorm"}
    assert found.layer == ("body.1", "BatchNorm2d")
    assert found.first is not None and found.first.number == 1
    assert "sync_batchnorm" in found.causes[0].fix


RECOMPUTED = {"activation_checkpointing": "auto"}
DROPOUT_OFF = "dropout is switched off on both sides, since its masks differ between strategies"


@pytest.mark.parametrize(
    "way", ["dp", *(pytest.param(way, marks=pytest.mark.slow) for way in ("ddp", "fsdp"))]
)
def test_dropout_is_switched_off_and_a_line_says_so(way: str) -> None:
    """By a module, and by a function of forward."""
    found = verified(dataclasses.replace(MLP, model=Dropping), way)
    assert found, found
    assert found.notes == (DROPOUT_OFF,)
    assert found.worst < 1e-10


class DroppingBlock(nn.Module):
    """Every kind of dropout, in a layer that is there several times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.gru = nn.GRU(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.inner(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.dropout(self.gru(x)[0], 0.1, self.training)


class DroppingBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.out = nn.Linear(1, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.widen(x.unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(dim=1))


@pytest.mark.parametrize(
    "settings", [{}, pytest.param(RECOMPUTED, marks=pytest.mark.slow)], ids=str
)
def test_every_kind_of_dropout_is_switched_off(settings: dict[str, Any]) -> None:
    """Also where blocks compute their activations again in backward."""
    found = verified(dataclasses.replace(MLP, model=DroppingBlocks), "dp", **settings)
    assert found, found
    assert found.notes == (DROPOUT_OFF,)


def test_a_real_difference_is_named_beside_dropout_that_is_switched_off() -> None:
    job = dataclasses.replace(MLP, model=lambda: nn.Sequential(nn.Dropout(0.2), Noisy()))
    found = verified(job, "dp")
    assert names(found) == {"drawing"}
    assert DROPOUT_OFF in found.notes


def test_random_numbers_that_are_no_dropout_are_not_called_dropout() -> None:
    found = verified(dataclasses.replace(MLP, model=Noisy), "dp")
    assert names(found) == {"drawing"}
    assert DROPOUT_OFF not in found.notes


def test_dropout_stays_where_its_masks_are_those_of_one_device() -> None:
    for way in ("single", PP(microbatches=2)):
        found = verified(dataclasses.replace(MLP, model=Dropping), way)
        assert found, found
        assert DROPOUT_OFF not in found.notes


@pytest.mark.parametrize("way", ["ddp", "dp"])
def test_streams_of_micro_batches_are_not_taken_for_draws(way: str) -> None:
    job = ZOO["convolutions with sync_batchnorm"].replace(sync_batchnorm=False, accumulate=2)
    assert names(verified(job, way)) == {"batchnorm"}


def test_two_causes_at_once_are_both_named() -> None:
    class Both(Conv):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 0.01 * torch.randn_like(x))

    job = dataclasses.replace(ZOO["convolutions with sync_batchnorm"], model=Both)
    assert names(verified(job, "dp", sync_batchnorm=False)) == {"batchnorm", "drawing"}


class Attending(nn.Module):
    """Its keys have a bias, which adds the same to all of a row's scores: the gradient is zero
    but for rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.out = nn.Linear(1, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.widen(x.unsqueeze(-1))
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-11)


@pytest.mark.parametrize("way", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_dropout_is_no_difference_where_adam_magnifies_the_rounding_of_a_gradient_that_is_zero(
    way: str,
) -> None:
    found = verified(dataclasses.replace(MLP, model=Attending, optimizer=adamw), way)
    assert found, found


def in_float32(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(outputs.float(), targets, reduction="sum"), len(targets)


def test_dropout_is_no_difference_where_the_loss_alone_is_in_float32() -> None:
    found = verified(
        dataclasses.replace(MLP, model=Dropping, loss=in_float32, optimizer=adamw), "dp"
    )
    assert found, found


class Normalised(nn.Sequential):
    """A bias before a batch norm, and dropout after it."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
        )


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("way", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_batch_norm_is_judged_without_the_dropout_behind_it_under_adam(
    way: str, together: bool
) -> None:
    job = dataclasses.replace(MLP, model=Normalised, optimizer=adamw, sync_batchnorm=together)
    found = verified(job, way)
    assert DROPOUT_OFF in found.notes
    assert bool(found) == together
    assert {cause.kind for cause in found.causes} == (set() if together else {"batchnorm"})


def test_a_model_that_draws_in_forward_is_named() -> None:
    assert names(verified(dataclasses.replace(MLP, model=Noisy), "ddp")) == {"drawing"}


class Choosing(nn.Module):
    """A mixture whose parts are drawn: by a function of PyTorch's that draws within."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.gumbel_softmax(self.gate(x)))


class Drawn(nn.Linear):
    """Its noise comes from one of many functions."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(6, 3)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.01 * self.draw(x).to(x))


DRAWS: dict[str, Callable[[], nn.Module]] = {
    "gumbel": Choosing,
    "rrelu": lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 3)),
    "exponential": lambda: Drawn(
        lambda x: torch.distributions.Exponential(torch.ones(6)).sample((len(x),))
    ),
    "gamma": lambda: Drawn(
        lambda x: torch.distributions.Gamma(torch.ones(6), torch.ones(6)).sample((len(x),))
    ),
    "beta": lambda: Drawn(
        lambda x: torch.distributions.Beta(torch.ones(6), torch.ones(6)).sample((len(x),))
    ),
    "uniform": lambda: Drawn(lambda x: torch.empty_like(x).uniform_(1, 3).log()),
    "normal": lambda: Drawn(
        lambda x: (
            torch.normal(x, 0.5) + torch.normal(2.0, 3.0, x.shape) + torch.normal(1.0, x.abs())
        )
    ),
    "a path that is left out": lambda: Drawn(lambda x: x * (torch.rand(len(x), 1) + 0.9).floor()),
    "integers": lambda: Drawn(lambda x: torch.randint(2, 5, x.shape)),
    "poisson": lambda: Drawn(lambda x: torch.poisson(torch.ones(x.shape))),
    "categories": lambda: Drawn(lambda x: torch.multinomial(torch.ones(len(x), 9), 6)),
    "signs": lambda: Drawn(lambda x: torch.empty_like(x).random_(0, 2)),
    "numpy": lambda: Drawn(lambda x: torch.full_like(x, np.random.rand())),
    "random": lambda: Drawn(lambda x: torch.full_like(x, random.random())),
}


OUTSIDE = {"rrelu", "gamma", "beta", "poisson", "categories", "numpy", "random"}
"""Drawn by what verify can't replace."""


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if i % 4 else ()) for i, k in enumerate(DRAWS)]
)
def test_whatever_a_model_draws_with_is_named(kind: str) -> None:
    found = verified(dataclasses.replace(MLP, model=DRAWS[kind]), "dp")
    assert names(found) == {"drawing"}, found
    assert ("can't be taken out" in found.causes[0].text) == (kind in OUTSIDE)


class NoisyBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NoisyGradient.apply(self.net(x))


@pytest.mark.parametrize("way", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_model_that_draws_in_backward_is_named(way: str) -> None:
    found = verified(dataclasses.replace(MLP, model=NoisyBackward), way)
    assert names(found) == {"drawing"}


class Remembering(nn.Linear):
    """A running mean of what it has seen, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.seen = [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen[0] = 0.9 * self.seen[0] + 0.1 * float(x.mean())
        return super().forward(x - self.seen[0])


@pytest.mark.parametrize("way", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_state_outside_of_the_state_dict_is_found(way: str) -> None:
    found = verified(dataclasses.replace(MLP, model=Remembering), way)
    assert names(found) == {"mixing"}
    assert "keeps a state" in found.causes[0].text


class OnFirstRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and (not dist.is_initialized() or dist.get_rank() == 0):
            self.scale += 0.1
        return self.net(x) * self.scale


def test_a_buffer_that_only_one_rank_updates_is_found() -> None:
    found = verified(dataclasses.replace(MLP, model=OnFirstRank), "ddp")
    assert names(found) == {"mixing"}
    assert "keeps a state" in found.causes[0].text


@pytest.mark.parametrize("way", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_buffer_that_depends_on_the_share_is_found(way: str) -> None:
    found = verified(dataclasses.replace(MLP, model=Averaging), way)
    assert names(found) == {"mixing"}
    assert "keeps a state" in found.causes[0].text


class CountingSamples(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("samples", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples += len(x) * self.training
        return super().forward(x)


def test_a_buffer_that_alone_parts_is_named() -> None:
    found = verified(dataclasses.replace(MLP, model=CountingSamples, batch_size=4), "ddp")
    assert names(found) == {"buffer"}
    assert '"samples"' in found.causes[0].text


@pytest.mark.parametrize("way", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_running_statistics_of_instance_norm_are_named(way: str) -> None:
    def model() -> nn.Module:
        norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Unflatten(1, (2, 3)), norm, nn.Flatten(), nn.Linear(6, 3))

    found = verified(dataclasses.replace(MLP, model=model), way)
    assert names(found) == {"buffer"}, found
    assert '"1.running_mean"' in found.causes[0].text


@pytest.mark.parametrize("kind", ["before", "after it was accumulated"])
def test_a_hook_on_a_parameter_that_is_not_linear_is_named(kind: str) -> None:
    def shorten(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad /= parameter.grad.norm() + 1e-9

    def model() -> nn.Module:
        made = mlp()
        if kind == "before":
            made[2].weight.register_hook(lambda grad: grad / (grad.norm() + 1e-9))
        else:
            made[2].weight.register_post_accumulate_grad_hook(shorten)
        return made

    found = verified(dataclasses.replace(MLP, model=model), "ddp")
    assert names(found) == {"autograd function"}, found
    assert "a backward of the model, or a hook in it" in found.causes[0].text


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.centre, self.last = nn.Linear(6, 8), Centre(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.centre(self.first(x)))


class Centre(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=0)


def test_samples_that_act_on_one_another_are_named_with_the_layer() -> None:
    found = verified(dataclasses.replace(MLP, model=Centred), "dp")
    assert names(found) == {"mixing"}
    assert found.layer == ("centre", "Centre")


class Recurrent(Centred):
    """PyTorch's recurrent layers keep a list of their weights, which is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(6, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.centre(self.first(x.unsqueeze(1))[0][:, -1]))


class Recording(Centred):
    """Keeps what it saw last, for somebody to look at."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.saw = super().forward(x).detach()
        return super().forward(x)


@pytest.mark.parametrize("model", [Recurrent, Recording])
def test_what_is_kept_and_acts_on_nothing_is_not_blamed(model: type[Centred]) -> None:
    found = verified(dataclasses.replace(MLP, model=model), "dp")
    assert names(found) == {"mixing"}, found
    assert "Centre" in found.causes[0].text


def mixed_up(samples: list[Any]) -> Any:
    inputs, targets = (
        torch.stack([x for x, _ in samples]),
        torch.tensor([int(y) for _, y in samples]),
    )
    return 0.7 * inputs + 0.3 * inputs.flip(0), targets


@pytest.mark.parametrize("model", [mlp, Centred])
def test_a_collate_that_mixes_samples_is_found(model: Any) -> None:
    found = verified(dataclasses.replace(MLP, model=model, collate=mixed_up), "ddp")
    assert names(found) == {"mixing"}, found
    assert "collate" in found.causes[0].text


class MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / len(grad)


class Dividing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(MeanGradient.apply(self.first(x)))


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_an_autograd_function_that_divides_by_the_batch_is_named(way: str) -> None:
    found = verified(dataclasses.replace(MLP, model=Dividing), way)
    assert names(found) == {"autograd function"}
    assert "a backward of the model, or a hook in it" in found.causes[0].text
    assert found.layer is None


class InEvaluation(nn.Linear):
    """Is another model in evaluation."""

    def __init__(self, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(6, 3)
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.training else self.other(x))


@pytest.mark.parametrize("way", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("other", "wanted"),
    [(lambda x: x - x.mean(dim=0), "mixing"), (lambda x: x + torch.randn_like(x), "drawing")],
    ids=["mixing", "drawing"],
)
def test_what_parts_in_evaluation_alone_is_named(other: Any, wanted: str, way: str) -> None:
    found = verified(dataclasses.replace(MLP, model=lambda: InEvaluation(other)), way)
    assert names(found) == {wanted}, found
    assert "in evaluation" in found.causes[0].text or "of the evaluation" in found.causes[0].text
    assert found.first is None


def test_a_metric_that_is_no_sum_is_named() -> None:
    def largest(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return outputs.max(), 1

    found = verified(MLP.replace(metrics={"largest": largest}), "dp")
    assert names(found) == {"metric"}, found
    assert '"largest"' in found.causes[0].text


def test_an_optimizer_that_draws_otherwise_on_each_rank_is_named() -> None:
    found = verified(
        dataclasses.replace(MLP, optimizer=lambda params: Jittering(params, lr=0.1)), "ddp"
    )
    assert names(found) == {"drift"}, found


class Unseeded(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = torch.Generator()
        own.seed()
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=own, dtype=x.dtype))


@pytest.mark.parametrize("way", ["single", "dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_model_that_draws_unseeded_numbers_is_named(way: str) -> None:
    assert names(verified(dataclasses.replace(MLP, model=lambda: Unseeded(6, 3)), way)) == {
        "unseeded model"
    }


def born_anew() -> nn.Module:
    model, own = mlp(), torch.Generator()
    own.seed()
    with torch.no_grad():
        model[0].weight.normal_(generator=own)
    return model


@pytest.mark.parametrize("way", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_model_whose_first_weights_are_unseeded_is_named(way: str) -> None:
    assert names(verified(dataclasses.replace(MLP, model=born_anew), way)) == {"unseeded model"}


class Hasty(torch.autograd.Function):
    """An extension's own kernel: fast, and other each time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-3 * os.urandom(1)[0] / 255)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Hurried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Hasty.apply(self.net(x))


def test_operators_that_are_not_deterministic_are_named() -> None:
    found = verified(dataclasses.replace(MLP, model=Hurried), "dp")
    assert names(found) == {"unseeded model"}
    assert "operators that are not deterministic" in found.causes[0].text


def test_draws_that_come_out_nearly_alike_once_are_not_taken_for_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truly, alone = os.urandom, Diagnosis._of_the_job_alone
    first = [
        bytes([100 + i % 2]) for i in range(4)
    ]  # one device against itself: 4e-6 apart, then as ever

    def nearly_alike(diagnosis: Diagnosis) -> list[Caveat]:
        monkeypatch.setattr(os, "urandom", lambda size: first.pop() if first else truly(size))
        try:
            return alone(diagnosis)
        finally:
            monkeypatch.setattr(os, "urandom", truly)

    monkeypatch.setattr(Diagnosis, "_of_the_job_alone", nearly_alike)
    assert names(verified(dataclasses.replace(MLP, model=Hurried), "dp")) == {"unseeded model"}


def test_parameters_that_the_model_writes_are_named() -> None:
    assert names(verified(dataclasses.replace(MLP, model=lambda: SelfWriting(after=4)), "ddp")) <= {
        "drift",
        "state",
    }


class Clamping(nn.Linear):
    """Keeps its weights small, in forward."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_weights_that_the_model_clamps_in_forward_are_refused_as_in_training() -> None:
    found = verified(dataclasses.replace(MLP, model=Clamping), "dp")
    assert names(found) == {"state"}
    assert found.refused is not None and 'writes its parameter "weight"' in found.refused


def test_weights_that_every_rank_clamps_alike_are_those_of_one_device() -> None:
    found = verified(dataclasses.replace(MLP, model=Clamping), "ddp")
    assert found, found


class OneOfItsKind(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        raise TypeError("there can be one only")


def test_a_strategy_that_does_not_take_what_one_device_takes_is_unequal() -> None:
    found = verified(dataclasses.replace(MLP, model=OneOfItsKind), "dp")
    assert names(found) == {"refused"} and not found
    assert found.refused is not None and "there can be one only" in found.refused


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_what_one_device_does_not_take_either_is_no_answer(way: str) -> None:
    with pytest.raises(InputError, match="mean over nothing"):
        verified(MLP.replace(loss=refusing), way)


def refusing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise InputError("mean over nothing: give it something")


class Taught(nn.Module):
    """A frozen copy follows what it sees in one update; the loss doesn't follow it.

    Args:
        at: the update. The sum check of a training looks at 1, 2 and 4, not at 3.
        ranks: where it does; None is everywhere.
    """

    def __init__(self, at: int = 3, ranks: set[int] | None = None) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)
        self.at, self.ranks, self.updates = at, ranks, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = dist.get_rank() if dist.is_initialized() else 0
        self.updates += self.training and torch.is_grad_enabled()
        if self.updates == self.at and (self.ranks is None or here in self.ranks):
            self.teacher.weight.data.lerp_(x.mean(dim=0).expand(3, -1), 0.1)
        return self.student(x)


@pytest.mark.parametrize(("way", "wanted"), [("dp", "state"), ("ddp", "drift")])
def test_a_frozen_parameter_that_follows_the_batch_is_named(way: str, wanted: str) -> None:
    found = verified(dataclasses.replace(MLP, model=Taught), way)
    assert names(found) == {wanted}
    assert '"teacher.weight"' in found.causes[0].text
    assert found.first is not None and found.first.number == 3
    assert any(name == "teacher.weight" for _, name, _ in found.beyond)


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_frozen_parameter_that_follows_a_checked_batch_is_refused_as_in_training(
    way: str,
) -> None:
    found = verified(dataclasses.replace(MLP, model=lambda: Taught(at=2)), way)
    assert names(found) == {"state"}
    assert found.refused is not None and 'writes its parameter "teacher.weight"' in found.refused


def test_ranks_that_part_are_not_said_to_part_in_evaluation() -> None:
    found = verified(dataclasses.replace(MLP, model=lambda: Taught(ranks={1})), "ddp")
    assert names(found) == {"drift"}
    assert 'not equal between the ranks: "teacher.weight" has come to differ' in str(found)


class NoisyElsewhere(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.01 * float(np.random.standard_normal()))


def test_what_training_says_of_the_model_is_said() -> None:
    found = verified(dataclasses.replace(MLP, model=NoisyElsewhere), "ddp")
    assert names(found) == {"drawing"}
    assert "numpy's random" in found.causes[0].text
    assert any("draws random numbers in forward" in note for note in found.notes), found.notes


# ---- the loss and the data -----------------------------------------------------------------------


def pairs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


@pytest.mark.parametrize(
    ("way", "wanted"), [("dp", {"loss"}), ("ddp", {"loss"}), ("pp", {"cut", "loss"})]
)
def test_a_loss_over_pairs_is_named_with_what_training_says_of_it(
    way: str, wanted: set[str]
) -> None:
    found = verified(MLP.replace(loss=pairs), way)
    assert names(found) == wanted
    assert "total, count" in found.causes[-1].fix
    assert "pairs is not a mean over samples" in found.notes[1]


class Squeezing(nn.Linear):
    """The outputs of one sample have no row for it."""

    def __init__(self) -> None:
        super().__init__(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze()


def test_outputs_of_a_share_in_another_shape_are_no_fault_of_the_loss() -> None:
    data = TensorDataset(drawn(18, 6), drawn(18))  # the last batch has a sample for each of two
    found = verified(
        MLP.replace(
            model=Squeezing, train_data=data, eval_data=None, metrics={}, loss=nn.MSELoss()
        ),
        "ddp",
    )
    assert names(found) == {"refused"}
    assert "squeeze" in found.causes[0].fix


def test_a_loss_that_is_not_a_mean_is_called_so_once() -> None:
    found = verified(
        MLP.replace(loss=lambda outputs, targets: outputs.square().mean().sqrt()), "ddp"
    )
    assert names(found) == {"loss"}
    assert found.causes[0].text.count("not a mean over samples") == 1


def one_item(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Says that a batch of any size is one item."""
    return nn.functional.cross_entropy(outputs, targets), 1


def test_a_loss_whose_count_is_wrong_is_named_with_what_training_says_of_it() -> None:
    found = verified(MLP.replace(loss=one_item), "dp")
    assert names(found) == {"loss"}
    assert found.first is not None and found.first.number == 3, "the first uneven batch"
    assert "one_item: the total is not a sum over samples" in found.notes[1]


class Experts(nn.Module):
    """A mixture of experts with a loss of its own that balances their load: the product of two
    means.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        chances = self.gate(x).softmax(-1)
        outputs = sum(chances[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        chosen = nn.functional.one_hot(chances.argmax(-1), 4).to(x).mean(0)
        return {"logits": outputs, "balance": 4 * (chosen * chances.mean(0)).sum()}


def with_balance(
    outputs: dict[str, torch.Tensor], targets: torch.Tensor
) -> tuple[torch.Tensor, int]:
    total = nn.functional.cross_entropy(outputs["logits"], targets, reduction="sum")
    return total + 0.1 * len(targets) * outputs["balance"], len(targets)


BALANCED = dataclasses.replace(MLP, model=Experts, loss=with_balance, metrics={})


class Summed(Experts):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = super().forward(x)
        return {"logits": outputs["logits"], "load": self.gate(x).softmax(-1).sum(0)[:3]}


def with_load(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    total = nn.functional.cross_entropy(outputs["logits"], targets, reduction="sum")
    return total + len(targets) * (outputs["load"] / len(targets)).square().sum(), len(targets)


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_loss_that_squares_a_sum_over_the_batch_is_named(way: str) -> None:
    found = verified(BALANCED.replace(model=Summed, loss=with_load), way)
    assert names(found) == {"loss"}
    assert "computed from all samples together" in found.causes[0].text


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_an_auxiliary_loss_over_the_batch_is_named(way: str, tmp_path: Path) -> None:
    found = verified(BALANCED, way)
    assert names(found) == {"loss"}
    with pytest.raises(StrategyError, match="total of the loss is"):
        lockstep.train(BALANCED, strategy=way, devices=DEVICES, folder=tmp_path)


# ---- cutting the batch is enough alone -------------------------------------------------------------------

MICRO_BATCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "accumulation": ("single", {"accumulate": 2}),
    "pp": (PP(microbatches=2), {}),
}


@pytest.mark.parametrize("way", MICRO_BATCHES)
def test_an_auxiliary_loss_that_micro_batches_change_is_named(way: str) -> None:
    """Its reference accumulates as well, and was found equal."""
    strategy, settings = MICRO_BATCHES[way]
    found = verified(BALANCED.replace(**settings), strategy)
    assert names(found) == {"cut", "loss"}, found
    assert "cutting the batch is enough" in found.causes[0].text
    assert found.comparison is not None and found.comparison.worst < 1e-10
    assert found.whole is not None and found.whole.worst > 1e-3
    assert "not equal to the whole batch from update 2 on" in str(found)


@pytest.mark.parametrize("way", MICRO_BATCHES)
def test_samples_that_act_on_one_another_within_micro_batches_are_named(way: str) -> None:
    strategy, settings = MICRO_BATCHES[way]
    found = verified(MLP.replace(model=Centred, **settings), strategy)
    assert names(found) == {"cut", "mixing"}, found
    assert found.layer == ("centre", "Centre")


INNOCENT: dict[str, dict[str, Any]] = {
    "a small network": {},
    "dropout": {"model": Dropping},
    "noise in forward": {"model": lambda: nn.Sequential(nn.Linear(6, 6), Noisy())},
    "batch norm and dropout": {"model": Normalised},
    "a buffer that counts": {"model": lambda: nn.Sequential(nn.Linear(6, 6), CountingSamples())},
    "adamw": {"optimizer": adamw, "model": Attending},
    "ignored targets": {"loss": nn.CrossEntropyLoss(ignore_index=2)},
}


@pytest.mark.sweep
@pytest.mark.parametrize("way", MICRO_BATCHES)
@pytest.mark.parametrize("kind", INNOCENT)
def test_micro_batches_of_an_innocent_model_are_equal_to_the_whole(kind: str, way: str) -> None:
    strategy, settings = MICRO_BATCHES[way]
    found = verified(dataclasses.replace(MLP, **INNOCENT[kind], **settings), strategy)
    assert found, found
    assert found.whole is not None and found.whole.updates


def test_batch_norm_over_micro_batches_has_a_line_of_its_own() -> None:
    found = verified(dataclasses.replace(MLP, model=Normalised, accumulate=2), "single")
    assert found, found
    assert any("BatchNorm normalizes over each micro-batch" in note for note in found.notes)
    *_, last = found.lines(1000)
    assert "from single in 2 micro-batches; whole batches give the same" in last
    assert ", but for BatchNorm, which normalizes over a micro-batch, and for random" in last


class Fickle(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.inputs, self.targets = drawn(SAMPLES, 6), labels(SAMPLES, 3)
        self.own = torch.Generator()
        self.own.seed()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return self.inputs[i] + torch.randn(6, generator=self.own), self.targets[i]


def fickle() -> Fickle:
    return Fickle()


@pytest.mark.parametrize("way", ["single", "dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_dataset_that_draws_unseeded_numbers_is_named(way: str) -> None:
    assert names(verified(dataclasses.replace(MLP, train_data=fickle), way)) == {"unseeded model"}


def test_an_augmentation_that_is_seeded_is_no_cause() -> None:
    class Augmented(Fickle):
        def __getitem__(self, i: int) -> Any:
            return self.inputs[i] + torch.randn(6), self.targets[i]

    assert verified(dataclasses.replace(MLP, train_data=Augmented), "dp")


# ---- strategies with a fault ---------------------------------------------------------------------


class RepeatingStep(DPStep):
    """Pads every share to the largest with its own first samples, as some samplers do."""

    def scatter(self, batch: Batch) -> list[list[Part]]:
        shares = super().scatter(batch)
        for i in range(len(batch.parts)):
            most = max(share[i].size for share in shares)
            for share in shares:
                part, missing = share[i], most - share[i].size
                if missing and part.size:
                    inputs, targets = each(
                        lambda t, n=missing: torch.cat([t, t[:n]]), (part.inputs, part.targets)
                    )
                    share[i] = Part(inputs, targets, most, part.of)
        return shares


class RepeatingRank(DDPStep):
    """The same in processes: every rank takes as many as the first."""

    def update(self, batch: Batch) -> Result:
        most = -(-batch.size // self.world.size)
        part = batch.parts[0]
        if part.size < most:
            inputs, targets = each(
                lambda t: torch.cat([t, t[: most - part.size]]), (part.inputs, part.targets)
            )
            batch = dataclasses.replace(
                batch, parts=[Part(inputs, targets, most, part.of, part.samples)]
            )
        return super().update(batch)


class SummingStep(DPStep):
    def gradients(self, batch: Batch) -> Loss:
        found = super().gradients(batch)
        for p in self.trained.values:
            if p.grad is not None:
                p.grad.mul_(self.replicas)
        return found


class SteppingStep(DDPStep):
    """Every rank moves the scheduler, as where each of them believes it is alone."""

    pace: Any = None

    def update(self, batch: Batch) -> Result:
        result = super().update(batch)
        for _ in range(self.world.size - 1):
            self.pace.step()
        return result


class LosingStep(DPStep):
    """Counts only what the first device computed."""

    def _reduce(self) -> None:
        pass


class ClippingStep(DPStep):
    def _clip(self, clip_norm: float) -> None:
        del clip_norm
        for p in self.trained.values:
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)


@dataclasses.dataclass(frozen=True)
class Faulty(Strategy):
    """A strategy of Lockstep whose steps are of another class."""

    of: Strategy = dataclasses.field(default_factory=DP)
    step: type[Step] = DPStep
    paces: bool = False

    name: ClassVar[str] = "faulty"
    summary: ClassVar[str] = "has a fault"
    good_for: ClassVar[str] = "tests"

    def layout(self, devices: int) -> Layout:
        return self.of.layout(devices)

    def build(self, job: Job, world: Any) -> Step:
        step = self.of.build(job, world)
        step.__class__ = self.step
        if self.paces:
            step.pace = job.lr_scheduler(step.optimizer)
        return step


@dataclasses.dataclass(frozen=True)
class FaultyRanks(Faulty):
    of: Strategy = dataclasses.field(default_factory=DDP)


@pytest.mark.parametrize(
    "way", [Faulty(step=RepeatingStep), FaultyRanks(step=RepeatingRank)], ids=["dp", "ddp"]
)
def test_a_sampler_that_repeats_is_found_in_its_batch(way: Strategy) -> None:
    found = verified(MLP, way)
    assert found.first is not None and found.first.number == 3, (
        "the last batch, whose shares are uneven"
    )


def test_a_scheduler_that_steps_once_for_each_rank_is_found() -> None:
    found = verified(ZOO["a schedule by step"], FaultyRanks(step=SteppingStep, paces=True))
    assert names(found) == {"update"}


def test_a_gradient_that_is_summed_instead_of_averaged_is_found_under_adam_too() -> None:
    job = dataclasses.replace(MLP, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3))
    found = verified(job, Faulty(step=SummingStep))
    assert names(found) == {"unknown"}
    assert found.first is not None and found.first.number == 1


def test_a_strategy_that_loses_gradients_is_said_to_part_from_one_device() -> None:
    found = verified(MLP, Faulty(step=LosingStep))
    assert names(found) == {"unknown"}
    assert found.layer is None


def test_where_nothing_is_found_what_was_logged_before_training_is_shown() -> None:
    found = verified(MLP.replace(collate=torch.utils.data.default_collate), Faulty(step=LosingStep))
    assert names(found) == {"unknown"}
    assert any("collate gets each device's local batch" in note for note in found.notes)


def test_a_model_that_fails_with_few_samples_is_named() -> None:
    class Needing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) < 5:
                raise KeyError("at least 5 samples")
            return super().forward(x)

    found = verified(MLP.replace(model=lambda: Needing(6, 3)), "dp")
    assert names(found) == {"failed"}
    assert "at least 5 samples" in found.causes[0].text


def test_clipping_of_its_own_is_named() -> None:
    job = dataclasses.replace(MLP, optimizer=sgd, clip_norm=1.0)
    assert names(verified(job, Faulty(step=ClippingStep))) == {"update"}


def test_a_strategy_that_says_itself_that_it_is_not_exact_is_taken_at_its_word() -> None:
    found = verified(MLP, "hogwild")
    assert names(found) == {"declared"}
    assert "hogwild is not exact" in found.causes[0].text


def test_padding_that_follows_the_share_is_named_as_said_before() -> None:
    class Pooling(nn.Module):
        """A mean over time, padding included."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(tokens).mean(dim=1))

    def padded(samples: list[Any]) -> Any:
        return nn.utils.rnn.pad_sequence([s[0] for s in samples], batch_first=True), torch.stack(
            [s[1] for s in samples]
        )

    data = [(torch.arange(int(n)) % 11, y) for n, y in zip(LENGTHS, labels(25, 3), strict=True)]
    job = dataclasses.replace(MLP, model=Pooling, train_data=data, eval_data=None, collate=padded)
    found = verified(job, "dp")
    assert not found
    assert "collate" in str(found)


# ---- what a person reads -------------------------------------------------------------------------


def test_the_table_says_where_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    job = ZOO["convolutions with sync_batchnorm"].replace(sync_batchnorm=False)
    said = str(verified(job, "dp"))
    assert "dp on 2 devices against single, in float64" in said
    assert "not equal from update 1 on (epoch 1, batch 1)" in said
    assert 'first layer that differs: "body.1" (BatchNorm2d)' in said
    assert "fix: sync_batchnorm=True (--sync-batchnorm)" in said
    assert '"body.0.weight"' in said


FILE = """
import lockstep, torch
from torch import nn

def job(norm: bool = False, drop: float = 0.0):
    made = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(16, 6, generator=made), torch.randint(3, (16,), generator=made))
    middle = nn.BatchNorm1d if norm else nn.Identity
    return lockstep.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), middle(8), nn.Tanh(), nn.Dropout(drop), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train_data=data,
        eval_data=data,
        batch_size=6,
    )
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(FILE)
    return str(path)


def test_the_command_ends_with_0_or_3_and_writes_json(
    file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", file, "--strategy", "dp", "--devices", DEVICES]
    assert cli.main(words) == 0
    assert "equal: nothing differs" in capfd.readouterr().out
    assert cli.main([*words, "--set", "drop=0.5"]) == 0
    assert DROPOUT_OFF in " ".join(capfd.readouterr().out.split())
    assert cli.main([*words, "--set", "norm=true", "--json"]) == 3
    shown = capfd.readouterr()
    assert "cause (batchnorm)" in shown.err
    found = json.loads(shown.out)
    assert found["equal"] is False
    assert found["causes"][0]["kind"] == "batchnorm"
    assert found["comparison"]["updates"][0]["gradients"]["0.weight"] > 1e-3
    assert cli.main([*words, "--set", "norm=true", "--sync-batchnorm", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["equal"] is True


def test_where_no_device_was_named_there_are_several(
    file: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(
        importlib.import_module("lockstep.launch.devices"), "usable_cores", lambda: (0, 0)
    )
    assert cli.main(["verify", file, "--strategy", "dp"]) == 0
    assert "dp on 2 devices against single" in capsys.readouterr().out
    monkeypatch.setattr(
        importlib.import_module("lockstep.launch.devices"), "usable_cores", lambda: (0,)
    )
    assert cli.main(["verify", file]) == 2
    assert "name a strategy to compare with one device" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_of_the_answer_is_wider_than_the_terminal(width: int) -> None:
    for found in (verified(MLP, "dp"), verified(dataclasses.replace(MLP, model=Centred), "dp")):
        lines = found.lines(width)
        assert max(map(len, lines)) <= width, lines
        (head,) = (line for line in lines if "gradients  " in line or line.endswith("buffers"))
        assert ("loss of single" in head) == (width >= 80)


def test_what_single_can_not_train_either_is_bad_input(file: str) -> None:
    with pytest.raises(InputError, match="reduction='none'"):
        verified(MLP.replace(loss=nn.CrossEntropyLoss(reduction="none")), "dp")
    assert cli.main(["verify", file, "--strategy", "hogwld"]) == 2


def test_large_batches_are_cut_so_that_the_last_one_stays_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.import_module("lockstep.verify.preflight"), "_LONGEST", 1e-9)
    job = dataclasses.replace(MLP, batch_size=20, optimizer=plain_sgd)
    found = lockstep.verify(job, strategy="dp", devices=DEVICES)
    assert found, found
    assert found.batch_size == 5
    assert any("instead of 20" in note for note in found.notes)


class FindingNothing(nn.Module):
    """A loss over the samples of one class, which a small share has none of."""

    def forward(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return outputs[targets == 2].square().sum(), (targets == 2).sum()


def test_what_fails_in_smaller_batches_is_judged_in_whole_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.import_module("lockstep.verify.preflight"), "_LONGEST", 1e-9)
    where = torch.arange(40) % 20 == 3  # one of twenty, so most batches of five have none
    data = torch.utils.data.TensorDataset(drawn(40, 6), torch.where(where, 2, 0))
    job = dataclasses.replace(
        MLP,
        loss=FindingNothing(),
        train_data=data,
        eval_data=None,
        metrics={},
        batch_size=40,
        optimizer=plain_sgd,
    ).replace(nonfinite_limit=0)  # a batch without an item is an error
    found = lockstep.verify(job, strategy="ddp", devices=DEVICES)
    assert found, found
    assert found.batch_size == 40


@pytest.mark.parametrize("way", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_no_batch_of_one_sample_is_made_where_the_job_has_none(way: str) -> None:
    """Five samples at a time, as verify tries first, would leave one, of which no batch norm can
    take the mean.
    """
    data = torch.utils.data.TensorDataset(drawn(41, 6), labels(41, 3))
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))  # noqa: E731
    found = verified(
        dataclasses.replace(MLP, model=model, train_data=data, batch_size=9, sync_batchnorm=True),
        way,
    )
    assert found, found


def test_generators_and_settings_of_torch_are_left_as_they_were() -> None:
    before = torch.get_rng_state()
    verified(dataclasses.replace(MLP, model=Hurried), "dp")
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.are_deterministic_algorithms_enabled()


def test_every_kind_of_cause_is_in_the_documentation_and_planted_here() -> None:
    kinds = {name.partition(":")[0] for name in CAUSES}
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text().partition("## Causes")[2]
    assert kinds <= set(re.findall(r"`([a-z ]+)`", page))
    here = Path(__file__).read_text()
    assert {kind for kind in kinds if f'"{kind}"' not in here} == set()


class SmallLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(3))
        )
        self.out = nn.Linear(16, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.words(tokens))).transpose(1, 2)


def test_a_loss_in_float32_is_rounding_also_where_adam_makes_much_of_it() -> None:
    """Found by trial: a mean over a local batch is rounded otherwise, whichever order its rows
    are in.
    """
    tokens, after = tokens_and_next()
    job = Job(
        model=SmallLanguageModel,
        loss=lambda outputs, targets: nn.functional.cross_entropy(outputs.float(), targets),
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.01),
        train_data=TensorDataset(tokens, after.clamp(min=0)),
        batch_size=5,
    )
    found = lockstep.verify(job, strategy="ddp", devices="2xcpu")
    assert found.equal, str(found)
    assert found.comparison is not None and found.comparison.computed > 1e-9
