"""Shapes on each device, said once; metrics tried on the first step's outputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import train
from lockstep.errors import JobError
from lockstep.training.records.batch_shapes import line_of, shapes_of
from zoo import ZOO

JOB = dataclasses.replace(ZOO["mlp"].replace(accumulate=1, steps=1, epochs=None), eval_data=None)


def shapes(tmp_path: Path, strategy: str, devices: str, capsys, **settings) -> tuple[list, str]:
    run = train(JOB.replace(**settings), strategy=strategy, devices=devices, folder=tmp_path)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if ": inputs " in line]
    return run.summary["shapes"], line


@pytest.mark.parametrize("strategy", ["dp", "ddp", "hogwild"])
def test_the_shapes_inside_are_the_shares(strategy: str, tmp_path, capsys) -> None:
    found, line = shapes(tmp_path, strategy, "2xcpu", capsys, batch_size=10)
    assert line == "each device: inputs 5 x 6, outputs 5 x 3"
    one = {"inputs": {"": [5, 6]}, "outputs": {"": [5, 3]}}
    assert found == [{"device": "cpu:0", **one}, {"device": "cpu:1", **one}]


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_unequal_and_empty_shares_are_those_of_each_device(strategy: str, tmp_path, capsys) -> None:
    found, line = shapes(
        tmp_path / "uneven", strategy, "3xcpu", capsys, batch_size=10, accumulate=2
    )
    assert line == "cpu:0 in a micro-batch: inputs 2 x 6, outputs 2 x 3"
    assert [one["inputs"][""] for one in found] == [[2, 6], [2, 6], [1, 6]]
    found, line = shapes(tmp_path / "empty", strategy, "3xcpu", capsys, batch_size=2)
    assert line == "each device: inputs 1 x 6, outputs 1 x 3" and len(found) == 2


class Listed(nn.Module):
    """As a detector: a list of images, and a list of dicts with a number in each."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(
        self, images: list[torch.Tensor], labelled: list[dict[str, torch.Tensor]]
    ) -> torch.Tensor:
        return (
            self.out(torch.stack(images)) + torch.stack([one["label"] for one in labelled])[:, None]
        )


def listed(samples: list) -> tuple:
    images = [image for image, _ in samples]
    labels = torch.stack([label for _, label in samples])
    return (images, [{"label": label} for label in labels]), labels


def test_lists_of_numbers_may_be_longer_on_some_devices(tmp_path, capsys) -> None:
    settings = {"model": Listed, "collate": listed, "batch_size": 8}
    found, line = shapes(tmp_path, "dp", "3xcpu", capsys, **settings)
    assert found[0]["inputs"]["1.2.label"] == [] and "1.2.label" not in found[2]["inputs"]
    assert line == "cpu:0: inputs (6, 6, 6, ... 6 in all), outputs 3 x 3"


def test_one_device_sees_the_whole_batch(tmp_path, capsys) -> None:
    assert (
        shapes(tmp_path, "single", "1xcpu", capsys, batch_size=10)[1]
        == "cpu:0: inputs 10 x 6, outputs 10 x 3"
    )


def test_tensors_in_a_nest_have_names() -> None:
    nest = {"x": torch.zeros(2, 3), "more": (torch.zeros(2), "word", None)}
    assert shapes_of(nest) == {"x": [2, 3], "more.0": [2]}
    assert shapes_of(3) == {}
    assert (
        shapes_of(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged))
        == {}
    )
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3, 2)])
    assert shapes_of(packed) == {"data": [3, 2]}
    one = {"device": "cpu", "inputs": {"": [4, 5]}, "outputs": {"loss": [], "logits": [4, 2]}}
    assert line_of([one], 1) == "cpu: inputs 4 x 5, outputs (loss a scalar, logits 4 x 2)"


def test_a_metric_of_the_wrong_shape_is_found_at_the_first_step(tmp_path) -> None:
    metrics = {"rows": lambda outputs, targets: (outputs.argmax(dim=1) == targets, len(targets))}
    job = dataclasses.replace(
        ZOO["mlp"], metrics=metrics, on_event=[lambda event: events.append(event.kind) and None]
    )
    events: list[str] = []
    with pytest.raises(JobError, match=r'metrics: "rows" gave a tensor of shape'):
        train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    assert events == ["started"] and not list(tmp_path.iterdir())
