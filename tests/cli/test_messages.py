"""What a person reads who has made a mistake: a line that says what was wrong, and what to do."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job
from lockstep.cli.command import main
from lockstep.errors import InputError, JobError, NonFiniteLoss, RunError, StrategyError, near_names
from zoo import ZOO, drawn, labels, mlp, plain_sgd

MLP = ZOO["mlp"]


def line(error: pytest.ExceptionInfo[Any]) -> str:
    said = str(error.value)
    assert "\n" not in said
    return said


# ---- the command ---------------------------------------------------------------------------------

JOB = """
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

class OnCuda(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        raise AssertionError("Torch not compiled with CUDA enabled")  # what .to("cuda") raises

class Elsewhere(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("here", torch.zeros(3))

x, y = torch.randn(20, 6), torch.arange(20) % 3
DATA = {
    "plain": TensorDataset(x, y),
    "three": [(x[i], x[i], y[i]) for i in range(20)],
    "tensors": TensorDataset(x, x, y),
    "none": [(x[i], None) for i in range(20)],
    "lost": lambda: torch.load("data/lost.pt"),
}

def job(lr: float = 0.1, data: str = "plain", model: str = ""):
    if data == "read":
        open("data/lost.txt")
    return lockstep.Job(
        model=OnCuda if model == "cuda" else lambda: nn.Linear(6, 3), loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=lr), train_data=DATA[data], batch_size=8)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_job.py").write_text(JOB)
    return tmp_path


SEVERAL = "for several inputs return ((a, b), targets), for model(a, b)"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--lr 0.2",
            "there is no option --lr here: for a parameter of the job's function write --set "
            "lr=VALUE",
        ),
        (
            "--strategy zero",
            'there is no strategy "zero": there are: single, dp, ddp, fsdp, mp, pp, hogwild, '
            "ddp=2xpp=2, ",
        ),
        ("--strategy ddp2xpp2", 'there is no strategy "ddp2xpp2": did you mean "ddp=2xpp=2"?'),
        ("--strategy dpd", 'there is no strategy "dpd": did you mean "dp"'),
        ("--devices -1", "-1 devices: ask for at least one, or for auto"),
        ("--set lr=abc", "--set lr: 'abc' is not a number"),
        (
            "--set data=three",
            f"a sample is tuple(float32(6,), float32(6,), int64()), (inputs, targets) is expected; {SEVERAL}",
        ),
        (
            "--set data=tensors",
            "its TensorDataset has 3 tensors, (inputs, targets) is expected; for several",
        ),
        (
            "--set data=none",
            "train_data: the targets of a sample are None: return a number (0, say) if the loss",
        ),
        (
            "--set model=cuda",
            "; build models and data on the CPU, without .cuda() and .to(...): Lockstep moves them",
        ),
        (
            "--set data=lost",
            "'data/lost.pt' (a_job.py, line 22); relative paths are taken from {here}, where",
        ),
        (
            "--set data=read",
            "'data/lost.txt' (a_job.py, line 27); relative paths are taken from {here}, where",
        ),
    ],
)
def test_a_command_that_can_t_be_done(
    words: str, says: str, job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "a_job.py", *words.split()]) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert says.format(here=job) in said
    assert not list(job.glob("runs/*"))


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("singel", ["single"]),
        ("fsdp", ["dp"]),
        ("dddp", ["ddp"]),
        ("dpp", ["pp"]),
        ("tensor", []),
        ("hog", ["hogwild"]),
    ],
)
def test_a_name_is_offered_only_where_it_is_near(word: str, near: list[str]) -> None:
    assert near_names(word, ["single", "dp", "ddp", "mp", "pp", "hogwild"]) == near


# ---- models --------------------------------------------------------------------------------------


def test_a_model_in_shared_memory_is_not_copied_to_ranks_without_a_word() -> None:
    model = mlp().share_memory()
    with pytest.raises(
        InputError, match=r"args\[0\] holds a model in shared memory, .* strategy=\"hogwild\""
    ) as caught:
        lockstep.launch(lambda world, model: None, devices="2xcpu", args=(model,))
    line(caught)
    with pytest.raises(InputError, match="the function holds a model in shared memory"):
        lockstep.launch(lambda world: model(drawn(2, 6)), devices="2xcpu")
    lockstep.launch(lambda world, model: model(drawn(2, 6)), devices="2xcpu", args=(mlp(),))


def test_a_model_that_was_put_on_another_device_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    model = mlp()
    monkeypatch.setattr(
        "lockstep.model.build.tensors_of",
        lambda model: [("2.weight", torch.ones(1).as_subclass(Elsewhere))],
    )
    job = dataclasses.replace(MLP, model=lambda: model)
    with pytest.raises(
        JobError, match=r'"2.weight" was put on cuda:0, and it is to train on cpu:0: build'
    ) as caught:
        lockstep.train(job, devices="1xcpu", folder=tmp_path, quiet=True)
    line(caught)


def test_a_model_that_is_distributed_already_is_refused_by_its_wrapper(tmp_path: Path) -> None:
    says = (
        "model: %s is wrapped in %s already: give its .module, since Lockstep distributes the model"
    )
    whole, part = says % ("it", "DataParallel"), says % ('"0"', "DataParallel")
    settings: dict[str, Any] = {"folder": tmp_path, "quiet": True}
    for model, what in (
        (lambda: nn.DataParallel(mlp()), whole),
        (lambda: nn.Sequential(nn.DataParallel(mlp())), part),
    ):
        with pytest.raises(JobError) as caught:
            lockstep.train(dataclasses.replace(MLP, model=model), devices="1xcpu", **settings)
        assert line(caught) == what
    job = dataclasses.replace(MLP, model=lambda: nn.parallel.DistributedDataParallel(mlp()))
    with pytest.raises(JobError, match=f"^{says % ('it', 'DistributedDataParallel')}$"):
        lockstep.train(job, strategy="ddp", devices="2xcpu", **settings)
    with pytest.raises(
        JobError, match=r"Lockstep distributes the model: leave DistributedDataParallel out$"
    ):
        lockstep.train(job, devices="1xcpu", **settings)
    with pytest.raises(JobError, match=f"^{whole}$"):
        lockstep.parallelize(
            nn.DataParallel(mlp()), nn.CrossEntropyLoss(), plain_sgd, devices="1xcpu"
        )


# ---- a loss that is not finite -------------------------------------------------------------------

NAN = float("nan")


def failing(
    model: Callable[[], nn.Module] = mlp,
    inputs: torch.Tensor | None = None,
    targets: Any = None,
    loss: Any = None,
    lr: float = 0.1,
) -> Job:
    inputs = drawn(24, 6) if inputs is None else inputs
    targets = labels(24, 3) if targets is None else targets
    return Job(
        model=model,
        loss=loss or nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=lr),
        batch_size=8,
        train_data=TensorDataset(inputs, targets),
        shuffle=False,
        epochs=4,
    )


def nan_weights() -> nn.Module:
    model = mlp()
    model[2].weight.data[0, 0] = NAN
    return model


class Overflowing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / x.new_zeros(3)


def nan_at(row: int) -> torch.Tensor:
    inputs = drawn(24, 6)
    inputs[row, 2] = NAN
    return inputs


def masked(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    kept = targets != -1
    return nn.functional.cross_entropy(outputs[kept], targets[kept])


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def known(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = ~targets.isnan()
    return torch.where(kept, (outputs - targets).square(), 0.0).sum(), kept.sum()


NOT_FINITE = {
    "inputs": (
        failing(inputs=nan_at(13)),
        "nan at step 2 on",
        "the inputs of sample 13 have NaN: clean the data",
    ),
    "weights": (
        failing(nan_weights),
        "nan at step 1 on",
        'parameter "2.weight" is not finite before the first update',
    ),
    "forward": (
        failing(Overflowing),
        "at step 1 on",
        "the model's outputs are not: does its forward divide by 0",
    ),
    "masked": (
        failing(targets=torch.full((24,), -1), loss=masked),
        "nan at step 1 on",
        "the loss itself divides by 0",
    ),
    "targets": (
        failing(targets=nan_at(9)[:, :3], loss=squared),
        "nan at step 2 on",
        "the targets of sample 9 have NaN",
    ),
    "missing targets": (
        failing(targets=torch.tensor([[NAN, 0.0, 1.0]]).repeat(24, 1), loss=known),
        "nan at step 2 on",
        "have NaN: a loss that masks NaN by torch.where, or by a factor of 0, still has NaN gradients",
    ),
    "rate": (
        failing(loss=squared, targets=drawn(24, 3), lr=1e30),
        "at step",
        "try a smaller learning rate, or clip_norm",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["single", "dp", "ddp"])
@pytest.mark.parametrize("kind", NOT_FINITE)
def test_a_loss_that_is_not_finite_is_traced_to_what_was_not_first(
    kind: str, way: str, tmp_path: Path
) -> None:
    job, where, why = NOT_FINITE[kind]
    devices = "1xcpu" if way == "single" else "2xcpu"
    with pytest.raises(
        NonFiniteLoss, match=f"the loss became .*{re.escape(where)}.*{re.escape(why)}"
    ) as caught:
        lockstep.train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    assert ("learning rate" in line(caught)) == (kind == "rate")


def test_frozen_parameters_do_not_hinder_an_optimizer_over_all() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    step = lockstep.parallelize(
        model, nn.CrossEntropyLoss(), plain_sgd(model.parameters()), devices="1xcpu"
    )
    assert step(drawn(8, 6), labels(8, 3)).loss > 0


# ---- errors of autograd --------------------------------------------------------------------------


class Writing(nn.Linear):
    """Writes, keeps or raises what ``how`` says."""

    kept: torch.Tensor | None = None

    def __init__(self, how: str) -> None:
        super().__init__(6, 3)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).sigmoid()
        if self.how == "writes":
            y += 1
        if self.how == "keeps":
            y = y if self.kept is None else y + self.kept.sum()
            self.kept = y
        if self.how == "asserts":
            raise RuntimeError("CUDA error: device-side assert triggered")
        return y


def wrong_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    values = outputs.exp()
    mean = values.log().mean()
    values.mul_(2)
    return mean


WRONG_UPDATES = {
    "own code": (
        lambda: nn.Sequential(Writing("writes")),
        r'^model: layer "0" \(Writing\) writes in place to a tensor of shape \(\d, 3\) that '
        r"backward needs \(test_messages\.py, line \d+\): write y = y \+ 1",
    ),
    "inplace=True": (
        lambda: nn.Sequential(nn.Linear(6, 3), nn.Sigmoid(), nn.ReLU(inplace=True)),
        r'^model: layer "2" \(ReLU\) writes in place .* backward needs: write .* inplace=False$',
    ),
    "loss": (mlp, r"^the loss writes in place .* \(test_messages\.py, line \d+\)"),
    "state": (lambda: Writing("keeps"), r"^step 2: what the model .*: keep state\.detach\(\)$"),
    "assert": (lambda: Writing("asserts"), r"^step 1: an index is out of range .* a target that"),
    "indices": (
        lambda: nn.Sequential(nn.Identity(), nn.Embedding(2, 3)),
        r'layer "1" \(Embedding\), given .*; numbers below num_embeddings=2 are expected$',
    ),
}


@pytest.mark.parametrize("kind", WRONG_UPDATES)
def test_what_autograd_or_a_kernel_refuses_is_said_in_terms_of_the_model(
    kind: str, tmp_path: Path
) -> None:
    model, says = WRONG_UPDATES[kind]
    inputs = labels(24, 6) if kind == "indices" else drawn(24, 6)
    job = failing(model, inputs, loss=wrong_loss if kind == "loss" else None)
    ways = ["single"] if kind in ("state", "assert", "indices") else ["single", "dp"]
    for way in ways:
        devices = "1xcpu" if way == "single" else "2xcpu"
        with pytest.raises((JobError, RunError), match=says) as caught:
            lockstep.train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
        line(caught)


# ---- evaluation ----------------------------------------------------------------------------------


def raising(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    return {}["nothing"]


@pytest.mark.parametrize("way", [("single", "1xcpu"), ("ddp", "2xcpu")])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"eval_data": ["test"] * 4},
            r"eval_data: a sample is str, \(inputs, targets\) is expected",
        ),
        (
            {"metrics": {"acc": raising}},
            r'metrics: "acc" raised KeyError: .nothing. \(test_messages.py, line \d+\)',
        ),
        (
            {"eval_data": TensorDataset(drawn(8, 6), labels(8, 3) + 9)},
            r"^loss CrossEntropyLoss can't take .*: target \d+ is not one of the classes.*"
            r"\(in an evaluation of eval_data, tried before the first update\)$",
        ),
        (
            {"eval_data": {"clean": TensorDataset(drawn(8, 5), labels(8, 3))}},
            r'^model: layer "0" \(Linear\), given \(\d, 5\).*in an evaluation of eval_data\["clean"\]',
        ),
    ],
)
def test_what_is_wrong_with_an_evaluation_is_found_before_the_first_step(
    wrong: Any, says: str, way: Any, tmp_path: Path
):
    """Found by trial: it was found after the first epoch, which was lost."""
    job = (
        MLP.replace(eval_data=TensorDataset(drawn(8, 6), labels(8, 3)), **wrong)
        if "metrics" in wrong
        else None
    )
    steps: list[int] = []
    job = (job or MLP.replace(**wrong)).replace(on_event=[lambda event: steps.append(event.step)])
    with pytest.raises(InputError, match=says):
        lockstep.train(job, strategy=way[0], devices=way[1], folder=tmp_path, quiet=True)
    assert not any(steps)
    assert not list(tmp_path.iterdir())


def test_metrics_without_evaluation_data_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {
        "right": lambda outputs, targets: ((outputs.argmax(1) == targets).sum(), len(targets))
    }
    lockstep.train(
        MLP.replace(metrics=metrics, eval_data=None, epochs=1), devices="1xcpu", folder=tmp_path
    )
    assert (
        "note: metrics are computed on eval_data, and the job has none" in capsys.readouterr().out
    )


class Noisy(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + torch.randn(len(inputs), 3)


class Centred(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs - inputs.mean(dim=0))


class Detector(nn.Module):
    """Gives a dictionary for each image, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, images: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        return [{"scores": self.layer(image["boxes"])} for image in images]


@pytest.mark.parametrize("way", ["single", "dp"])
def test_a_metric_over_the_boxes_of_images_counts_each_image_once(way: str, tmp_path: Path) -> None:
    data = [
        ({"boxes": torch.ones(1 + i % 3, 6)}, torch.zeros(1 + i % 3, dtype=torch.long))
        for i in range(12)
    ]

    def loss(outputs: Any, targets: Any) -> tuple[torch.Tensor, int]:
        scores = torch.cat([image["scores"] for image in outputs])
        return F.cross_entropy(scores, torch.cat(targets), reduction="sum"), len(scores)

    job = lockstep.Job(
        model=Detector,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        train_data=data,
        eval_data=data,
        metrics={"boxes": lambda outputs, targets: (sum(len(t) for t in targets), len(outputs))},
        collate=lambda samples: (
            ([image for image, _ in samples],),
            [labels for _, labels in samples],
        ),
        batch_size=6,
    )
    run = lockstep.train(
        job, strategy=way, devices="2xcpu" if way == "dp" else "1xcpu", folder=tmp_path
    )
    assert run.metrics["boxes"] == 2


@pytest.mark.parametrize("model", [Noisy, Centred])
def test_what_depends_on_the_devices_is_said_of_evaluations(
    model: Any, tmp_path: Path, capsys: Any
) -> None:
    data = TensorDataset(drawn(8, 6), labels(8, 3))
    job = MLP.replace(model=lambda: model(6, 3), eval_data=data, epochs=1)
    run = lockstep.train(job, devices="1xcpu", folder=tmp_path, quiet=True)
    capsys.readouterr()
    lockstep.evaluate(run, strategy="single", devices="1xcpu")
    assert "note:" not in capsys.readouterr().out
    if model is Centred:
        said = r"in batch 1 of an evaluation, .* influence one another in the model \(Centred\)"
        with pytest.raises(StrategyError, match=said):
            lockstep.evaluate(run, strategy="dp", devices="2xcpu")
    else:
        lockstep.evaluate(run, strategy="dp", devices="2xcpu")
        assert "draws random numbers in evaluation" in capsys.readouterr().out


# ---- a scheduler, an optimizer, a layer ----------------------------------------------------------


def one_cycle(length: int) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=length
    )


def halves() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 3).double())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {
                "lr_scheduler": lambda _: torch.optim.lr_scheduler.StepLR(
                    plain_sgd(mlp().named_parameters()), 1
                )
            },
            "lr_scheduler: the scheduler has another optimizer",
        ),
        (
            {"lr_scheduler": one_cycle(3), "lr_scheduler_every": "step"},
            r"lr_scheduler: OneCycleLR has total_steps=3, but \d+ steps are due: set total_steps=\d+",
        ),
        (
            {"optimizer": lambda _: plain_sgd(mlp().named_parameters())},
            "optimizer: it has parameters that aren't the model's: make it from the parameters "
            "that are passed",
        ),
        (
            {"model": lambda: nn.Sequential(nn.LazyLinear(3))},
            r'model: "0\.weight" is lazy and has no shape yet: call the model once where it is built',
        ),
        (
            {"model": lambda: nn.Sequential(nn.Linear(5, 3))},
            r'model: layer "0" \(Linear\), given \(\d+, 6\) torch.float32: mat1 and mat2 shapes cannot be multiplied',
        ),
        (
            {"train_data": TensorDataset(drawn(8, 6).double(), labels(8, 3))},
            r'layer "0" \(Linear\), given .* torch.float64: .*; its parameters are torch.float32',
        ),
        (
            {
                "model": halves,
                "train_data": TensorDataset(labels(8, 4), labels(8, 3)),
                "eval_data": None,
            },
            r'layer "1" \(Linear\), .*; its parameters are torch.float64',
        ),
        (
            {"train_data": (drawn(8, 6), labels(8, 3))},
            r"combine tensors of inputs and targets by TensorDataset\(inputs, targets\)",
        ),
    ],
)
def test_what_is_wrong_with_a_part_of_the_job_is_said_in_a_line(
    settings: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=says) as error:
        lockstep.train(MLP.replace(**settings), devices="1xcpu", folder=tmp_path, quiet=True)
    line(error)


@pytest.mark.parametrize("job", [MLP, "a_job.py"])
@pytest.mark.parametrize(
    ("name", "meant"), [("stratgy", "strategy"), ("batchsize", "batch_size"), ("device", "devices")]
)
def test_a_keyword_of_train_that_there_is_not_is_answered_with_the_nearest(
    job: Any, name: str, meant: str
) -> None:
    with pytest.raises(JobError) as caught:
        lockstep.train(job, **{name: 2})
    assert line(caught) == f'{name}: there is no such setting; did you mean "{meant}"?'


def test_a_parameter_of_the_job_as_a_keyword_of_train_is_answered_with_set() -> None:
    with pytest.raises(JobError, match=r'lr: there is no such setting; for .* give set={"lr": '):
        lockstep.train("a_job.py", lr=0.1)


@pytest.mark.parametrize("field", ["optimizer", "lr_scheduler"])
def test_an_object_in_the_place_of_a_function_is_answered_with_a_function(field: str) -> None:
    made = plain_sgd(mlp().named_parameters())
    if field == "lr_scheduler":
        made = torch.optim.lr_scheduler.StepLR(made, 10)
    kind = type(made).__name__
    says = f"^{field}: a function is expected, not {kind}: write lambda "
    with pytest.raises(JobError, match=says) as caught:
        MLP.replace(**{field: made})
    line(caught)


@pytest.mark.parametrize("command", ["evaluate", "predict", "checkpoints", "report"])
def test_a_run_that_is_not_there_is_answered_with_the_newest(
    command: str, job: Path, capfd: Any
) -> None:
    (job / "runs" / "one").mkdir(parents=True)
    (job / "runs" / "one" / "config.json").write_text("{}")
    assert main([command, "runs/none"]) == 2
    said = (
        "runs/none: no run is kept there (there is no such folder): the newest run in runs is one"
    )
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("given", [mlp(), Job])
def test_what_is_no_job_is_said(given: Any) -> None:
    with pytest.raises(
        JobError, match="a Job, a function that returns one, or a job file is expected, not"
    ):
        lockstep.train(given)


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (
            "import sys; sys.exit(0)",
            "",
            "it called sys.exit when it was imported (SystemExit: 0 (a_job.py, line 1)): put",
        ),
        (
            JOB,
            "--set batch_size=3",
            "--set batch_size: this is a setting of every job: give --batch-size 3",
        ),
    ],
)
def test_a_job_file_that_can_t_be_read(
    text: str, words: str, says: str, job: Path, capfd: Any
) -> None:
    (job / "a_job.py").write_text(text)
    assert main(["train", "a_job.py", *words.split()]) == 2
    assert says in capfd.readouterr().err
