"""Stages on two cards, which see a tensor that was left on the wrong one.

Each model is trained over cards, forward, backward and update, and must end where one device that
accumulates does.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from lockstep import Job, train
from lockstep.data import Part
from lockstep.errors import LossError
from lockstep.launch.devices import Device, slots
from lockstep.launch.world import World
from lockstep.model.optimizers.gradients import clip_gradients
from lockstep.pipelining import transfer
from lockstep.pipelining.device_map import stage_of
from lockstep.pipelining.planner.partition import even_split
from lockstep.pipelining.stage_layers import place_tensors
from lockstep.strategies import MP
from lockstep.strategies.pp import PP
from lockstep.strategies.single import Single
from lockstep.strategies.steps.step import Step
from lockstep.tensors.pytree import each
from simulated_card import counts

from test_pipelining import KINDS, MANY, SAMPLES  # isort: skip
from zoo import _job, drawn, labels, sgd, tokens_and_next, wants  # isort: skip

BOUND = 1e-10
SIZES = (8, 6)


def batch(job: Job, start: int, size: int) -> tuple[Any, Any]:
    """Some samples of the job's data, collated."""
    rows = [job.train_data[i % SAMPLES] for i in range(start, start + size)]
    return torch.utils.data.default_collate(rows)


def updated(step: Step, job: Job) -> dict[str, torch.Tensor]:
    """The state after some updates, the last one after a smaller batch."""
    start = 0
    for size in SIZES:
        step.seed(7)
        inputs, targets = each(
            lambda t: t.double() if t.is_floating_point() else t, batch(job, start, size)
        )
        result = step(inputs, targets)
        assert result.loss == result.loss
        start += size
    return {
        name: value.cpu()
        for name, value in step.state_dict()["model"].items()
        if isinstance(value, torch.Tensor)
    }


def over_cards(job: Job, way: PP, count: int) -> Step:
    """The job's step over so many cards."""
    return way.prepare(job, World(devices=tuple(Device("card", i) for i in range(count))))


def compare(job: Job, way: PP, count: int) -> Step:
    job = job.replace(precision="fp64")
    step = over_cards(job, way, count)
    found = updated(step, job)
    one = Single().prepare(
        job.replace(accumulate=way.num_microbatches(job)), World(devices=slots(1))
    )
    expected = updated(one, job)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=BOUND, atol=BOUND, msg=lambda m, name=name: f"{name}: {m}"
        )
    stages = stage_of(step.model, way.device_map or even_split(step.model, count), count)
    for name, p in step.model.named_parameters():
        place = torch.device("card", stages[name])
        assert p.device == place, name
        assert p.grad is None or p.grad.device == place, name
    for name, b in step.model.named_buffers():
        assert b.device == torch.device("card", stages.get(name, 0)), name
    return step


OFTEN = ("a sequence, clipped", "a U-Net", "a tied GPT")
OWN_DRAWS = ("dropout", "dropout computed again")
"""Each card has a generator of its own, so these can't be compared."""
MIXING = ("control flow", "a buffer that all write", "outputs on both cards")
"""In these, samples of a micro-batch act on one another: one device accumulates likewise."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=() if k in OFTEN else pytest.mark.slow)
        for k in KINDS
        if k not in OWN_DRAWS
    ],
)
def test_over_two_cards_each_kind_ends_where_one_device_does(kind: str) -> None:
    job, device_map = KINDS[kind]
    compare(job.replace(accept_differences=kind in MIXING), PP(device_map, 3), 2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("kind", MANY)
def test_over_more_cards_too(kind: str, count: int) -> None:
    job = KINDS[kind][0].replace(accept_differences=kind in MIXING)
    for schedule in ("1f1b", "gpipe"):
        compare(job, PP(None, 3, schedule), count)


class Thrice(nn.Module):
    """One weight, used on both cards and in the container."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.second.weight = self.third.weight = self.first.weight
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return self.out(x + nn.functional.linear(x, self.first.weight))


class Board(nn.Module):
    """A buffer that each stage writes, and the container reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Writing(6, 6), Writing(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.first.board = self.second.board = self.mean
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        self.mean.data = self.mean.data + x.detach().mean(0)
        self.mean[1:] = x.detach()[0, 1:]
        return self.out(x + self.mean)


class Writing(nn.Linear):
    """Writes to a buffer that others have too."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("board", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + self.board
        self.board += y.detach().mean(0)
        return y


class Functional(nn.Module):
    """The container calls functions with what it holds itself, running statistics too, after the
    last card's layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.scale, self.weight = nn.Parameter(torch.rand(6)), nn.Parameter(torch.randn(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        y = nn.functional.batch_norm(y, self.mean, self.var, self.scale, None, self.training)
        y = torch.addcmul(y, self.first(x), y, out=None) if self.training else y
        return nn.functional.linear(y, self.weight)


class Masked(nn.Module):
    """Masks and positions made in forward, on the CPU and where the inputs are; None and ints
    passed on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(4))
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(time))
        causal = torch.ones(time, time, dtype=torch.bool, device=tokens.device).triu(1)
        for i, block in enumerate(self.blocks):
            mask = causal if i % 2 else causal.cpu()
            x, state = block(
                x, mask=mask, padding=(tokens == 0) & (tokens != tokens[:, :1]), state=(None, i)
            )
            assert state == (None, i)
        return self.out(x).transpose(1, 2)


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, *, mask: Any, padding: Any, state: Any) -> Any:
        x = self.norm(x)
        y, _ = self.attention(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        bias = torch.linspace(0, 1, 8)  # on the CPU, in float32
        return (x + y).masked_fill(padding[..., None].cpu(), 0.5) * bias, state


class Rerunning(nn.Module):
    """A checkpoint around layers of both cards, with a skip in it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.body, self.out = nn.Linear(6, 6), Skipping(), nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(
            checkpoint(self.body, torch.tanh(self.stem(x)), use_reentrant=self.reentrant)
        )


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = torch.tanh(self.left(x))
        right = torch.tanh(self.right(left))
        return self.both(torch.cat([left, right], dim=1)) + left


class Penalised(nn.Module):
    """Asks for a gradient within forward, through both cards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.second(torch.tanh(self.first(x)))
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=self.training)
        return y + slope[:, :3]


class Direct(nn.Module):
    """Calls the layers' ``forward`` itself, past all hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out.forward(self.second.forward(torch.tanh(self.first.forward(x))))


class Views(nn.Module):
    """Writes through views, into what lies on the other card, and with ``out=``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.first(x)
        two = self.second(one)
        one = one.clone()
        one[:, 1:3] += two[:, 1:3]
        one.view_as(two).mul_(2.0)
        one[two > 0] = 0.25
        one.index_add_(1, torch.tensor([0, 2]), two[:, :2])
        with torch.no_grad():
            room = torch.empty_like(one)
            torch.add(two, one, out=room)
            one.data = two.data * 0.5 + one.data
        return self.out(one + room.to(one.dtype) + two)


class Apart(nn.Module):
    """Where it ends depends on the values; gives outputs that lie on both cards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, wants: torch.Tensor) -> Any:
        left = self.first(x)
        return {"left": left, "right": self.second(left) if wants.any() else left}


def of_both(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = targets > 0
    both = nn.functional.cross_entropy(
        outputs["left"] + outputs["right"], targets, reduction="none"
    )
    return both[kept].sum(), kept.sum()


class Caching(nn.Module):
    """Keeps an object of its own, which no hook looks into, on its way over the cards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = Adding(), Adding(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = Kept()
        x = self.second(self.first(x, kept), kept)
        return self.out(x + torch.stack(kept.past).mean(0))


class Kept:
    def __init__(self) -> None:
        self.past: list[torch.Tensor] = []


class Adding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:  # type: ignore[override]
        x = torch.tanh(super().forward(x))
        kept.past.append(x)
        return x + torch.stack(kept.past).sum(0) + kept.past[0]


def hooked() -> nn.Module:
    """Hooks of a person's own on modules and parameters."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    scale = torch.full((6,), 2.0)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * scale,))
    model[2].register_forward_hook(lambda module, args, output: output + args[0])
    model[0].weight.register_hook(lambda gradient: gradient * 3)
    model[3].register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,))
    return model


_words, _following = tokens_and_next()
PLACED: dict[str, tuple[Job, dict[str, int] | None]] = {
    "a weight on both cards": (_job(Thrice, optimizer=sgd), {"second": 1, "out": 1, "": 0}),
    "a buffer that all write": (_job(Board), {"second": 1, "": 0}),
    "functions of the container": (_job(Functional), {"second": 1, "": 0}),
    "masks and positions": (_job(Masked, _words, _following, metrics={}), None),
    "a checkpoint around both cards": (
        _job(lambda: Rerunning(False)),
        {"stem": 0, "body.left": 0, "": 1},
    ),
    "a reentrant checkpoint": (_job(lambda: Rerunning(True)), {"stem": 0, "body.left": 0, "": 1}),
    "a gradient within forward": (_job(Penalised), {"first": 0, "second": 1}),
    "layers called past their hooks": (_job(Direct), {"first": 0, "second": 1, "out": 0}),
    "writes over cards": (_job(Views), {"first": 0, "": 1}),
    "outputs on both cards": (
        _job(Apart, (drawn(SAMPLES, 6), wants(1, 9)), loss=of_both, metrics={}),
        {"first": 0, "second": 1},
    ),
    "an object of its own": (_job(Caching), {"first": 0, "": 1}),
    "hooks": (_job(hooked), {"0": 0, "": 1}),
}
"""Kinds whose difficulty is where tensors are."""


@pytest.mark.parametrize("kind", PLACED)
def test_what_meets_between_layers_is_moved(kind: str) -> None:
    job, device_map = PLACED[kind]
    compare(job.replace(accept_differences=kind in MIXING), PP(device_map, 3), 2)


class Dropping(nn.Module):
    """Dropout of a checkpoint that lies on the other card than its input does; the mask is seen
    in the gradient.
    """

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), Dropped()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.scale, 0.5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_again_what_its_card_drew(reentrant: bool) -> None:
    outputs: list[torch.Tensor] = []

    def total(found: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        outputs.append(found.detach().cpu())
        return found.sum(), len(targets)

    job = _job(lambda: Dropping(reentrant), loss=total, precision="fp64")
    step = over_cards(job, MP({"first": 0, "second": 1}), 2)
    step(drawn(8, 64).double(), labels(8, 3))
    # At a scale of 1 its gradient is the sum of the outputs over the batch.
    torch.testing.assert_close(step.model.second.scale.grad.cpu(), outputs[0].sum(0) / 8)


@pytest.mark.parametrize("way", [MP, partial(PP, microbatches=2)])
def test_an_evaluation_over_cards_does_not_keep_what_was_moved(way: Any) -> None:
    """Every activation that goes from one card to the other was kept to the end of the set."""
    job, device_map = PLACED["a weight on both cards"]
    step = over_cards(job.replace(precision="fp64"), way(device_map), 2)
    step(*batch(job, 0, 8))
    kept = []
    with step.evaluating():
        for _ in range(20):
            step.evaluator.judged(step.model, step.placed(Part(*batch(job, 0, 8), 8, 8)))
            kept.append(len(transfer.current()._copies))
    assert max(kept) == kept[0] <= 2


class Fan(nn.Module):
    """Several layers of the second card use what the first one's gave, and a weight of it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.uses = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = sum(nn.functional.linear(use(x), self.first.weight) for use in self.uses)
        with torch.no_grad():
            y = y + x + self.first.bias
        return self.out(y * x)


def test_what_several_layers_of_another_card_use_crosses_once_in_a_micro_batch() -> None:
    def crossings(layers: int) -> int:
        job = _job(lambda: Fan(layers))
        compare(job, PP({"first": 0, "": 1}, 2), 2)
        step = over_cards(job, PP({"first": 0, "": 1}, 2), 2)
        for number in range(3):
            before = counts("crossings")["crossings"]
            step(*batch(job, number, 8))
        return counts("crossings")["crossings"] - before

    assert crossings(1) == crossings(4)


def test_a_copy_is_made_anew_of_what_was_written_to() -> None:
    one, other = torch.device("card", 0), torch.device("card", 1)
    x = torch.ones(3, device=one, requires_grad=True) * 2
    with transfer.TransferMode([one, other], other) as mode:
        first = mode.moved(x)
        assert mode.moved(x) is first
        with torch.no_grad():
            assert not mode.moved(x).requires_grad
        x.mul_(2)
        second = mode.moved(x)
        x.data = torch.zeros(3, device=one)
        third = mode.moved(x)
    assert [int(copy.sum()) for copy in (first, second, third)] == [6, 12, 0]


class Watched(TorchDispatchMode):
    """Counts what the host reads of cards, and numbers that are moved from one device to
    another.
    """

    reads = moves = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = (kwargs or {}).get("device")
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += args[0].device.type != "cpu"
        elif func is torch.ops.aten._to_copy.default and wanted is not None and not args[0].dim():
            self.moves += wanted != args[0].device
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", [MP, partial(PP, microbatches=4)])
def test_an_update_over_cards_reads_nothing_and_moves_its_total_once(way: Any) -> None:
    """The total was moved once for each micro-batch, and the count was waited for."""
    job, device_map = PLACED["a weight on both cards"]
    job = job.replace(precision="fp64", loss=nn.CrossEntropyLoss(ignore_index=0))
    step = over_cards(job, way(device_map), 2)
    for number in range(2):  # these are checked
        step(*batch(job, number, 8))
    with Watched() as watched:
        step(*batch(job, 2, 8))
    assert watched.reads == 0
    assert watched.moves <= 3  # total, count, and the weight of the gradients on the other card


def test_weights_of_recurrent_layers_are_put_together_after_they_were_moved(monkeypatch) -> None:
    """Else cuDNN copies them in every call, with a warning."""
    flattened: list[str] = []

    def flatten(self: nn.LSTM) -> None:
        flattened.append(self.weight_hh_l0.device.type)

    monkeypatch.setattr(nn.LSTM, "flatten_parameters", flatten)
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    flattened.clear()
    place_tensors(model, {}, torch.device("card", 1))
    assert flattened == ["card"]


def test_after_an_error_the_callers_device_is_the_current_one_again(monkeypatch) -> None:
    job, device_map = PLACED["a weight on both cards"]
    step = over_cards(job, PP(device_map, 2), 2)
    current = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(step, "_forward_loss", lambda *args: step.runner.threads.occupy(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(*batch(job, 0, 8))
    assert current == [1, 0]


class Failing(nn.Sequential):
    """Its second part raises when it is told to, and notes the types that it computes in."""

    fails = False

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Linear(6, 3))
        self[1].register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        computed_in.add(output.dtype)
        if Failing.fails:
            raise ValueError("as it was told")


computed_in: set[torch.dtype] = set()


def test_threads_of_micro_batches_have_the_callers_autocast_and_say_where_one_failed(
    monkeypatch,
) -> None:
    job = _job(Failing)
    step = over_cards(job, PP({"0": 0, "1": 1}, 4), 2)
    for number in range(3):
        computed_in.clear()
        with torch.autocast("card", torch.bfloat16):
            step(*batch(job, number, 8))
        checks = {torch.float32} if number < 2 else set()
        assert computed_in == {torch.bfloat16} | checks
    monkeypatch.setattr(Failing, "fails", True)
    with pytest.raises(ValueError, match="as it was told") as failed:
        step(*batch(job, 3, 8))
    assert failed.value.__notes__ == [
        "raised in stage 1 (card:1), forward of micro-batch 0, at step 4"
    ]
    monkeypatch.setattr(Failing, "fails", False)
    assert step(*batch(job, 4, 8)).loss > 0


def test_a_profile_over_cards_has_the_time_of_the_stages(tmp_path: Path) -> None:
    job, device_map = PLACED["a weight on both cards"]
    job = job.replace(batch_size=4, epochs=2)
    run = train(
        job,
        strategy=PP(device_map, 2),
        devices="card:0,1",
        folder=tmp_path,
        profile=True,
        quiet=True,
    )
    (row,) = json.loads((run.folder / "profile" / "summary.json").read_text())["ranks"]
    assert row["phases"]["stages"] > row["phases"]["optimizer"] / 100


def test_every_card_of_any_type_is_seeded_with_a_step() -> None:
    """Cards of CUDA alone once were: on others a resumed run drew other masks."""
    job, device_map = PLACED["a weight on both cards"]
    step = over_cards(job, MP(device_map), 2)
    drawn_from = []
    for seed in (5, 5, 6):
        step.seed(seed)
        drawn_from.append((torch.card.get_rng_state(0), torch.card.get_rng_state(1)))
    (a, b), again, (c, d) = drawn_from
    assert torch.equal(a, again[0]) and torch.equal(b, again[1])
    assert not torch.equal(a, c) and not torch.equal(b, d)


def test_a_model_over_cards_can_be_called_outside_of_a_step() -> None:
    job, device_map = PLACED["a weight on both cards"]
    job = job.replace(precision="fp64")
    x = drawn(5, 6).double()
    step = over_cards(job, PP(device_map, 2), 2)
    found = step.model(x)
    assert found.device == torch.device("card", 1)
    found.sum().backward()
    with pytest.raises(RuntimeError, match="shapes"):
        step.model(x[:, :2])
    assert transfer.current() is None
    one = Single().prepare(job, World(devices=slots(1))).model
    torch.testing.assert_close(found.detach().cpu(), one(x))
    one(x).sum().backward()
    torch.testing.assert_close(step.model.first.weight.grad.cpu(), one.first.weight.grad)


def test_evaluation_and_saved_state_over_cards_are_those_of_one_device() -> None:
    job, device_map = KINDS["a tied GPT"]
    job = job.replace(precision="fp64", optimizer=sgd)
    inputs, targets = batch(job, 0, 8)
    one = Single().prepare(job, World(devices=slots(1)))
    step = over_cards(job, PP(device_map, 3), 2)
    step(inputs, targets)
    saved = step.state_dict()
    step(inputs, targets)
    step.load_state_dict(saved)
    assert all(
        p.device == step.optimizer.state[p]["momentum_buffer"].device
        for p in step.model.parameters()
    )
    outputs, total, count = (value.cpu() for value in step.evaluate(inputs, targets))
    one.load_state_dict(tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, saved))
    for found, expected in zip((outputs, total, count), one.evaluate(inputs, targets), strict=True):
        torch.testing.assert_close(found, expected)


def test_sparse_gradients_are_clipped_together_with_those_of_another_device() -> None:
    rows, dense = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3, device="card:0"))
    rows.grad = torch.sparse_coo_tensor(
        [[1, 1]], [[3.0, 0.0], [0.0, 0.0]], (4, 2), check_invariants=True
    )
    dense.grad = torch.tensor([0.0, 4.0, 0.0], device="card:0")
    clip_gradients([dense, rows], 1.0)
    torch.testing.assert_close(dense.grad.cpu(), torch.tensor([0.0, 0.8, 0.0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(rows.grad.to_dense()[1], torch.tensor([0.6, 0.0]), rtol=1e-5, atol=0)


def test_a_mask_that_becomes_uneven_on_a_card_is_found_in_its_update() -> None:
    def loss(outputs: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, mask = targets
        return ((outputs - values).square() * mask).sum() / mask.sum()

    def updates(uneven_in: int, steps: int) -> Step:
        step = over_cards(
            KINDS["a sequence"][0].replace(precision="fp64", loss=loss), PP(microbatches=2), 2
        )
        for number in range(1, steps + 1):
            mask = torch.ones(8, 3)
            mask[5, 1:] = 0 if number == uneven_in else 1
            step(
                drawn(8, 6, seed=number).double(),
                (drawn(8, 3, seed=number).double(), mask.double()),
            )
        return step

    updates(uneven_in=9, steps=4).check()
    with pytest.raises(LossError, match="is not a mean over samples in step 3 "):
        updates(uneven_in=3, steps=4)
    with pytest.raises(LossError, match=r"is not a mean over samples \(whole"):
        updates(uneven_in=1, steps=1)  # the first update is waited for: nothing wrong is trained
