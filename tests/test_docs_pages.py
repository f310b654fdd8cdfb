"""The pages of docs/ and the README: each block prints what is shown."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep
from docs_pages import ROOT, Piece, blocks, difference, pieces, printed

DOCS = ROOT / "docs"
ELSEWHERE = {DOCS / "callbacks.md", DOCS / "clusters.md"}  # their blocks are run by tests of theirs


def each(*of: Piece) -> list[Any]:
    """A parameter for each piece; the slow ones are marked."""
    found = []
    for number, piece in enumerate(of):
        name = f"{piece.heading} {number}".replace("`", "")
        marks = [pytest.mark.slow] if "slow" in piece.block.said else []
        if "--format onnx" in piece.block.text and importlib.util.find_spec("onnxruntime") is None:
            marks.append(pytest.mark.skip(reason="onnxruntime isn't installed"))
        found.append(pytest.param(piece, id=name, marks=marks))
    return found


@pytest.mark.parametrize("piece", each(*pieces(ROOT / "README.md", ("console",))))
def test_the_readme_prints_what_it_shows(
    piece: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _holds(piece, tmp_path, monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "piece",
    each(
        *(
            piece
            for page in sorted({*DOCS.rglob("*.md")} - ELSEWHERE)
            for piece in pieces(page)
            if not piece.block.is_part
        )
    ),
)
def test_the_pages_print_what_they_show(
    piece: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _holds(piece, tmp_path, monkeypatch)


def _holds(piece: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = printed(piece)
    shape = "shape" in piece.block.said
    shown = (
        [piece.shown] if piece.output is not None else [lines for _, lines in piece.block.commands]
    )
    for wanted, got in zip(shown, found, strict=True):
        assert not (said := difference(wanted, got, shape=shape)), said


# ---- parts of scripts ----------------------------------------------------------------------------


def parts(page: str) -> list[str]:
    return [block.text for block in blocks(ROOT / page) if block.is_part]


def run(text: str, names: dict[str, Any]) -> None:
    exec(compile(text, "a part of a page", "exec"), names)


def few(*shape: int) -> torch.Tensor:
    return torch.randn(64, *shape, generator=torch.Generator().manual_seed(0))


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named)


JOB_FILE = """
import torch, lockstep


def job(lr=0.1):
    return lockstep.Job(
        model=lambda: torch.nn.Linear(4, 3),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda named: torch.optim.SGD(named, lr=lr),
        train_data=torch.utils.data.TensorDataset(torch.ones(64, 4), torch.arange(64) % 3),
        batch_size=16,
    )
"""


def a_job(**fields: Any) -> lockstep.Job:
    labels = torch.arange(64) % 3
    usual = {
        "model": lambda: nn.Sequential(
            OrderedDict(stem=nn.Linear(4, 8), act=nn.ReLU(), head=nn.Linear(8, 3))
        ),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "train_data": TensorDataset(few(4), labels),
        "batch_size": 16,
    }
    return lockstep.Job(**{**usual, **fields})


def test_the_parts_of_the_page_on_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = iter(parts("docs/jobs.md"))
    whole, groups, warming, named_parts, counted = itertools.islice(texts, 5)
    contrast, several, orders, padded, bucketed = texts
    usual = a_job()
    names: dict[str, Any] = {"lockstep": lockstep, "torch": torch, "nn": nn, "F": functional}
    names |= {"CosineAnnealingLR": torch.optim.lr_scheduler.CosineAnnealingLR, "adam": adam}
    names |= {"LambdaLR": torch.optim.lr_scheduler.LambdaLR, "math": math}

    def trains(job: lockstep.Job, **settings: Any) -> None:
        how = {"steps": 1, "devices": "1xcpu", "quiet": True, **settings}
        assert lockstep.train(job, **how).summary["steps"] == 1

    names |= {"build_model": usual.model, "accuracy": lambda o, t: (o.sum(), len(t))}
    names |= {"train_set": usual.train_data, "eval_set": usual.train_data}
    run(whole, names)
    trains(names["job"](), batch_size=32)
    run(groups, names)
    trains(usual.replace(optimizer=names["adamw"]))
    run(warming, names)
    trains(names["job"](), batch_size=32)

    run(named_parts, names)
    outputs = SimpleNamespace(drawn=few(4), mean=few(2), log_variance=few(2))
    assert set(names["loss"](outputs, few(4)).parts) == {"error", "kl"}

    run(counted, names)
    one, three = (several_means(names, devices) for devices in ("1xcpu", "3xcpu"))
    assert one == pytest.approx(three, rel=1e-6)

    class Towers(nn.Linear):
        def forward(self, image: Any, text: Any) -> Any:
            return super().forward(image), super().forward(text)

    pairs = [((image, text), 0) for image, text in zip(few(4), few(4), strict=True)]
    names |= {"Towers": lambda: Towers(4, 2), "pairs": pairs}
    run(contrast, names)
    trains(names["job"])

    drawing = {"Generator": lambda: nn.Linear(2, 4), "Discriminator": lambda: nn.Linear(4, 1)}
    names |= drawing | {"digits": TensorDataset(few(4), few(2))}
    names["judged"] = lambda models, real, drawn: models["discriminator"](real - drawn).sum()
    names["fooled"] = lambda models, drawn: models["discriminator"](drawn).sum()
    run(several, names)
    trains(names["job"])

    names["weights"] = torch.ones(4)
    run(orders, names)
    assert len(names["order"](0)) == 10_000
    names["PADDING"] = 0
    run(padded, names)
    total, count = names["loss"](few(5, 7), torch.arange(320).view(64, 5) % 7)
    assert total > 0 and count < 320

    names["lengths"] = torch.arange(1, 65)
    run(bucketed, names)
    assert sorted(number for batch in names["buckets"](0) for number in batch) == [*range(64)]
    trains(usual.replace(batches=names["buckets"], cut_by=names["lengths"]))


def several_means(names: dict[str, Any], devices: str) -> float:
    """The loss of the first update, by the counts and the loss of the page."""
    torch.manual_seed(0)
    inputs, kinds = few(8), torch.arange(64) % 3
    sizes = torch.where(kinds == 0, inputs[:, 0] + 1, -1.0)
    settings = {"devices": devices, "counts": names["counts"]}
    step = lockstep.parallelize(nn.Linear(8, 4), names["loss"], adam, **settings)
    return step(inputs, (sizes, kinds)).loss


@pytest.mark.slow
def test_the_parts_of_the_page_on_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    first, accumulation = parts("docs/python.md")
    Path("job.py").write_text(JOB_FILE)
    run_folder = lockstep.train("job.py", devices="1xcpu", quiet=True).folder
    run_folder.rename(run_folder.parent / "digits-ddp-20261121-093000")
    model, dataset = nn.Linear(4, 3), a_job().train_data
    names = {"lockstep": lockstep, "job": a_job(), "new_images": few(4), "model": model}
    names |= {"loss": nn.CrossEntropyLoss(), "dataset": dataset}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    run(first.replace("devices=2", 'devices="2xcpu"'), names)
    names["document"] = [SimpleNamespace(inputs=few(4), targets=torch.arange(64) % 3)] * 2
    run(accumulation, names)
    run(parts("README.md")[0].replace("devices=2", 'devices="2xcpu"'), names)


@pytest.mark.slow
def test_the_part_of_the_page_on_verify_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"lockstep": lockstep, "job": a_job()}
    run(parts("docs/verify.md")[0], names)
    names["test_ddp_trains_my_model_as_one_device_does"]()


def test_every_part_of_a_script_is_run_by_a_test() -> None:
    pages = [page.name for page in DOCS.rglob("*.md") if any(b.is_part for b in blocks(page))]
    assert sorted(pages) == ["callbacks.md", "jobs.md", "python.md", "verify.md"]


# ---- what may differ -----------------------------------------------------------------------------

SHOWN = ["epoch   1  loss 0.5012  accuracy 0.9000  1,234 samples/s", "...", "inputs 30 x 8", "done"]
GOT = [
    "epoch 1  loss 0.5013  accuracy 0.9000  99 samples/s",
    "note: a",
    "note: b",
    "epoch 1/2  step 3/90  train loss 0.7000  99 samples/s  0:10 left",
    "inputs 30 x 8",
    "done",
]


def test_what_may_differ_is_not_held_against_a_page() -> None:
    assert difference(SHOWN, GOT) == ""
    assert (
        difference(
            ["a 12 MiB", "Take ddp: 1.9", "times it"], ["a 1.5 GiB", "", "Take dp: 1"], shape=True
        )
        == ""
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0.5013", "0.5213"),
        ("30 x 8", "30 x 9"),
        ("done", "failed"),
        ("0.9000", "0.9000  more"),
        ("epoch 1", "epoch 2"),
    ],
)
def test_what_may_not_differ_is(before: str, after: str) -> None:
    got = [line.replace(before, after) for line in GOT]
    assert got != GOT and difference(SHOWN, got)
    assert (
        difference(SHOWN, GOT[:-1])
        and difference(SHOWN[:1], GOT)
        and difference(SHOWN, [*GOT, "and more"])
    )


def test_a_shape_is_held_to_its_words_and_rows() -> None:
    assert difference(["ddp 1.8 2 x 391 MiB"], ["ddp 1.2 1.1 GiB"], shape=True)
    assert difference(["dp 1", "ddp 2"], ["dp 1"], shape=True)
    assert difference(["...", "dp 1", "ddp 2", "..."], ["a", "dp 1", "mp 3", "b"], shape=True)
    assert not difference(["1,450, 1,700"], ["26.3, 12"], shape=True)
    assert not difference(
        ["...", "3 turns of 2 s", "each", "..."], ["a", "2 turns", "of 0.1 s each", "b"], shape=True
    )
