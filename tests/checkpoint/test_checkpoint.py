"""Checkpoints: any strategy reads any other's, damaged ones are named, what is resumed ends as
if never stopped.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job, Run, train
from lockstep.checkpoint import writer as writers
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.index import Index
from lockstep.checkpoint.writer import Writer
from lockstep.errors import FolderError, InputError, JobError, SaveError
from lockstep.launch.world import World
from lockstep.tensors.row_shard import RowShard

from harness import same_bits  # isort: skip
from zoo import ZOO, drawn, labels, mlp, plain_sgd, slow, state_of

ON = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu", "pp": "2xcpu", "mp": "2xcpu"}


def job_of(**settings: Any) -> Job:
    return ZOO["momentum"].replace(
        **{"precision": "fp64", "epochs": 2, "save_every": 3, **settings}
    )


# ---- the format ----------------------------------------------------------------------------------


def test_a_checkpoint_holds_one_device_names_and_says_what_it_has(tmp_path: Path) -> None:
    run = train(job_of(), strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    (newest, before) = CheckpointFolder(run.folder / "checkpoints").whole(pytest.fail)
    assert [newest[0].name, before[0].name] == ["step-8", "step-6"], "two are kept"
    path, index = before
    assert index.about == {"step": 6, "epoch": 1, "position": 2}
    assert sorted(os.listdir(path)) == ["index.json", "rank-0-of-1.safetensors"]
    assert set(index.state(path)["model"]) == set(mlp().state_dict())
    assert b"pickle" not in (path / "index.json").read_bytes()


# ---- resuming is not stopping --------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ON)
def test_the_same_bits_from_every_checkpoint(strategy: str, tmp_path: Path) -> None:
    """Each of the steps of two epochs, the last one of an epoch among them."""
    job = job_of(
        save_every=1, keep=99, lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)
    )
    job = job.replace(lr_scheduler_every="step")
    whole = train(job, strategy=strategy, devices=ON[strategy], folder=tmp_path, quiet=True)
    steps = CheckpointFolder(whole.folder / "checkpoints").steps()
    assert steps == [8, 7, 6, 5, 4, 3, 2, 1]
    for step in (1, 4, 6) if strategy != "single" else steps[1:]:
        left = tmp_path / f"left-{step}"
        shutil.copytree(whole.folder, left)
        (left / "summary.json").unlink()
        for later in range(step + 1, 9):
            shutil.rmtree(left / "checkpoints" / f"step-{later}")
        run = train(job, resume=left, quiet=True)
        assert same_bits(run.model(), whole.model())
        assert [_without_times(r) for r in run.history] == [
            _without_times(r) for r in whole.history
        ]


def _without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in record.items()
        if name not in ("seconds", "samples_per_second")
    }


@pytest.mark.sweep
@pytest.mark.parametrize("was", [slow(way) if way in ("single", "mp") else way for way in ON])
def test_any_strategy_goes_on_from_any_other_s(was: str, tmp_path: Path) -> None:
    job = job_of()
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    half = train(job, strategy=was, devices=ON[was], folder=tmp_path, quiet=True, steps=6)
    for now in ON:
        copy = tmp_path / f"{was}-{now}"
        shutil.copytree(half.folder, copy)
        run = train(job, strategy=now, devices=ON[now], resume=copy, quiet=True)
        for name, value in run.model().state_dict().items():
            torch.testing.assert_close(
                value, whole.model().state_dict()[name], rtol=1e-10, atol=1e-10
            )


@pytest.mark.slow
def test_synchronised_batch_norm_goes_on_too(tmp_path: Path) -> None:
    job = ZOO["an empty rank under sync_batchnorm"].replace(
        precision="fp64", epochs=2, save_every=1
    )
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    half = train(job, strategy="ddp", devices="3xcpu", folder=tmp_path, quiet=True, steps=5)
    run = train(job, strategy="dp", devices="2xcpu", resume=half.folder, quiet=True)
    for name, value in run.model().state_dict().items():
        torch.testing.assert_close(value, whole.model().state_dict()[name], rtol=1e-10, atol=1e-10)


class Remembering(TensorDataset):
    """Adds to each sample how many were read."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        inputs, target = super().__getitem__(index)
        return inputs + 0.01 * self.reads, target

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


def test_the_state_of_a_data_set_is_in_it(tmp_path: Path) -> None:
    def made(**settings: Any) -> Job:
        data = Remembering(drawn(29, 6), labels(29, 3))
        job = job_of(
            train_data=data,
            loader_workers=0,
            epochs=3,
            eval_data=None,
            metrics={},
        )
        return job.replace(**settings)

    whole = train(made(), strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    half = train(made(steps=6), strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    assert same_bits(train(made(), resume=half.folder, quiet=True).model(), whole.model())


def test_a_data_set_s_state_that_workers_would_change_is_said(tmp_path: Path, capsys: Any) -> None:
    job = job_of(train_data=Remembering(drawn(29, 6), labels(29, 3)), loader_workers=1)
    train(job, devices="1xcpu", folder=tmp_path)
    assert (
        "note: train_data has a state, which loader workers would change: loader_workers=0"
        in capsys.readouterr().out
    )


class Holding(nn.Linear):
    """Has an extra state that is no plain value."""

    def get_extra_state(self) -> Any:
        return {"thing": object()}

    def set_extra_state(self, state: Any) -> None:
        del state


def test_what_can_not_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r'"model/_extra_state/thing" is a builtins.object, which no checkpoint',
    ):
        train(job_of(model=lambda: Holding(6, 3)), folder=tmp_path, devices="1xcpu", quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("every", ["100", 3, "10 min", "2.5h", "90s"])
def test_times_and_steps_are_understood(every: Any) -> None:
    assert job_of(save_every=every).save_every in (every, 100)


@pytest.mark.parametrize("every", [0, "0 s", "soon", -1, "1.5", "3 days"])
def test_others_are_refused(every: Any) -> None:
    with pytest.raises(
        JobError,
        match=r"save_every: .* is not valid: give a number of steps \(100\), epochs \(2epochs\) or a time",
    ):
        job_of(save_every=every)


def test_a_time_is_agreed_upon_by_all_ranks(tmp_path: Path) -> None:
    run = train(
        job_of(save_every="0.001s", keep=99),
        strategy="ddp",
        devices="2xcpu",
        folder=tmp_path,
        quiet=True,
    )
    assert len(CheckpointFolder(run.folder / "checkpoints").steps()) > 3
    run = train(
        job_of(save_every="1h", keep=99),
        strategy="ddp",
        devices="2xcpu",
        folder=tmp_path,
        quiet=True,
    )
    assert CheckpointFolder(run.folder / "checkpoints").steps() == [8, 4]


def test_hogwild_saves_where_its_ranks_meet_and_says_so(tmp_path: Path, capsys: Any) -> None:
    run = train(job_of(save_every=1, keep=9), strategy="hogwild", devices="2xcpu", folder=tmp_path)
    assert CheckpointFolder(run.folder / "checkpoints").steps() == [8, 4]
    assert "note: ranks synchronize at the end of an epoch only" in capsys.readouterr().out


# ---- what is damaged -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``ddp`` that was ended by steps, with two checkpoints."""
    return train(
        job_of(steps=6),
        strategy="ddp",
        devices="2xcpu",
        folder=tmp_path_factory.mktemp("runs"),
        quiet=True,
    ).folder


def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "empty"])
@pytest.mark.parametrize("name", ["index.json", "rank-0-of-1.safetensors"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    how: str, name: str, finished: Path, tmp_path: Path, capsys: Any
) -> None:
    run = copied(finished, tmp_path)
    file = run / "checkpoints" / "step-6" / name
    body = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    else:
        body[len(body) // 2] ^= 4
        file.write_bytes({"flipped": body, "cut": body[:-9], "empty": b""}[how])
    went_on = train(job_of(), strategy="single", devices="1xcpu", resume=run)
    said = capsys.readouterr().out
    assert f"step-6/{name}: " in said and "that checkpoint is set aside as step-6.damaged" in said
    assert "resuming after epoch 1, step 4" in said or "resuming after epoch 1, step 3" in said
    assert (run / "checkpoints" / "step-6.damaged").is_dir()
    whole = train(job_of(), strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    torch.testing.assert_close(
        went_on.model().state_dict(), whole.model().state_dict(), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("seed", range(5))
def test_no_flipped_bit_of_any_file_goes_unnoticed_or_changes_a_number(
    seed: int, finished: Path, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    run = copied(finished, tmp_path)
    state = state_of(run)
    for file in sorted(run.glob("checkpoints/step-6/*")):
        body = bytearray(file.read_bytes())
        for _ in range(20):
            place, bit = chance.randrange(len(body)), 1 << chance.randrange(8)
            body[place] ^= bit
            file.write_bytes(body)
            try:
                index = Index.read(file.parent)
                index.check(file.parent)
            except FolderError:
                pass
            else:
                assert repr(index.state(file.parent)) == repr(state)
            body[place] ^= bit
        file.write_bytes(body)
    for name in ("model.safetensors", "best.safetensors"):
        file = run / name
        weights = lockstep.checkpoint.weights.load_weights(file)
        body = bytearray(file.read_bytes())
        for _ in range(40):
            place, bit = chance.randrange(len(body)), 1 << chance.randrange(8)
            body[place] ^= bit
            file.write_bytes(body)
            try:
                now = lockstep.checkpoint.weights.load_weights(file)
            except FolderError:
                pass
            else:
                assert now.keys() == weights.keys() and all(
                    torch.equal(now[n], weights[n]) for n in now
                )
            body[place] ^= bit


def test_evaluate_refuses_damaged_weights(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    file = run / "model.safetensors"
    body = bytearray(file.read_bytes())
    body[-3] ^= 1
    file.write_bytes(body)
    with pytest.raises(
        FolderError,
        match=r"model\.safetensors: the file is damaged \(the checksum does not match\)",
    ):
        lockstep.evaluate(Run.open(run, job_of()))
    with pytest.raises(FolderError, match=r"model\.safetensors: the file is damaged"):
        lockstep.predict(Run.open(run, job_of()))


def test_a_death_between_two_renames_loses_nothing(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    kept = run / "checkpoints"
    shutil.rmtree(kept / "step-4", ignore_errors=True)
    shutil.rmtree(kept / "step-3", ignore_errors=True)
    (kept / "step-6").rename(kept / ".step-6.before")
    (kept / ".step-7-1-1.part").mkdir()
    assert CheckpointFolder(kept).newest(pytest.fail)[0].name == "step-6"
    train(job_of(), resume=run, quiet=True)
    assert not list(kept.glob(".*"))


# ---- writing -------------------------------------------------------------------------------------


def test_training_waits_for_the_copy_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is changed after ``save`` is in the checkpoint, though it is written
    afterwards.
    """
    may_write = threading.Event()
    real = writers.write_tensors

    def later(*args: Any) -> Any:
        assert may_write.wait(20)
        return real(*args)

    monkeypatch.setattr(writers, "write_tensors", later)
    weights = torch.ones(5, 3)
    writer = Writer(tmp_path, World(), 2)
    for step in (1, 2):
        writer.save(step, {"model": {"w": weights}, "step": step}, {"step": step})
        assert CheckpointFolder(tmp_path).steps() == [1][: step - 1]
        weights += 1
        may_write.set()
        writer.finish()
        may_write.clear()
    kept = [
        index.state(path)["model"]["w"][0, 0].item()
        for path, index in CheckpointFolder(tmp_path).whole(pytest.fail)
    ]
    assert kept == [2.0, 1.0]


def test_buffers_are_kept_from_one_save_to_the_next(tmp_path: Path) -> None:
    weights = torch.ones(5, 3)
    writer = Writer(tmp_path, World(), 2)
    places = set()
    for step in range(3):
        writer.save(step, {"model": {"w": weights}}, {"step": step})
        writer.finish()
        places.add(writer._buffers["model/w"].data_ptr())
    assert len(places) == 1


def test_a_rank_whose_disk_is_full_is_said_by_rank_0_and_leaves_nothing(tmp_path: Path) -> None:
    def save(world: World, folder: str) -> str:
        import lockstep.checkpoint.writer as writing

        real = writing.write_tensors

        def full(*args: Any) -> Any:
            if world.rank == 1:
                raise OSError(28, "No space left on device")
            return real(*args)

        writing.write_tensors = full
        writer = Writer(Path(folder), world, 2)
        try:
            rows = RowShard(torch.ones(50, 3), (50, 50), world.rank)
            writer.save(1, {"model": {"w": rows, "v": torch.ones(40)}}, {"step": 1})
            writer.finish()
        except SaveError as error:
            return str(error)
        return ""

    first, second = lockstep.launch(save, devices="2xcpu", args=(str(tmp_path / "kept"),))
    assert (
        "could not be written: the disk is full; free some space, then begin anew" in first
        and second == ""
    )
    assert not list((tmp_path / "kept").iterdir())


def test_a_link_where_a_file_is_to_be_written_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = train(job_of(epochs=1), folder=tmp_path, devices="1xcpu", quiet=True)
    for name in (".model.safetensors.part", ".best.safetensors.part"):
        (run.folder / name).symlink_to(victim)
    train(job_of(), resume=run.folder, quiet=True)
    assert victim.read_text() == "mine"


def test_an_own_loop_saves_the_same_format(tmp_path: Path) -> None:
    step = lockstep.parallelize(
        mlp(), nn.CrossEntropyLoss(), plain_sgd, strategy="dp", devices="2xcpu"
    )
    for number in range(3):
        step(drawn(8, 6, seed=number), labels(8, 3, seed=number))
        step.save(tmp_path / "kept")
    ((path, index),) = CheckpointFolder(tmp_path / "kept").whole(pytest.fail)
    assert path.name == "step-3" and index.about["step"] == 3
    other = lockstep.parallelize(mlp(), nn.CrossEntropyLoss(), plain_sgd, devices="1xcpu")
    other.load(tmp_path / "kept")
    assert other.world.step == 3 and same_bits(other.model, step.model)
    whole = json.loads((path / "index.json").read_text())
    assert set(whole["index"]["files"]) == {"rank-0-of-1.safetensors"}
