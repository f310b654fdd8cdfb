"""The kinds of model that every strategy must train with one device's numbers: small jobs, each
with one difficulty.

Their data leave a smaller last batch in each epoch, and some leave a rank without a sample.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job, Loss
from lockstep.callbacks import EMA, SWA, Freeze
from lockstep.checkpoint.folder import CheckpointFolder

SAMPLES = 29  # in batches of 8: 8, 8, 8, 5


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int, classes: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def slow(*values: Any) -> Any:
    """Parameters of a test that is slow with them."""
    return pytest.param(*values, marks=pytest.mark.slow)


def right(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs.argmax(dim=-1) == targets).sum(), targets.numel()


def state_of(run: Path) -> dict[str, Any]:
    """All that a run has in its newest checkpoint, which must be whole, as every other one."""
    whole = list(CheckpointFolder(run / "checkpoints").whole(pytest.fail))
    path, index = whole[0]
    return index.state(path)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _job(
    model: Callable[[], nn.Module], inputs: Any = None, targets: Any = None, **settings: Any
) -> Job:
    inputs = drawn(SAMPLES, 6) if inputs is None else inputs
    targets = labels(SAMPLES, 3) if targets is None else targets
    data = (
        TensorDataset(inputs, targets)
        if isinstance(inputs, torch.Tensor)
        else _Pairs(inputs, targets)
    )
    defaults: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": plain_sgd,
        "batch_size": 8,
        "epochs": 2,
        "eval_data": data,
        "metrics": {"accuracy": right},
    }
    return Job(model=model, train_data=data, **{**defaults, **settings})


class _Pairs(torch.utils.data.Dataset[Any]):
    """Samples of dicts or tuples of tensors."""

    def __init__(self, inputs: Any, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> Any:
        if isinstance(self.inputs, dict):
            return {name: value[i] for name, value in self.inputs.items()}, self.targets[i]
        return tuple(value[i] for value in self.inputs), self.targets[i]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


class Volumes(nn.Module):
    """Weights of five dimensions, and of four."""

    def __init__(self) -> None:
        super().__init__()
        self.volumes = nn.Conv3d(2, 4, 3, padding=1)
        self.images = nn.Conv2d(4, 4, 3)
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.images(self.volumes(x).mean(2)).flatten(1))


class Residual(nn.Module):
    """A layer of the width of its inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


class Tagger(nn.Module):
    """Tokens (batch, time) to logits (batch, classes, time); the embedding is tied to the output
    layer.
    """

    def __init__(self, words: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 8)
        self.inner = nn.Linear(8, 8)
        self.out = nn.Linear(8, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.inner(self.embedding(tokens)))).transpose(1, 2)


def tokens_and_next(words: int = 11, time: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(words, (SAMPLES, time), generator=torch.Generator().manual_seed(3))
    targets = (tokens * 3 + 1) % words
    lengths = torch.randint(1, time + 1, (SAMPLES,), generator=torch.Generator().manual_seed(4))
    targets[torch.arange(time) >= lengths[:, None]] = -100
    return tokens, targets


class Sometimes(nn.Module):
    """``rare`` is used where a sample asks for it, ``never`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 3)
        self.rare = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, wants: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        if wants.any():
            out = out + wants[:, None] * self.rare(x)
        return out


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8).requires_grad_(False)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, *, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.left(left) * self.right(right)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weighted loss: each sample weighs 1, 2 or 3."""
    weights = (targets % 3 + 1).to(outputs.dtype)
    return (weights * (outputs.sum(dim=1) - targets) ** 2).sum(), weights.sum()


def class_weights() -> torch.Tensor:
    return torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def wants(*samples: int) -> torch.Tensor:
    flags = torch.zeros(SAMPLES)
    flags[list(samples)] = 1.0
    return flags


def in_place_order(epoch: int) -> torch.Tensor:
    return torch.arange(SAMPLES)


def halved_weights(params: Any) -> torch.optim.Optimizer:
    """Groups by name: no decay and a smaller rate for biases."""
    params = list(params)
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in params if name.endswith("weight")], "weight_decay": 0.1},
            {
                "params": [p for name, p in params if name.endswith("bias")],
                "lr": 0.003,
                "weight_decay": 0.0,
            },
        ],
        lr=0.01,
    )


class Gappy(nn.Module):
    """A parameter whose storage has gaps, which fused kernels would read wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.gappy = nn.Parameter(torch.randn(8, 8)[:, :3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) @ self.gappy


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(40, 6, sparse=True)
        self.out = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(tokens))


def with_tuples(samples: list[Any]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Targets as one tuple with an item for each sample."""
    return torch.stack([x for x, _ in samples]), tuple(int(y) for _, y in samples)


def over_tuples(outputs: torch.Tensor, targets: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    each = [
        nn.functional.cross_entropy(o[None], torch.tensor([t], device=o.device))
        for o, t in zip(outputs, targets, strict=True)
    ]
    return torch.stack(each).sum(), len(each)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples that can only be gone through; each draws noise, and the epoch shifts the targets."""

    epoch = 0

    def __init__(self, count: int) -> None:
        self.inputs, self.targets = drawn(count, 6), labels(count, 3)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for x, y in zip(self.inputs, self.targets, strict=True):
            yield x + 0.1 * torch.randn(6), (y + self.epoch) % 3


def generated() -> Iterator[Any]:
    """A shuffle buffer of four: what comes out depends on what was drawn before."""
    buffer: list[Any] = []
    for sample in zip(drawn(25, 6), labels(25, 3), strict=True):
        buffer.append(sample)
        if len(buffer) == 4:
            yield buffer.pop(int(torch.randint(4, ())))
    yield from buffer


def _streamed(count: int, **settings: Any) -> Job:
    return dataclasses.replace(
        _job(mlp, **settings), train_data=Stream(count), eval_data=Stream(count)
    )


LENGTHS = torch.randint(1, 9, (25,), generator=torch.Generator().manual_seed(7))


def ragged() -> list[Any]:
    """Sequences of 1 to 8 tokens, and the tokens that follow."""
    made = torch.Generator().manual_seed(8)
    tokens = [torch.randint(11, (int(length),), generator=made) for length in LENGTHS]
    return [(t, (t * 3 + 1) % 11) for t in tokens]


def padded(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """As long as the longest, with targets that the loss ignores."""
    inputs, targets = zip(*samples, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(inputs, batch_first=True), pad(targets, batch_first=True, padding_value=-100)


class Slow(nn.Module):
    """Makes an update so slow that a check of its loss takes a small part of it, also where the
    machine is busy.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3 * torch.is_grad_enabled())
        return x


class OfSparse(nn.Module):
    """A layer of sparse rows, and one of dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(torch.sparse.mm(rows, self.inside.weight.T) + self.inside.bias))


def made_sparse(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What isn't positive is left out."""
    inputs, targets = map(torch.stack, zip(*samples, strict=True))
    return inputs.relu().to_sparse(), targets


class _Titled(torch.utils.data.Dataset[Any]):
    """Samples that have a text beside their label."""

    inputs, targets = drawn(SAMPLES, 6), labels(SAMPLES, 3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, tuple[torch.Tensor, str]]:
        return self.inputs[i], (self.targets[i], "easy" if i % 3 else "hard")


def weighted_by_text(
    outputs: torch.Tensor, targets: tuple[torch.Tensor, tuple[str, ...]]
) -> torch.Tensor:
    classes, texts = targets
    weights = outputs.new_tensor([2.0 if text == "hard" else 1.0 for text in texts])
    return (nn.functional.cross_entropy(outputs, classes, reduction="none") * weights).mean()


def right_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (outputs.argmax(dim=1) == targets).sum(), (targets != -100).sum()


def grouped(epoch: int) -> torch.Tensor:
    """Batches of 8 of similar lengths, the batches shuffled, the smaller one last."""
    by_length = torch.argsort(LENGTHS + torch.rand(25))
    return torch.cat([by_length[:24].view(3, 8)[torch.randperm(3)].flatten(), by_length[24:]])


def weighted(epoch: int) -> torch.Tensor:
    return torch.multinomial(torch.arange(float(SAMPLES)), 33, replacement=True)


class Turning(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 8, dtype=torch.complex128))
        self.out = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x.to(self.turn.dtype) @ self.turn).abs().to(self.out[0].weight.dtype))


def parametrized() -> nn.Module:
    """Weights made of others in each forward; the spectral norm keeps buffers that move in it."""
    first, last = nn.Linear(6, 8), nn.Linear(8, 3)
    torch.nn.utils.parametrizations.weight_norm(first)
    torch.nn.utils.parametrizations.spectral_norm(last)
    return nn.Sequential(first, nn.Tanh(), last)


class PartlyFixed(nn.Module):
    """A trunk that stays in eval mode, as pretrained ones are kept; its batch norm has
    statistics of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.out = Conv(), nn.Linear(3, 3)
        self.trunk.body[1].running_mean.fill_(0.3)
        self.trunk.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.trunk(x)))


class KeepsNormsFixed(nn.Module):
    """Its own ``train`` keeps the batch norms in eval mode, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.out = Conv(), nn.Linear(3, 3)

    def train(self, mode: bool = True) -> KeepsNormsFixed:
        super().train(mode)
        self.trunk.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.trunk(x)))


class Counting(nn.Module):
    """A buffer that changes in forward, and acts in it; extra state beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.told = "nothing"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.net(x) * torch.clamp(self.steps / 5, max=1.0)

    def get_extra_state(self) -> dict[str, object]:
        return {"told": self.told, "shift": torch.arange(3)}

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.told = state["told"]


@dataclasses.dataclass
class Said:
    """What a model gives that computes its loss itself."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Judging(nn.Module):
    """Gets the targets as an input, and gives its own mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Said:
        logits = self.net(x)
        return Said(logits, nn.functional.cross_entropy(logits, labels))


def its_own_loss(outputs: Said, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    assert outputs.loss is not None
    return outputs.loss * len(targets), len(targets)


class TwoHeads(nn.Module):
    """A head whose outputs the loss leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.left = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.tanh(self.body(x))
        return {"used": self.used(x), "left": self.left(x)}


def in_parts(outputs: torch.Tensor, targets: torch.Tensor) -> Loss:
    """What is wrong with the samples of each class; many a local batch has none of class 2."""
    each = nn.functional.cross_entropy(outputs, targets, reduction="none")
    parts = {
        f"of {kind}": (each[targets == kind].sum(), (targets == kind).sum())
        for kind in targets.unique().tolist()
    }
    return Loss(each.sum(), len(targets), parts)


NOTHING = -100


def zero_for_none(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A constant where no target counts."""
    counts = targets != NOTHING
    if not counts.any():
        return torch.zeros(()), 0
    total = nn.functional.cross_entropy(outputs[counts], targets[counts], reduction="sum")
    return total, int(counts.sum())


def halves_ignored() -> torch.Tensor:
    """The second half of batch 0 counts nothing, the first of batch 2, and the begin of the
    smaller last one.
    """
    targets = labels(SAMPLES, 3)
    for begin, end in ((4, 8), (16, 20), (24, 27)):
        targets[begin:end] = NOTHING
    return targets


_tokens, _next = tokens_and_next()


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(3))
    model(torch.zeros(1, 6))
    return model


ZOO: dict[str, Job] = {
    "mlp": _job(mlp),
    "momentum": _job(mlp, optimizer=sgd),
    "adamw with groups by name": _job(mlp, optimizer=halved_weights),
    "convolutions with sync_batchnorm": _job(Conv, drawn(SAMPLES, 2, 7, 7), sync_batchnorm=True),
    "channels_last in volumes and in images": _job(
        Volumes, drawn(SAMPLES, 2, 3, 4, 4), channels_last=True, optimizer=sgd
    ),
    "channels_last with sync_batchnorm": _job(
        Conv, drawn(SAMPLES, 2, 7, 7), sync_batchnorm=True, channels_last=True, optimizer=sgd
    ),
    "ignored tokens and tied weights": _job(Tagger, _tokens, _next, metrics={}),
    "class weights": _job(
        mlp, loss=nn.CrossEntropyLoss(weight=class_weights(), label_smoothing=0.1)
    ),
    "total and count": _job(mlp, loss=squares),
    "a mean that is probed": _job(mlp, loss=lambda out, y: ((out.sum(dim=1) - y) ** 2).mean()),
    "a frozen layer": _job(Frozen, optimizer=sgd),
    "a layer unused in some steps, the last one too": _job(
        Sometimes, (drawn(SAMPLES, 6), wants(0, 9)), order=in_place_order, optimizer=sgd
    ),
    "a layer unused on one rank": _job(
        Sometimes, (drawn(SAMPLES, 6), wants(7, 15, 23, 28)), order=in_place_order, optimizer=sgd
    ),
    "a layer unused after a step that left a rank empty": _job(
        Sometimes,
        (drawn(25, 6), wants(24)[:25]),
        labels(25, 3),
        order=lambda epoch: torch.arange(25),
        optimizer=sgd,
    ),
    "a layer unused in some micro-batches": _job(
        Sometimes,
        (drawn(SAMPLES, 6), wants(0, 9, 28)),
        order=in_place_order,
        optimizer=sgd,
        accumulate=2,
        clip_norm=0.5,
    ),
    "a dataset smaller than the batch": _job(
        mlp, drawn(5, 6), labels(5, 3), epochs=3, optimizer=sgd
    ),
    "batches smaller than the world": _job(
        mlp, drawn(5, 6), labels(5, 3), batch_size=2, optimizer=sgd
    ),
    "sparse gradients, and an empty rank": _job(
        Words, torch.randint(40, (25, 4), generator=torch.Generator().manual_seed(6)), labels(25, 3)
    ),
    "sparse gradients that are clipped": _job(
        Words,
        torch.randint(40, (SAMPLES, 4), generator=torch.Generator().manual_seed(6)),
        accumulate=2,
        clip_norm=0.05,
    ),
    "targets as a tuple of the samples'": _job(
        mlp, collate=with_tuples, loss=over_tuples, metrics={}
    ),
    "a stream that draws": _streamed(SAMPLES, optimizer=sgd, epochs=3),
    "a stream whose last batch leaves a rank empty": _streamed(25, optimizer=sgd),
    "a stream under accumulation that leaves a rank empty": _streamed(27, accumulate=3),
    "a stream smaller than the batch": _streamed(5, epochs=3),
    "a generator function": dataclasses.replace(
        _job(mlp, optimizer=sgd), train_data=generated, eval_data=generated
    ),
    "a weighted order": _job(mlp, order=weighted, optimizer=sgd),
    "lengths that vary, padded by collate, in groups": Job(
        model=Tagger,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=ragged(),
        eval_data=ragged(),
        batch_size=8,
        epochs=2,
        collate=padded,
        order=grouped,
        metrics={"accuracy": right_tokens},
    ),
    "evaluation sets by name": _job(
        mlp, eval_data={"clean": Stream(9), "noisy": TensorDataset(drawn(25, 6), labels(25, 3))}
    ),
    "dict inputs": _job(Named, {"left": drawn(SAMPLES, 4), "right": drawn(SAMPLES, 2, seed=5)}),
    "accumulation": _job(mlp, accumulate=3),
    "accumulation of unequal counts": _job(
        Tagger, _tokens, _next, accumulate=2, metrics={}, optimizer=sgd
    ),
    "clipping": _job(mlp, clip_norm=0.05),
    "clipping with accumulation": _job(mlp, clip_norm=0.05, accumulate=2, optimizer=sgd),
    "a schedule by step": _job(
        mlp,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
        lr_scheduler_every="step",
    ),
    "a schedule by epoch": _job(
        mlp, lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), epochs=3
    ),
    "a last batch that leaves a rank empty": _job(mlp, drawn(25, 6), labels(25, 3), optimizer=sgd),
    "an empty rank under sync_batchnorm": _job(
        Conv, drawn(25, 2, 7, 7), labels(25, 3), sync_batchnorm=True
    ),
    "accumulation that leaves a rank empty": _job(mlp, drawn(27, 6), labels(27, 3), accumulate=3),
    "lazy layers": _job(lazy, optimizer=sgd),
    "complex parameters": _job(Turning, optimizer=sgd),
    "parametrized weights": _job(parametrized, optimizer=sgd),
    "a part in eval mode": _job(PartlyFixed, drawn(SAMPLES, 2, 7, 7), optimizer=sgd),
    "a model whose own train keeps a part in eval mode": _job(
        KeepsNormsFixed, drawn(SAMPLES, 2, 7, 7), optimizer=sgd, epochs=3
    ),
    "a buffer that counts and extra state": _job(Counting, optimizer=sgd),
    "a model that gives its own loss": _job(
        Judging,
        (drawn(SAMPLES, 6), labels(SAMPLES, 3)),
        labels(SAMPLES, 3),
        loss=its_own_loss,
        metrics={},
    ),
    "a head that the loss leaves alone": _job(
        TwoHeads,
        loss=lambda out, y: nn.functional.cross_entropy(out["used"], y),
        metrics={},
        optimizer=sgd,
    ),
    "a loss in parts": _job(mlp, loss=in_parts, accumulate=2, optimizer=sgd),
    "layers that are frozen for some steps": _job(
        mlp, callbacks=[Freeze("0", until=3), Freeze("2.b*", start=5)], optimizer=sgd
    ),
    "moving averages that are evaluated": _job(
        Conv,
        drawn(SAMPLES, 2, 7, 7),
        callbacks=[SWA(), EMA(0.9)],
        sync_batchnorm=True,
        optimizer=sgd,
    ),
    "sparse inputs": _job(OfSparse, collate=made_sparse, optimizer=sgd),
    "texts beside targets": dataclasses.replace(
        _job(mlp, loss=weighted_by_text, metrics={}, optimizer=sgd),
        train_data=_Titled(),
        eval_data=_Titled(),
    ),
    "local batches in which nothing counts": _job(
        mlp,
        None,
        halves_ignored(),
        loss=zero_for_none,
        order=in_place_order,
        optimizer=sgd,
        metrics={},
    ),
    "local batches in which nothing counts under sync_batchnorm": _job(
        Conv,
        drawn(SAMPLES, 2, 7, 7),
        halves_ignored(),
        loss=zero_for_none,
        order=in_place_order,
        optimizer=sgd,
        metrics={},
        sync_batchnorm=True,
    ),
}
