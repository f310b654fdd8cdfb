"""One example of each kind of job, shortened: under every strategy, resumed and exported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.jobfile import JobFile
from lockstep.strategies.pp import PP

EXAMPLES = Path(__file__).parents[2] / "examples"
RunOf = Callable[[str, str, int], lockstep.Run]
STRATEGIES = ["single", "dp", "ddp", "fsdp", "pp"]


@dataclass(frozen=True)
class Kind:
    """A small form of an example, and the even number of steps that it is trained for.

    ``bound`` is how far a strategy's losses may be from one device's, relatively. None: forward
    draws, and a strategy is only compared with itself.
    """

    file: str
    parameters: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    pp: Any = "pp"
    bound: float | None = 1e-9


KINDS = {
    "image classification": Kind(
        "cifar10_mobilenetv2.py",
        {"generated": True, "samples": 16, "image_size": 32, "dropout": 0.0, "lr": 0.01},
        {"batch_size": 8, "sync_batchnorm": True},
        steps=2,
        pp=PP(microbatches=1),  # BatchNorm normalizes a micro-batch
        bound=1e-5,  # fifty batch norms over few pixels make rounding grow
    ),
    "GPT": Kind(
        "char_lm.py",
        {
            "width": 16,
            "layers": 2,
            "heads": 2,
            "context": 40,
            "size": 12_000,
            "updates": 24,
            "lr": 0.02,
        },
    ),
    "contrast": Kind("contrastive.py", {}, {"batch_size": 64}),
    "word language model": Kind(
        "word_lm.py",
        {"vocabulary": 100, "columns": 8, "window": 8, "width": 16, "lr": 0.02},
    ),
    "diffusion": Kind("diffusion.py", {"width": 8}),
    "text classification": Kind(
        "text_classification.py",
        {"vocabulary": 100, "longest": 12, "width": 16, "dropout": 0.0, "updates": 24, "lr": 0.01},
    ),
    "VAE": Kind("vae.py", {"width": 16, "code": 2}, bound=None),
}
FAST = {
    *((kind, "single") for kind in KINDS if kind != "image classification"),
    ("VAE", "dp"),
    ("word language model", "ddp"),
    ("GPT", "fsdp"),
    ("word language model", "pp"),
}
CELLS = [
    pytest.param(kind, strategy, marks=() if (kind, strategy) in FAST else pytest.mark.slow)
    for kind in KINDS
    for strategy in STRATEGIES
]


@pytest.fixture(autouse=True, scope="module")
def _examples_import_their_neighbours() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        yield


def job_of(kind: str, steps: int) -> JobFile:
    of = KINDS[kind]
    settings = {**of.settings, "precision": "fp64", "steps": steps}
    return JobFile(str(EXAMPLES / of.file), of.parameters, settings)


def trained(kind: str, strategy: str, folder: Path, steps: int) -> lockstep.Run:
    return lockstep.train(
        job_of(kind, steps),
        strategy=KINDS[kind].pp if strategy == "pp" else strategy,
        devices="1xcpu" if strategy == "single" else "2xcpu",
        folder=folder,
        quiet=True,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """Runs of so many steps, each trained when it is first asked for."""
    runs: dict[tuple[str, str, int], lockstep.Run] = {}

    def run_of(kind: str, strategy: str, steps: int) -> lockstep.Run:
        key = kind, strategy, steps
        if key not in runs:
            runs[key] = trained(kind, strategy, tmp_path_factory.mktemp("whole"), steps)
        return runs[key]

    return run_of


def numbers(run: lockstep.Run) -> dict[str, float]:
    """The last losses and metrics of training and evaluation."""
    return {"train_loss": run.history[-1]["train_loss"], **run.metrics}


def pictures(run: lockstep.Run) -> list[bytes]:
    """What the job's sampler drew at the end, if it has one."""
    return [path.read_bytes() for path in sorted(run.folder.glob("samples/*.png"))][-1:]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "strategy"), CELLS)
def test_a_run_that_was_stopped_half_way_ends_where_one_device_does(
    kind: str, strategy: str, uninterrupted: RunOf, tmp_path: Path
) -> None:
    bound = KINDS[kind].bound
    steps = KINDS[kind].steps
    half = trained(kind, strategy, tmp_path, steps // 2)
    if bound:
        one_device = uninterrupted(kind, "single", steps // 2)
        assert numbers(half) == pytest.approx(numbers(one_device), rel=bound)
    run = lockstep.train(job_of(kind, steps), resume=half.folder, quiet=True)
    whole = uninterrupted(kind, "single" if bound else strategy, steps)
    assert run.summary["strategy"] == strategy and run.summary["steps"] == steps
    assert numbers(run) == pytest.approx(numbers(whole), rel=bound or 1e-9)
    assert pictures(run) == pictures(whole)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("image classification", marks=pytest.mark.slow),
        pytest.param("GPT", marks=pytest.mark.slow),
        "word language model",
        "diffusion",
        pytest.param("text classification", marks=pytest.mark.slow),
        "VAE",
    ],
)
def test_what_was_trained_is_exported(kind: str, uninterrupted: RunOf) -> None:
    run = uninterrupted(kind, "single", KINDS[kind].steps)
    for format in ("safetensors", "torch-export"):
        found = lockstep.export(run, format=format, quiet=True)
        assert found.difference < 1e-9, format
