"""Number formats: fp32, bf16, fp16 with a scaled loss, under every strategy."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job, parallelize, train
from lockstep.errors import JobError, LossError
from lockstep.launch.devices import slots
from lockstep.launch.processes import modes
from lockstep.launch.world import World
from lockstep.model import precision
from lockstep.model.optimizers.build import build_optimizer
from lockstep.strategies.ddp import DDP
from lockstep.strategies.dp import DP

from harness import differences, parity  # isort: skip
from zoo import ZOO, drawn, labels, mlp, plain_sgd, sgd, state_of

WAYS = [
    ("dp", "2xcpu"),
    (DDP(reduce="flat"), "2xcpu"),
    (DDP(reduce="overlapped"), "2xcpu"),
    ("dp", "3xcpu"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        pytest.param(kind, precision, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, kind in enumerate(
            ["momentum", "ignored tokens and tied weights", "accumulation", "clipping"]
        )
        for j, precision in enumerate(["bf16", "fp16"])
    ],
)
def test_half_precision_is_as_near_to_one_device_as_the_format_allows(
    precision, kind, tmp_path
) -> None:
    job = ZOO[kind]
    exact = train(
        job.replace(precision="fp32"),
        strategy="single",
        devices="1xcpu",
        folder=tmp_path,
        quiet=True,
    )
    single = train(
        job.replace(precision=precision),
        strategy="single",
        devices="1xcpu",
        folder=tmp_path,
        quiet=True,
    )
    floor = differences(job, single, exact).worst
    assert 1e-6 < floor < 0.2, "the format rounds, and the training is one"
    for way, devices in WAYS:
        several = train(
            job.replace(precision=precision),
            strategy=way,
            devices=devices,
            folder=tmp_path,
            quiet=True,
        )
        # Both lie within about the floor of the exact one, to either side.
        assert differences(job, several, single).worst < 2 * floor


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "devices"), WAYS)
def test_fp32_is_as_near_to_one_device_as_rounding_allows(way, devices) -> None:
    assert parity(ZOO["momentum"], way, devices, precision="fp32").worst < 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["dp", "ddp", "pp"])
def test_weights_of_classes_are_in_the_format_of_the_job(way: str) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    assert parity(ZOO["momentum"].replace(loss=loss), way, "2xcpu", precision="fp64").worst < 1e-10


class Weighted(nn.Module):
    """A loss that keeps weights, a temperature and a number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("calls", torch.zeros(()))
        self.temperature = 1.0

    def forward(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            self.calls += self.training
        each = nn.functional.cross_entropy(
            outputs / self.temperature, targets, self.weight, reduction="none"
        )
        return each.sum() * (1 + 0.1 * self.calls), self.weight[targets].sum()


def _given_new(loss: nn.Module) -> None:
    loss.weight = torch.tensor([3.0, 0.1, 1.0])


CHANGES = {
    "in place": lambda loss: loss.weight.copy_(torch.tensor([3.0, 0.1, 1.0])),
    "anew": _given_new,
    "a number": lambda loss: setattr(loss, "temperature", 0.5),
    "nothing": lambda loss: None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "make", [Weighted, lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))]
)
def test_what_is_changed_in_a_loss_later_acts_in_the_format_of_the_job(make, change) -> None:
    """Found by trial: the format's copy of the loss was made once, so that later weights of
    classes did nothing.
    """
    found = []
    for its in (None, "fp64"):
        torch.manual_seed(0)
        loss = make() if its else make().double()
        model = ZOO["mlp"].model().double()
        step = parallelize(model, loss, plain_sgd(model.named_parameters()), precision=its)
        for update in range(3):
            if update == 1:
                CHANGES[change](loss)
            if loss.weight.dtype is torch.float32 and its is None:
                loss.weight = loss.weight.double()
            step(drawn(8, 6).double(), labels(8, 3))
        found.append((*model.parameters(), step.evaluate(drawn(8, 6).double(), labels(8, 3))[1]))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-12)


class Overflowing(nn.Module):
    """Its first gradients overflow once they are scaled by 65536."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def steep(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return 1e34 * nn.functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "devices"), [("single", "1xcpu"), *WAYS])
def test_a_step_that_overflows_is_left_out_by_all_and_the_scale_is_halved(
    way, devices, tmp_path
) -> None:
    job = dataclasses.replace(
        ZOO["mlp"], model=Overflowing, loss=steep, optimizer=tiny, precision="fp16"
    )
    run = train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    state = state_of(run.folder)
    assert state["scaler"]["scale"] < 65536
    assert all(torch.isfinite(p).all() for p in run.model().parameters())


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "devices"), WAYS)
def test_what_overflows_on_one_device_is_what_overflows_on_several(way, devices, tmp_path) -> None:
    """PyTorch's DistributedDataParallel takes a mean; gradients multiplied for that beforehand
    overflowed earlier.
    """
    job = ZOO["a layer unused in some steps, the last one too"].replace(precision="fp16")
    single = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    several = train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    states = [state_of(run.folder) for run in (single, several)]
    assert states[0]["scaler"]["scale"] == states[1]["scaler"]["scale"]
    assert differences(job, several, single).worst < 1e-2


def tiny(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-36)


def test_the_scale_of_fp16_is_taken_up_by_a_resume(tmp_path) -> None:
    job = dataclasses.replace(
        ZOO["momentum"], loss=nn.CrossEntropyLoss(), optimizer=sgd, precision="fp16"
    )
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, epochs=3)
    part = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, epochs=1)
    resumed = train(
        job, strategy="single", devices="1xcpu", resume=part.folder, quiet=True, epochs=3
    )
    assert differences(job, resumed, whole).worst == 0.0


def test_weights_and_outputs_keep_their_names_and_formats(tmp_path) -> None:
    run = train(
        ZOO["mlp"].replace(precision="bf16"),
        strategy="dp",
        devices="2xcpu",
        folder=tmp_path,
        quiet=True,
    )
    assert {p.dtype for p in run.model().parameters()} == {torch.float32}


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.view_as_complex(drawn(6, 3, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.turn).abs()


def test_fp64_computes_complex_numbers_in_double_precision_too(tmp_path) -> None:
    data = TensorDataset(torch.view_as_complex(drawn(16, 6, 2)), labels(16, 3))
    job = Job(
        model=Turned, loss=nn.CrossEntropyLoss(), optimizer=plain_sgd, train_data=data, batch_size=8
    )
    run = train(job, precision="fp64", devices="1xcpu", folder=tmp_path, quiet=True)
    assert run.model().turn.dtype == torch.complex128


# ---- TensorFloat-32 ------------------------------------------------------------------------------


def rounds() -> bool:
    """Whether products are rounded, by PyTorch's old names and by its new ones."""
    old = torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    new = {torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision}
    assert old == (new == {"tf32"})
    return old


class Watched(nn.Module):
    """Notes in a buffer whether products were rounded while it computed; for it, CPUs round as
    CUDA devices do.
    """

    def __init__(self) -> None:
        super().__init__()
        precision.ROUNDING = ("cuda", "cpu")
        self.net = mlp()
        self.register_buffer("forward_rounded", torch.zeros(()))
        self.register_buffer("backward_rounded", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_rounded.fill_(float(rounds()))
        out: torch.Tensor = self.net(x)
        if out.requires_grad:
            out.register_hook(self.note_backward)
        return out

    def note_backward(self, gradient: torch.Tensor) -> None:
        self.backward_rounded.fill_(float(rounds()))


WATCHED = dataclasses.replace(ZOO["mlp"], model=Watched)


@pytest.fixture
def on_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "ROUNDING", precision.ROUNDING)  # as it was, afterwards


@pytest.mark.sweep
@pytest.mark.usefixtures("on_cpu_too")
@pytest.mark.parametrize(("way", "devices"), [("single", "1xcpu"), *WAYS[:2], ("pp", "2xcpu")])
def test_tf32_is_on_for_as_long_as_the_run_lasts_on_each_rank(way, devices, tmp_path) -> None:
    before = modes.flags()
    for name in ("tf32", "fp32"):
        run = train(
            WATCHED.replace(precision=name),
            strategy=way,
            devices=devices,
            folder=tmp_path,
            quiet=True,
        )
        held = run.model().state_dict()
        found = {held["forward_rounded"].item(), held["backward_rounded"].item()}
        assert found == {float(name == "tf32")}
        assert modes.flags() == before
    assert {p.dtype for p in run.model().parameters()} == {torch.float32}


@pytest.mark.usefixtures("on_cpu_too")
def test_tf32_is_off_again_after_a_run_that_fails_and_beside_flags_of_ones_own(tmp_path) -> None:
    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError(str(rounds()))

    before = modes.flags()
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        mine = modes.flags()
        with pytest.raises(LossError, match=": True"):
            job = dataclasses.replace(WATCHED, loss=broken, precision="tf32")
            train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
        assert modes.flags() == mine
    finally:
        modes.set_flags(before)
    assert modes.flags() == before


def test_on_cpu_devices_tf32_is_fp32_and_a_line_says_so(tmp_path, capfd) -> None:
    before = modes.flags()
    runs = [
        train(
            ZOO["mlp"].replace(precision=name), strategy="single", devices="1xcpu", folder=tmp_path
        )
        for name in ("tf32", "fp32")
    ]
    assert differences(ZOO["mlp"], *runs).worst == 0.0
    assert modes.flags() == before
    said = "precision: tf32 is for CUDA devices; on CPU devices products are those of fp32"
    assert capfd.readouterr().out.count(said) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_trained_on_cpu_devices(dtype: torch.dtype) -> None:
    """Found by trial: fused SGD left whole vectors of them as they were, without a word."""
    model = mlp().to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    step = parallelize(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.5), devices="1xcpu"
    )
    step(drawn(8, 6).to(dtype), labels(8, 3))
    assert not any(map(torch.equal, before, model.parameters()))
    with pytest.raises(
        JobError, match="fused: there is no fused SGD for this model's parameters here"
    ):
        build_optimizer(ZOO["mlp"].replace(fused=True), model)


def test_threads_that_compile_share_no_cache_of_converted_weights() -> None:
    """Found by a trial that hung: one waited for the cache with Python's lock, one in the cache for
    that lock.
    """
    for compiles, count in ((True, 2), (True, 1), (False, 2)):
        job = ZOO["mlp"].replace(precision="bf16", compile=compiles)
        step = DP().prepare(job, World(devices=slots(count)))
        with step._precision.autocast():
            assert torch.is_autocast_cache_enabled() == (not compiles or count == 1)
