"""examples/resnet50_split.py and examples/unet.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.cli.command import main
from lockstep.jobfile import JobFile, loaded
from lockstep.pipelining.device_map import stage_of

EXAMPLES = Path(__file__).parents[2] / "examples"
RESNET = str(EXAMPLES / "resnet50_split.py")
UNET = str(EXAMPLES / "unet.py")


def test_the_network_is_the_known_one() -> None:
    model = JobFile(RESNET, {"classes": 1000, "generated": True}).load().model()
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert model.layer3[0].conv2.stride == (2, 2) and model.layer4[2].conv3.weight.shape == (
        2048,
        512,
        1,
        1,
    )
    assert model.eval()(torch.zeros(1, 3, 64, 64, dtype=torch.uint8)).shape == (1, 1000)


def test_stem_and_first_two_groups_are_on_one_device_and_the_rest_on_the_other() -> None:
    file = loaded(RESNET)
    stage = stage_of(JobFile(RESNET, {"generated": True}).load().model(), file.TWO_DEVICES, 2)
    assert {
        stage[f"{name}.weight"] for name in ("conv1", "bn1", "layer1.0.conv1", "layer2.3.conv3")
    } == {0}
    assert {stage[f"{name}.weight"] for name in ("layer3.0.conv1", "layer4.2.bn3", "fc")} == {1}


@pytest.mark.slow
def test_the_split_resnet_trains_under_single(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    knobs = [word for parameter in ("samples=12", "image_size=32") for word in ("--set", parameter)]
    words = [
        "train",
        RESNET,
        "--strategy",
        "single",
        "--devices",
        "1xcpu",
        "--batch-size",
        "6",
        "--steps",
        "2",
        *knobs,
    ]
    assert main(words) == 0
    assert "generated noise in the place of images" in capsys.readouterr().out


def test_images_come_from_a_file_of_tensors(tmp_path: Path) -> None:
    images, labels = torch.randint(256, (6, 3, 40, 40), dtype=torch.uint8), torch.arange(6)
    torch.save({"images": images, "labels": labels}, tmp_path / "six.pt")
    data = JobFile(RESNET, {"data": str(tmp_path / "six.pt")}).load().train_data()
    assert len(data) == 6 and torch.equal(data[2][0], images[2]) and int(data[2][1]) == 2


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ("generated=false", "data: say a file of images, --set data=FILE.pt"),
        ("data=nowhere.pt", "there is no file nowhere.pt"),
    ],
)
def test_images_that_are_not_there_get_one_line(
    parameter: str, says: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", RESNET, "--strategy", "single", "--devices", "1xcpu", "--set", parameter])
        == 2
    )
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_the_u_net_takes_most_of_the_noise_away(tmp_path: Path) -> None:
    run = lockstep.train(
        JobFile(UNET, {"width": 8}),
        strategy="single",
        devices="1xcpu",
        epochs=2,
        folder=tmp_path,
        quiet=True,
    )
    assert 0 < run.metrics["left"] < 0.25


def test_a_digits_noise_is_the_same_each_time() -> None:
    file = loaded(UNET)
    noisy, clean = file.noisy_digits(held_out=True).tensors
    again = file.noisy_digits(held_out=True).tensors[0]
    assert noisy.shape == clean.shape == (360, 1, 16, 16) and torch.equal(noisy, again)
    assert ((noisy - clean) ** 2).mean().sqrt() == pytest.approx(
        0.5, abs=0.01
    ) and 0 <= clean.min() <= clean.max() <= 1
