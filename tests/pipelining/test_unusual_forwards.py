"""Models that do odd things in forward: under ``mp`` and ``pp`` they end where one device that
accumulates does.

What one micro-batch leaves for the next decides whether micro-batches may overlap; where they may
not, that is said.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lockstep import Job, parallelize, train
from lockstep.errors import StrategyError
from lockstep.strategies import MP
from lockstep.strategies.pp import PP

from harness import differences  # isort: skip
from zoo import SAMPLES, _job, drawn, labels, sgd, tokens_and_next  # isort: skip

BOUND = 1e-10
ODD: dict[str, tuple[Job, dict[str, int] | None, str | None]] = {}
"""The job, its device map, and what is said of why micro-batches are computed in turn, if they are."""


def odd(
    name: str, device_map: dict[str, int] | None = None, says: str | None = None, **settings: Any
) -> Callable[[Any], Any]:
    """Put a model, or a function that makes one, among ``ODD``."""

    def put(model: Any) -> Any:
        ODD[name] = (
            _job(model, **settings).replace(precision="fp64", optimizer=sgd),
            device_map,
            says,
        )
        return model

    return put


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Two(nn.Module):
    """Two layers, on two stages, and a head."""

    layer: Callable[[], nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = type(self).layer(), type(self).layer(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.b(self.a(x)))


SPLIT = {"a": 0, "": 1}

# ---- what is left for the next micro-batch -------------------------------------------------------


@odd("a cache between calls", SPLIT, 'forward changes "past"')
class Cache(Two):
    past: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if self.training:
            x, self.past = x if self.past is None else x + self.past, x.detach().mean(0)
        return self.out(self.b(x))


class Averaging(Layer):
    """Its buffers move in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training:
            self.steps += 1
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.mean * (1 + 1 / (1.0 + self.steps))


@odd("buffers that both stages move", None, 'forward changes "a.mean"')
class Averages(Two):
    layer = Averaging


class Replacing(Averaging):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Layer.forward(self, x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


@odd("a layer mapped over samples by torch.func")
class Mapped(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.func.vmap(lambda row: torch.tanh(self.b(row)))(self.a(x)))


SCALES: dict[int, torch.Tensor] = {}


@odd("a constant that is kept outside of the model")
class Scaled(Two):
    """Found by trial: a look at forward by fake tensors left one of them there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in SCALES:
            SCALES[x.shape[1]] = torch.arange(x.shape[1], dtype=torch.float64)
        return super().forward(x * SCALES[x.shape[1]])


@odd("a buffer that the first forward registers")
class Registering(Two):
    length = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.register_buffer(
                "scale", torch.arange(self.length, dtype=torch.float64), persistent=False
            )
        return super().forward(x * self.scale)


@odd("buffers that are replaced", None, 'forward changes "a.mean"')
class Replaced(Two):
    layer = Replacing


@odd("a buffer that the model reads on another stage", SPLIT, 'forward changes "a.mean"')
class ReadLater(Averages):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.b(self.a(x)) + self.a.mean)


class Reading(Layer):
    def __init__(self, other: Averaging) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.others[0].mean


@odd("a buffer that another layer reads", SPLIT, 'forward changes "a.mean"')
class ReadByLayer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.a = Averaging()
        self.b = Reading(self.a)


@odd("a tensor that is no buffer", SPLIT, 'forward changes "kept"')
class NoBuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if self.training:
            self.kept.mul_(0.5).add_(x.detach().mean(0))
        return self.out(self.b(x) + self.kept.clone())


class Needed(Layer):
    """Backward needs the buffer as it was in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training:
            self.scale.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y * self.scale


@odd("a buffer that backward needs", None, 'forward changes "a.scale"')
class Scales(Two):
    layer = Needed


class Taught(Layer):
    """Frozen weights follow those that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.linear).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.linear.weight + 0.01 * x.mean(), 0.1)
        return torch.tanh(self.teacher(super().forward(x)))


@odd("weights that are written in forward", None, 'forward changes "a.teacher.weight"')
class Teachers(Two):
    layer = Taught


@odd("a layer called with other weights", SPLIT, 'forward changes "b.linear.weight"')
class Swapping(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        halves = {name: 0.5 * p for name, p in self.b.named_parameters()}
        return self.out(torch.func.functional_call(self.b, halves, (x,)) + self.b(x))


@odd("weight_norm and spectral_norm of before", {"0": 0, "": 1}, 'forward changes "2.weight"')
def normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        middle, last = (
            nn.utils.weight_norm(nn.Linear(8, 8)),
            nn.utils.spectral_norm(nn.Linear(8, 3)),
        )
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), middle, nn.Tanh(), last)


@odd("parametrizations", {"0": 0, "": 1}, 'forward changes "2.parametrizations.weight.0._u"')
def parametrized() -> nn.Module:
    first, middle, last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
    (
        parametrizations.weight_norm(first),
        parametrizations.spectral_norm(middle),
        parametrizations.orthogonal(last),
    )
    return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last)


class CumulativeNorm(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return self.norm(y) if len(y) > 1 else y


@odd("cumulative running statistics")
class Norms(Two):
    layer = CumulativeNorm


# ---- graphs --------------------------------------------------------------------------------------


@odd("checkpoints in a checkpoint", SPLIT)
class Nested(Two):
    reentrant = False

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.b(x), 0.3, self.training)

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.a(x), 0.3, self.training)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant and self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.outer, self.a(x), use_reentrant=False))


@odd("a reentrant checkpoint in another", SPLIT)
class NestedReentrant(Nested):
    reentrant = True


@odd("a gradient within forward", SPLIT)
class Penalised(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = super().forward(x)
            (slope,) = torch.autograd.grad(y.exp().sum(), x, create_graph=self.training)
        return y + slope[:, :3].tanh()


class Into(torch.autograd.Function):
    """Multiplies in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y.clone(), x.clone())
        ctx.mark_dirty(x)
        return x.mul_(y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        y, x = ctx.saved_tensors
        return gradient * y, gradient * x


@odd("a function of one's own that writes in place", SPLIT)
class Multiplying(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        y = x.clone()
        return self.out(Into.apply(y, self.b(x)) + y)


@odd("hooks that keep other tensors for backward", SPLIT)
class Kept(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            return super().forward(x)


@odd("a first call without gradients", SPLIT)
class Twice(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            before = self.b(self.a(x))
        return self.out(self.b(self.a(x)) - 0.3 * before)


@odd("views of views written in place", SPLIT)
class Views(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack(self.a(x).chunk(2, dim=1))
        both[0].add_(1)
        both.transpose(0, 1)[:, :, 0].mul_(2)
        x = both.transpose(0, 1).flatten(1)
        y = self.b(x).clone()
        y[:, ::2].sub_(x[:, ::2])
        return self.out(y)


def shrink(p: torch.Tensor) -> None:
    p.grad.mul_(0.9)


@odd("hooks of a person's own", {"0": 0, "": 1})
def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[2].register_forward_hook(lambda module, args, output: output + args[0])
    model[2].register_full_backward_pre_hook(lambda module, out: (out[0] * 1.5,))
    model[3].register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    model[0].weight.register_post_accumulate_grad_hook(shrink)
    return model


# ---- ways through the stages ---------------------------------------------------------------------


@odd("stages 0, 1, 0, 1, 0", {"layers.1": 1, "layers.3": 1, "": 0})
class Zigzag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return self.out(torch.stack(kept).sum(0))


@odd("an end that depends on the values", {"layers.0": 0, "layers.1": 0, "": 1})
class Early(Zigzag):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if x.detach().abs().mean() < 0.25 + 0.05 * i:
                break
        return self.out(x)


class Refusing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.detach().sum() > 0:
            raise ValueError("positive")
        return y


@odd("a layer whose error is caught", {"a": 0, "c": 0, "": 1})
class Caught(Two):
    layer = Refusing

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        try:
            x = self.b(x)
        except ValueError:
            x = self.c(x)
        return self.out(self.a(x))


@odd("one weight in three layers, and in a function", {"a": 0, "": 1})
class Thrice(Two):
    def __init__(self) -> None:
        super().__init__()
        self.c = Layer()
        self.b.linear.weight = self.c.linear.weight = self.a.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(
            F.linear(self.c(self.b(self.a(x))), self.a.linear.weight.T, self.b.linear.bias)
        )


class Appending(Layer):
    def forward(self, past: list[torch.Tensor]) -> None:  # type: ignore[override]
        past.append(super().forward(past[-1]))


@odd("layers that give nothing, and write to what they get", SPLIT)
class Past(Two):
    layer = Appending

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = [x]
        self.a(past), self.b(past)
        return self.out(past[-1] + past[1])


class Parcel:
    """No nest: nobody looks into it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Carrying(Layer):
    def forward(self, parcel: Parcel) -> Parcel:  # type: ignore[override]
        return Parcel(super().forward(parcel.x) + parcel.x)


@odd("an object that carries tensors", SPLIT)
class Parcels(Two):
    layer = Carrying

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.b(self.a(Parcel(x))).x)


_tokens, _ = tokens_and_next()


@odd(
    "packed sequences and hidden states",
    {"words": 0, "a": 0, "": 1},
    inputs=_tokens,
    targets=labels(SAMPLES, 3),
)
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.a, self.b = (
            nn.GRU(6, 6, batch_first=True),
            nn.GRU(6, 6, 2, batch_first=True, dropout=0.2),
        )
        self.out = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        lengths = (tokens > 3).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        packed, hidden = self.a(packed)
        _, hidden = self.b(packed, torch.cat([hidden, hidden]))
        return self.out(hidden[-1])


@odd("complex and integer buffers", SPLIT)
class Turning(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.exp(1j * torch.arange(3.0)).to(torch.complex128))
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).double()
        z = torch.complex(x[:, :3], x[:, 3:]) * self.turn[self.order]
        return self.out(self.b(torch.cat([z.real, z.imag], dim=1).to(self.out.weight.dtype)))


class Weighing(nn.Module):
    """A loss with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([0.2, 1.0, 3.0]))

    def forward(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.weights.to(outputs.dtype)[targets]
        return (F.cross_entropy(outputs, targets, reduction="none") * weights).sum(), weights.sum()


odd("a loss with a buffer", SPLIT, loss=Weighing())(Two)


@odd("random numbers outside of layers", SPLIT)
class Noisy(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.a(x), 0.3, self.training)
        x = self.b(x + 0.1 * torch.randn_like(x) * self.training)
        return self.out(F.dropout1d(x, 0.2, self.training)) + 0.1 * torch.rand(3) * self.training


OFTEN = {
    *(
        "a cache between calls",
        "buffers that are replaced",
        "a buffer that the model reads on another stage",
        "a buffer that backward needs",
    ),
    *(
        "a layer called with other weights",
        "weights that are written in forward",
        "a tensor that is no buffer",
    ),
    *("checkpoints in a checkpoint", "a gradient within forward", "a layer whose error is caught"),
    *(
        "packed sequences and hidden states",
        "random numbers outside of layers",
        "hooks of a person's own",
    ),
}


def compare(kind: str, way: PP, stages: int, tmp_path: Any) -> None:
    job = ODD[kind][0]
    run = train(job, strategy=way, devices=f"{stages}xcpu", folder=tmp_path)
    one = train(
        job,
        strategy="single",
        devices="1xcpu",
        folder=tmp_path,
        quiet=True,
        accumulate=way.num_microbatches(job),
    )
    found = differences(job, run, one)
    assert found.within(BOUND), str(found)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in OFTEN else pytest.mark.slow) for k in ODD]
)
def test_pp_ends_where_one_device_that_accumulates_does(kind: str, tmp_path, capsys) -> None:
    _, device_map, says = ODD[kind]
    compare(kind, PP(device_map, 3), 2, tmp_path)
    said = capsys.readouterr().out
    assert ("micro-batches run one after another" in said) == (says is not None)
    assert says is None or f"note: {says}" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD)
def test_so_does_every_other_way(kind: str, tmp_path) -> None:
    device_map = ODD[kind][1]
    for way in (MP(device_map), PP(device_map, 8), PP(device_map, 3, "gpipe"), PP(device_map, 11)):
        compare(kind, way, 2, tmp_path)


def followed(
    model: nn.Module, device_map: dict[str, int], updates: int, before: Callable[[int], Any]
) -> tuple[list[int], list[str]]:
    """The updates in which micro-batches overlapped, from 1, and what was said; ``before`` is
    told of each.
    """
    step = parallelize(
        model, nn.CrossEntropyLoss(), sgd, strategy=PP(device_map, 3), devices="2xcpu"
    )
    said: list[str] = []
    step.world.emit = lambda line: said.append(line.text)
    overlapped = []
    for update in range(1, updates + 1):
        before(update)
        step(drawn(8, 6), labels(8, 3))
        overlapped += [update] if step.runner.overlaps else []
    return overlapped, said


def test_layers_that_thaw_may_go_on_to_overlap() -> None:
    """Their statistics begin to move, each in one stage: that is in order."""
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )
    model[1].eval()
    model[3].eval()
    thaw = {3: model[1].train, 6: model[3].train}
    overlapped, said = followed(
        model, {"0": 0, "1": 0, "": 1}, 8, lambda update: thaw.get(update, int)()
    )
    assert overlapped == [2, 3, 4, 5, 6, 7, 8]
    assert said == ["BatchNorm normalizes over each micro-batch, not over the global batch"]


class Compiled(Two):
    def __init__(self) -> None:
        super().__init__()
        self.b.compile(backend="aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of what it doesn't take in
def test_layers_may_be_compiled_in_the_model(tmp_path) -> None:
    job = _job(Compiled, precision="fp64")
    run = train(job, strategy=PP(SPLIT, 3), devices="2xcpu", folder=tmp_path, quiet=True)
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, accumulate=3)
    assert differences(job, run, one).worst < BOUND


def test_what_hooks_can_not_see_is_refused(tmp_path) -> None:
    def compiled() -> nn.Module:
        return torch.compile(nn.Sequential(Layer(), Layer(), nn.Linear(6, 3)), backend="eager")

    def scripted() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.Sequential(Layer(), torch.jit.script(nn.Linear(6, 3)))

    for make, says in (
        (compiled, "the model was given to torch.compile already"),
        (scripted, "not supported on ScriptModules"),
    ):
        with pytest.raises((StrategyError, RuntimeError), match=says):
            train(_job(make), strategy="pp", devices="2xcpu", folder=tmp_path, quiet=True)
