"""What a model is seen to do in forward."""

from __future__ import annotations

import gc
import random
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job, train
from lockstep.model.inspection import OutsideVariables, Seen, attribute_prints, look
from lockstep.tensors.digest import digest
from zoo import drawn


class Layer(nn.Linear):
    """A linear layer of which each test changes one thing."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("kept", torch.zeros(6))
        self.calls = 0


class Centred(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(dim=0))


class Normalised(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.batch_norm(x, None, None, training=self.training))


class Warming(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 1000)


class WarmingUncut(Warming):
    """It takes no other number of samples than the one that it took first."""

    size = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = self.size or len(x)
        return super().forward(x.view(self.size, 6))


class WarmingBeside(Warming):
    """Beside its outputs it gives as many numbers as it is first given samples, which parts
    can't be told of.
    """

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.size = vars(self).get("size", len(x))
        return super().forward(x), torch.ones(self.size)


class Carrying(Layer):
    """It goes on from the batch before, and begins anew where that was of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.zeros(0, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(x)
        before, self.before = self.before, outputs.detach()
        return outputs + before if len(before) == len(x) else outputs


class Following(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.mul_(0.9).add_(x.detach().mean(dim=0))
        return super().forward(x - self.kept)


class Counting(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept += 1
        return super().forward(x) / self.kept[0]


class Masked(Layer):
    """Constants that aren't finite: a causal mask, and a value that nobody has filled in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))
        self.register_buffer("unknown", torch.full((3,), float("nan")))


class Writing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.bias += 1
        return super().forward(x)


class Monitoring(Layer):
    """Writes a mean over the batch, and computes nothing with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.kept.lerp_(x.mean(dim=0), 0.1)
        return super().forward(x)


class Drawing(Centred):
    """Draws a number, which acts on nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if torch.rand(()) >= 0 else 2 * x)


class DrawingBeside(Monitoring):
    """Adds a number that it draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(())


class Dropping(Centred):
    """Has the rate of a dropout as an attribute, and acts otherwise in training."""

    dropout = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else nn.Linear.forward(self, x)


class InTwos(Layer):
    """Takes pairs of samples, of which a half may be none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 4:
            raise ValueError(f"{len(x)} samples are no pairs of pairs")
        return super().forward(x)


class WritingForAWhile(Layer):
    """Computes with the signs of its weights, which it puts back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.weight.data.clone()
        self.weight.data.sign_()
        outputs = super().forward(x)
        self.weight.data.copy_(kept)
        return outputs


class WritingUnseen(Layer):
    """By a way that PyTorch's count of versions doesn't show."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data[0, 0] *= -1
        return super().forward(x)


class Noisy(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x))


class Sampling(Layer):
    """An encoder of a variational autoencoder: samples, and two terms of a loss over all of
    them.
    """

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        mean = super().forward(x)
        divergence = mean.square().sum(1)
        return {
            "sampled": mean + torch.randn_like(mean),
            "divergence": divergence.mean(),
            "balance": mean.mean(0).square().sum(),
        }


class Rejecting(Layer):
    """Draws until it likes what it got."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while torch.rand(()) < 0.9:
            pass
        return super().forward(x)


class NoisyElsewhere(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + random.random())


class Uncopyable(Centred):
    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise TypeError("holds a lock")


class Seeding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng([]):
            torch.manual_seed(3)
            return x * torch.rand(6).to(x)


class Scoring(Layer):
    """Each sample against each: (batch, batch)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ super().forward(x).T


class Squares(Layer):
    """A square for each sample, as large as the batches here: (batch, 4, 2)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :2].unsqueeze(1).expand(-1, 4, -1)


class MaskedLogits(Centred):
    """Some outputs are filled with a number that is far larger than all others."""

    fill = -1e9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(x)
        return outputs.masked_fill(torch.tensor([True, False, False]), self.fill)


class Forbidden(MaskedLogits):
    fill = float("-inf")


class Spectral(Centred):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(super().forward(x))


class Trimmed(nn.Module):
    """Outputs as long as the longest sample of the batch."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.out, self.mixes = nn.Linear(6, 3), mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        longest = int((x != 0).sum(1).max())
        outputs = self.out(x)[:, None] * torch.arange(1, longest + 1)[:, None]
        return outputs * longest if self.mixes else outputs


CASES = [
    (MaskedLogits, Seen(mixes=True)),
    (Forbidden, Seen(mixes=True)),
    (Spectral, Seen(mixes=True)),
    (Layer, Seen()),
    (Scoring, Seen(mixes=True)),
    (Squares, Seen()),
    (Centred, Seen(mixes=True)),
    (Normalised, Seen(mixes=True)),
    (Warming, Seen(remembers=True)),
    (WarmingUncut, Seen(remembers=True, unparted=ANY)),
    (WarmingBeside, Seen(remembers=True)),
    (Carrying, Seen(remembers=True)),
    (Following, Seen(mixes=True, written=("kept",), follows=("kept",))),
    (Monitoring, Seen(written=("kept",), follows=("kept",))),
    (Drawing, Seen(draws=True, mixes=True)),
    (DrawingBeside, Seen(draws=True, written=("kept",), follows=("kept",))),
    (Dropping, Seen(mixes=True)),
    (InTwos, Seen(unparted=ANY)),
    (Counting, Seen(written=("kept",))),
    (Masked, Seen()),
    (Writing, Seen(writes="bias", writes_within="bias")),
    (WritingUnseen, Seen(writes="weight", writes_within="weight")),
    (WritingForAWhile, Seen(writes_within="weight")),
    (Noisy, Seen(draws=True)),
    (Sampling, Seen(draws=True, of_batch={"divergence": "mean", "balance": "neither"})),
    (Rejecting, Seen(draws=True)),
    (NoisyElsewhere, Seen(draws=True, draws_elsewhere=True)),
    (Seeding, Seen(seeds=True)),
    (Uncopyable, Seen(uncopied=ANY)),
    (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)), Seen()),
    (lambda: nn.TransformerEncoderLayer(6, 2, batch_first=True), Seen()),
]


@pytest.mark.parametrize("samples", [1, 2, 7])
@pytest.mark.parametrize(("model", "seen"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_model_does_in_forward_is_seen(model, seen: Seen, samples: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = model()
    inputs = (
        drawn(samples, 4, 6) if isinstance(built, nn.TransformerEncoderLayer) else drawn(samples, 6)
    )
    assert look(built, inputs, samples) == seen


@pytest.mark.parametrize("model", [Noisy, NoisyElsewhere, Following, Warming])
def test_looking_leaves_model_and_generators_as_they_were(model) -> None:
    built = model()
    before = {name: value.clone() for name, value in built.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    look(built, drawn(7, 6), 7)
    assert all(torch.equal(value, before[name]) for name, value in built.state_dict().items())
    assert built.calls == 0
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_a_model_that_mixes_samples_of_a_sequence_first_batch_is_not_blamed() -> None:
    gru = nn.GRU(6, 3, batch_first=True)
    assert look(gru, drawn(5, 4, 6), 5) == Seen()


class Rounding(nn.Linear):
    """As a convolution in TF32, whose rounding depends on how it is computed, and so on how many
    samples there are.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounds = torch.backends.cudnn.conv.fp32_precision == "tf32"
        return super().forward(x) * (1 + 1e-3 * len(x) if rounds else 1)


def test_what_tf32_rounds_is_not_taken_for_samples_that_depend_on_one_another() -> None:
    assert torch.backends.cudnn.allow_tf32, "as PyTorch has it"
    assert look(Rounding(6, 3), drawn(7, 6), 7) == Seen()
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cudnn.conv.fp32_precision == "tf32"


def of_lengths(*lengths: int) -> torch.Tensor:
    return torch.ones(len(lengths), 6).where(torch.arange(6) < torch.tensor(lengths)[:, None], 0.0)


class Difference(nn.Linear):
    """What two computations of the same give, of which one rounds by how many samples there are."""

    mixes = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = super().forward(x)
        rounded = values * (1 + torch.finfo(values.dtype).eps * len(x))
        return rounded - values + self.mixes * x.mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_errors_that_are_left_of_a_difference_are_no_dependence_on_other_samples(
    dtype: torch.dtype,
) -> None:
    model, x = Difference(6, 3).to(dtype), drawn(24, 6).to(dtype)
    assert 0 < model(x).abs().max() < 1e-5
    assert look(model, x, 24) == Seen()
    model.mixes = 1e-3
    assert look(model, x, 24).mixes


def test_outputs_as_long_as_the_longest_sample_are_compared_as_far_as_both_go() -> None:
    inputs = of_lengths(2, 1, 5, 4)
    assert look(Trimmed(), inputs, 4) == Seen()
    assert look(Trimmed(mixes=True), inputs, 4) == Seen(mixes=True)


def test_a_loss_that_counts_the_padding_of_such_outputs_is_seen() -> None:
    """Found by trial: weights 2 to 6 % off without a line."""
    found = look(
        Trimmed(),
        of_lengths(2, 1, 5, 4),
        4,
        targets=torch.zeros(4),
        judge=lambda out, y, n: (out.square().sum(), n),
    )
    assert found.mixes


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


class WidthOfTwo(Layer):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.width = width


class WidthOfThree(Layer):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width = width


def test_objects_of_classes_that_cant_be_imported_are_compared_too() -> None:
    """Found by trial: on ranks those of the script itself weren't, so what changed on one rank
    only wasn't seen.
    """
    script = types.ModuleType("a_script_that_is_not_imported")
    exec(
        "class Box:\n    value = 1\n\nbox = Box()\n\ndef uses():\n    return box.value",
        vars(script),
    )
    layer = Layer()
    layer.box = script.box  # type: ignore[attr-defined]
    outside = OutsideVariables([script.uses])
    before = attribute_prints(layer), outside.prints()
    assert {"box"} <= before[0].keys() and before[1]
    script.box.value = 2
    assert attribute_prints(layer) != before[0]
    assert outside.prints() != before[1]


def test_defaults_of_two_classes_are_two_variables() -> None:
    """Found by trial: they had one name, so that one seemed to have become the other."""
    names = OutsideVariables([WidthOfTwo, WidthOfThree]).prints()
    assert {"WidthOfTwo.__init__() default 0", "WidthOfThree.__init__() default 0"} <= names.keys()


def keeping(number: int) -> Any:
    """A hook with a list of its own."""
    kept = [number]

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kept.append(number)
        return output * kept[0]

    return hook


def test_hooks_from_one_function_have_a_variable_each() -> None:
    """By their names they were one."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    for number, layer in enumerate(model):
        layer.register_forward_hook(keeping(number))
    outside = OutsideVariables.of_model(model)
    before = outside.prints()
    with outside.kept():
        model(drawn(8, 6))
        assert {"kept", "kept (2)"} <= {
            name for name, its in outside.prints().items() if before[name] != its
        }
    assert outside.prints() == before
    assert set(look(model, drawn(8, 6), 8).changes) >= {"kept", "kept (2)"}


@pytest.mark.parametrize("again", [False, True])
def test_the_copy_that_is_inspected_is_freed_at_once(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed until garbage was collected, so that updates in which forward is inspected took
    more memory.
    """
    copies: list[weakref.ref[Any]] = []

    class Copied(Layer):
        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)
            copies.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        targets = torch.zeros(8, dtype=torch.long)
        look(
            Copied(),
            drawn(8, 6),
            8,
            targets=targets,
            judge=lambda o, y, n: (o.sum(), n),
            of=16,
            again=again,
        )
        assert copies and not any(one() for one in copies)
    finally:
        gc.enable()


def test_a_model_that_cannot_be_copied_is_said_to_be_unseen() -> None:
    model = Layer()
    model.lock = threading.Lock()
    (note,) = look(model, drawn(8, 6), 8).of_replicas(with_dropout=False)
    assert str(note).startswith(
        "the model's forward was not inspected, since the model can't be copied "
        "(TypeError: cannot pickle '_thread.lock' object): lockstep verify"
    )


class Itself(Layer):
    """Knows whether it is the one that was built."""

    def __init__(self) -> None:
        super().__init__()
        self.built = id(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if id(self) != self.built:
            raise RuntimeError("not the one that was built")
        return super().forward(x)


def test_a_model_whose_copy_fails_is_said_to_be_unseen_once_it_has_run_itself(
    tmp_path: Path, capsys: Any
) -> None:
    """(Where it fails too, its own error is enough.)"""
    job = Job(
        model=Itself,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=TensorDataset(drawn(24, 6), drawn(24, 3)),
        batch_size=8,
        accumulate=2,
    )
    train(job, devices=1, folder=tmp_path)
    assert (
        "not inspected further, since it can't take a part of its inputs (RuntimeError: not the "
        "one that was built" in (" ".join(capsys.readouterr().out.split()))
    )


class Capacity(nn.Module):
    """A mixture of experts, each with room for the first two samples of a batch that come to it."""

    def __init__(self, *, noisy: bool = False) -> None:
        super().__init__()
        self.noisy = noisy
        self.router, self.experts = (
            nn.Linear(6, 2),
            nn.ModuleList(nn.Linear(6, 3) for _ in range(2)),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = self.router(inputs)
        chosen = (scores + 0.1 * torch.randn_like(scores) if self.noisy else scores).argmax(1)
        outputs = inputs.new_zeros(len(inputs), 3)
        for number, expert in enumerate(self.experts):
            its = (chosen == number).nonzero()[:2, 0]
            outputs[its] = expert(inputs[its])
        return outputs


@pytest.mark.parametrize("noisy", [False, True])
def test_samples_that_act_on_one_another_in_more_than_a_local_batch_are_seen(noisy: bool) -> None:
    """Found by trial: experts with room for more than what came from a local batch, 13 % off
    without a line.
    """
    model = Capacity(noisy=noisy)
    with torch.no_grad():
        model.router.weight.zero_()
    assert not look(model, drawn(2, 6), 2).mixes
    assert look(model, drawn(2, 6), 2, of=8).mixes
    assert not look(nn.Linear(6, 3), drawn(2, 6), 2, of=8).mixes


class CountingInLists(Layer):
    """Notes that it was called, in a list and a dictionary that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.list, self.by_name = [0], {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.list[0] += 1
        self.by_name["calls"] += 1
        return super().forward(x)


def test_what_is_counted_in_a_list_is_no_more_than_a_count() -> None:
    assert look(CountingInLists(), drawn(8, 6), 8) == Seen(counts=("list", "by_name"))


def test_time_first_inputs_are_said_not_to_be_cut() -> None:
    assert look(nn.GRU(6, 3), drawn(5, 8, 6), 8).ragged
    assert not look(nn.GRU(6, 3, batch_first=True), drawn(8, 5, 6), 8).ragged


def test_inputs_that_cannot_be_cut_are_said_not_to_be_looked_at() -> None:
    """Found by trial: a norm over all nodes of a batch of graphs trained weights 3 % off without
    a line.
    """
    inputs = {"input": torch.randint(5, (7,)), "offsets": torch.tensor([0, 2, 3, 6])}
    seen = look(nn.EmbeddingBag(5, 3, mode="sum"), inputs, 4)
    assert seen.ragged and "isn't seen" in next(
        c.text for c in seen.of_replicas(with_dropout=False)
    )


class Beside(nn.Module):
    """Outputs as long as the longest sample, or gradients that follow their norm; beside them a
    mean nobody reads.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.body, self.out, self.what = nn.Linear(6, 6), nn.Linear(6, 1), what

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        if self.what == "hook" and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        logits = self.out(hidden)
        if self.what == "padded":
            logits = logits * torch.arange(1.0, 1 + int((x != 0).sum(1).max()))
        return {"logits": logits, "activation": hidden.abs().mean()}


@pytest.mark.parametrize(("what", "found"), [("", ""), ("hook", "backward"), ("padded", "mixes")])
def test_a_mean_beside_the_outputs_hides_nothing(what: str, found: str) -> None:
    """Found by trial: where there was one, neither gradients nor losses of padded outputs were
    looked at.
    """
    x = drawn(8, 6).double() * (torch.arange(6) < 6 - torch.arange(8)[:, None] // 2)
    seen = look(
        Beside(what).double(),
        x,
        8,
        targets=torch.ones(8),
        judge=lambda o, y, n: (o["logits"].square().mean() * n, n),
    )
    assert seen.of_batch == {"activation": "mean"}
    assert (seen.backward is not None, seen.mixes) == (found == "backward", found == "mixes")
