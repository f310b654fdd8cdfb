"""The jobs of examples/, run as a person runs them, on data small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lockstep import Run
from lockstep.cli.command import main
from lockstep.jobfile import JobFile, loaded

from harness import differences  # isort: skip

EXAMPLES = Path(__file__).parents[2] / "examples"
CIFAR = str(EXAMPLES / "cifar10_mobilenetv2.py")
GPT2 = str(EXAMPLES / "huggingface.py")
PER_FILE = 8
WAYS = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu"}


def pixels(image: int) -> bytes:
    """Bytes that tell the image, the channel, the row and the column."""
    return bytes(
        (image * 7 + channel * 85 + row * 3 + column) % 256
        for channel in range(3)
        for row in range(32)
        for column in range(32)
    )


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The six files with 8 images each; image i has label i % 10. Runs go to a folder beside."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for f, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        images = range(f * PER_FILE, (f + 1) * PER_FILE)
        (folder / name).write_bytes(b"".join(bytes([i % 10]) + pixels(i) for i in images))
    return folder


def train_cifar(way: str, *knobs: str) -> int:
    sets = [word for parameter in knobs for word in ("--set", parameter)]
    return main(
        ["train", CIFAR, "--strategy", way, "--devices", WAYS[way], "--batch-size", "32", *sets]
    )


@pytest.mark.parametrize("inside", [True, False], ids=["the folder itself", "the folder above"])
def test_the_binary_files_are_read_to_the_pixel(cifar: Path, inside: bool) -> None:
    job = JobFile(CIFAR, {"data": str(cifar if inside else cifar.parent)}).load()
    images, labels = job.train_data().tensors
    assert images.shape == (5 * PER_FILE, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.tolist() == [i % 10 for i in range(5 * PER_FILE)]
    for i in (0, 7, 8, 39):
        assert bytes(images[i].flatten().tolist()) == pixels(i)
    held_out, their_labels = job.eval_data().tensors
    assert their_labels.tolist() == [i % 10 for i in range(40, 48)]
    assert held_out[3, 2, 31, 30] == pixels(43)[2 * 1024 + 31 * 32 + 30]


def test_images_are_standardised_and_enlarged_by_the_first_layer() -> None:
    first = JobFile(CIFAR).load().model()[0].double()
    image = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    mean = torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64).view(3, 1, 1)
    deviation = torch.tensor([0.2470, 0.2435, 0.2616], dtype=torch.float64).view(3, 1, 1)
    expected = torch.nn.functional.interpolate(
        (image / 255.0 - mean) / deviation, (112, 112), mode="bilinear"
    )
    found = first(image)
    assert found.shape == (2, 3, 112, 112) and found.dtype == torch.float64
    assert (found - expected).abs().max() < 1e-5, "mean and deviation are kept in float32"


@pytest.mark.parametrize(
    "way", ["single", *(pytest.param(way, marks=pytest.mark.slow) for way in ("dp", "ddp"))]
)
def test_mobilenet_trains_on_the_binary_files(way: str, cifar: Path) -> None:
    assert train_cifar(way, f"data={cifar}", "image_size=32", "epochs=2", "lr=0.01") == 0
    (folder,) = (cifar.parents[1] / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["train_samples"], summary["eval_samples"], summary["steps"]) == (40, 8, 4)
    assert (
        summary["seconds"] > 0
        and min(summary["peak_memory_bytes"]) > 0
        and 0 <= summary["metrics"]["accuracy"] <= 1
    )
    rates = [record["lr"] for record in Run.open(folder).history]
    assert rates == pytest.approx([0.01, 0.005]), "cosine annealing by epoch"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_stand_in_of_the_same_shape_is_for_timing_and_says_so(
    way: str, tmp_path, monkeypatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_cifar(way, "generated=true", "samples=32", "image_size=32", "epochs=1") == 0
    said = capfd.readouterr().out
    assert said.count("generated noise in the place of CIFAR-10") == 1
    assert (
        "batches of 32 = 16 + 16 over the devices\n32 samples" in said
        and "6 for evaluation" in said
    )


def truncate(folder: Path) -> None:
    path = folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])


def empty(folder: Path) -> None:
    (folder / "test_batch.bin").write_bytes(b"")


def take_away(folder: Path) -> None:
    (folder / "data_batch_5.bin").unlink()


def mislabel(folder: Path) -> None:
    (folder / "data_batch_2.bin").write_bytes(b"\x0b" + pixels(0))


@pytest.mark.parametrize("way", ["single", "ddp"])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (take_away, "there is no data_batch_5.bin in "),
        (truncate, "data_batch_3.bin has 24,583 bytes, no whole number of images of 3,073"),
        (empty, "test_batch.bin has 0 bytes"),
        (mislabel, "data_batch_2.bin has a label 11, where 0 to 9 are expected"),
    ],
)
def test_files_that_are_not_right_get_one_line_and_nothing_is_made(
    spoil, says: str, way: str, cifar, capfd
) -> None:
    spoil(cifar)
    assert train_cifar(way, f"data={cifar}") == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("lockstep: data: ") and says in lines[0]
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in lines[0]
    assert not list(cifar.parents[1].glob("runs/*"))


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ("data=nowhere", "there is no data_batch_1.bin in nowhere"),
        ("data=", "say where CIFAR-10 is, --set data=FOLDER"),
        ("image_size=16", "image_size: 16 is smaller than the images"),
        ("samples=4", "samples: 4 is too small"),
    ],
)
def test_wrong_parameters_get_one_line(
    parameter: str, says: str, tmp_path, monkeypatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_cifar("single", parameter) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and says in lines[0], lines


@pytest.mark.slow
def test_the_model_of_a_run_needs_no_images(cifar: Path) -> None:
    assert train_cifar("single", f"data={cifar}", "image_size=32", "epochs=1") == 0
    (folder,) = (cifar.parents[1] / "runs").iterdir()
    images = loaded(CIFAR).cifar10(str(cifar), ["test_batch.bin"]).tensors[0]
    for file in cifar.iterdir():
        file.unlink()
    assert Run.open(folder).model()(images).shape == (8, 10)


@pytest.mark.slow
def test_a_model_of_hugging_face_has_one_devices_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    knobs = {"width": "16", "layers": "1"}
    words = [
        "--precision",
        "fp64",
        "--steps",
        "3",
        *(w for k, v in knobs.items() for w in ("--set", f"{k}={v}")),
    ]
    runs = {}
    for way, devices in WAYS.items():
        command = ["train", GPT2, "--strategy", way, "--devices", devices, "--folder", way, *words]
        if way == "single":
            # GPT-2 computes its own loss in float32. In two micro-batches backward begins with
            # total / n, as it does under dp and ddp, so that rounding is the same.
            command += ["--accumulate", "2"]
        assert main(command) == 0
        runs[way] = Run.open(next(Path(way).iterdir()))
    job = JobFile(GPT2, knobs).load()
    for way in ("dp", "ddp"):
        found = differences(job, runs[way], runs["single"])
        assert found.worst < 1e-10, str(found)
        assert found.history["accuracy"] == 0.0 and found.moved["transformer.wte.weight"]
