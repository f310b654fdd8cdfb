"""Extra state of modules that replicas have each their own of: a recurrent language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import lockstep
from zoo import ZOO, drawn, labels, mlp, plain_sgd, slow

WAYS = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu", "fsdp": "2xcpu"}
OF_THE_FIRST = (
    'extra state "_extra_state" was saved by 2 replicas and this training has 1, so each takes that '
    "of the first"
)


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A job file."""
    code = Path(__file__).with_name("words_with_state.py").read_text()
    (tmp_path / "words.py").write_text(code)
    return str(tmp_path / "words.py")


def same_bits(one: lockstep.Run, other: lockstep.Run) -> bool:
    return all(map(torch.equal, one.model().parameters(), other.model().parameters()))


@pytest.mark.parametrize("way", ["single", "dp", "ddp", slow("fsdp")])
def test_hidden_state_goes_on_in_a_resumed_run_with_the_same_bits(
    way: str, words: str, tmp_path: Path, capfd
) -> None:
    """Every rank and replica went on with the hidden state of the first one's rows."""
    how: dict[str, Any] = {"precision": "fp64", "quiet": True, "folder": tmp_path}
    whole = lockstep.train(words, strategy=way, devices=WAYS[way], steps=7, **how)
    cut = lockstep.train(words, strategy=way, devices=WAYS[way], steps=3, **how)
    again = lockstep.train(
        words, strategy=way, devices=WAYS[way], steps=7, resume=cut.folder, **how
    )
    assert same_bits(again, whole)
    assert again.history[-1]["train_loss"] == whole.history[-1]["train_loss"]
    with safe_open(whole.folder / "model.safetensors", framework="pt") as file:
        assert [name for name in file.keys() if "extra" in name]  # noqa: SIM118
    if way == "ddp":
        one = lockstep.train(words, devices="1xcpu", steps=7, **how)
        assert again.history[-1]["train_loss"] == pytest.approx(
            one.history[-1]["train_loss"], abs=1e-12
        )
        capfd.readouterr()
        lockstep.train(
            words, strategy="single", devices="1xcpu", steps=9, resume=cut.folder, precision="fp64"
        )
        assert f"note: {OF_THE_FIRST}" in " ".join(capfd.readouterr().out.split())


class Scaled(nn.Module):
    """Has extra state that does not depend on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = mlp(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


class Scales(lockstep.Callback):
    def on_epoch(self, training: Any) -> None:
        training.model.scale *= 0.5


def test_extra_state_that_all_replicas_have_alike_is_the_models(
    tmp_path: Path,
) -> None:
    """It is in files of weights, and given on to any number of devices."""
    its = ZOO["mlp"].replace(model=Scaled, callbacks=[Scales()], epochs=1)
    run = lockstep.train(its, strategy="dp", devices="2xcpu", folder=tmp_path)
    assert run.model().scale == 0.5
    run = lockstep.train(its, resume=run.folder, strategy="dp", devices="3xcpu", epochs=2)
    assert run.model().scale == 0.25


def test_an_own_loop_takes_up_the_extra_state_of_each_rank(tmp_path: Path) -> None:
    def loop(world: lockstep.World) -> list[float]:
        found = []
        for number in range(2):
            model = Scaled()
            step = lockstep.parallelize(
                model, nn.CrossEntropyLoss(), plain_sgd(model.named_parameters())
            )
            if number == 0:
                step(drawn(4, 6), labels(4, 3))
                model.scale = 2.0 + world.rank
                step.save(tmp_path / "kept")
            else:
                step.load(tmp_path / "kept")
            found.append(model.scale)
        return found

    assert lockstep.launch(loop, devices="2xcpu") == [[2.0, 2.0], [3.0, 3.0]]
