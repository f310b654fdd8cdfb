"""Streams: every rank reads the one stream and keeps its share, each sample once, the same
random numbers by place.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from lockstep import Job, train
from lockstep.data import StreamLoader, batches, resolve, resolve_sets
from lockstep.errors import JobError, LockstepError, RunError, SampleError
from lockstep.launch.world import World, current
from lockstep.tensors.rows import share_sizes
from lockstep.tensors.seeding import seeded

from harness import differences  # isort: skip
from zoo import ZOO, Stream, drawn, generated, labels, mlp, plain_sgd

BOUND = 1e-10


class Noisy(IterableDataset[Any]):
    """Sample i is (i and four random numbers, i); the last number depends on all draws before."""

    def __init__(self, n: int = 23) -> None:
        self.n = n
        self.epochs: list[int] = []
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        walk = float(torch.rand(()))
        for i in range(self.n):
            self.read += 1
            walk += random.random()
            noise = [float(torch.rand(())), random.random(), np.random.rand(), walk]
            yield torch.tensor([float(i), *noise], dtype=torch.float64), i


@pytest.fixture(autouse=True)
def _generators_go_on_as_if_nothing_had_happened() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    yield
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()


def rows(loader: Any, epoch: int = 0, start: int = 0) -> list[list[float]]:
    """What this process's shares came out as."""
    found = [
        row
        for batch in loader.epoch(epoch, start)
        for share in batch.shares or [batch.parts]
        for part in share
        if part.size
        for row in part.inputs.tolist()
    ]
    loader.close()
    return found


# ---- shares --------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("n", "size", "accumulate"), [(20, 8, 1), (9, 4, 3), (3, 8, 2), (16, 8, 1), (1, 1, 1)]
)
def test_each_sample_of_a_stream_is_used_once(
    n: int, size: int, accumulate: int, workers: int
) -> None:
    wanted = rows(StreamLoader(Noisy(n), batch_size=n, workers=0), 2)
    assert [row[0] for row in wanted] == list(range(n)) and len(
        {v for row in wanted for v in row[1:]}
    ) == 4 * n
    for world_size in (1, 2, 3):
        settings: Any = {
            "batch_size": size,
            "accumulate": accumulate,
            "workers": workers,
            "world_size": world_size,
        }
        ranks = [StreamLoader(Noisy(n), rank=r, **settings) for r in range(world_size)]
        found = []
        for k, shares in enumerate(zip(*(loader.epoch(2) for loader in ranks), strict=True)):
            global_batch = range(n)[k * size : (k + 1) * size]
            for batch in shares:
                assert (batch.size, batch.index, batch.epoch) == (len(global_batch), k, 2)
                assert batch.samples.tolist() == list(global_batch)
            for micro in zip(*(b.parts for b in shares), strict=True):
                assert [p.size for p in micro] == share_sizes(micro[0].of, world_size)
                for part in micro:
                    assert (part.inputs is None) == (part.size == 0)
                    assert part.samples.tolist() == (part.targets.tolist() if part.size else [])
                    found += part.inputs.tolist() if part.size else []
        assert found == wanted
        assert {loader.samples for loader in ranks} == {n}
        for loader in ranks:
            loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_one_process_that_drives_several_devices_reads_the_stream_once(workers: int) -> None:
    stream = Noisy(21)
    loader = StreamLoader(
        stream, batch_size=8, rank=None, world_size=3, accumulate=2, workers=workers
    )
    shared = list(loader.epoch(1))
    loader.close()
    assert stream.read == (21 if workers == 0 else 0), "once, here or in the worker"
    for rank in range(3):
        alone = list(
            StreamLoader(
                Noisy(21), batch_size=8, rank=rank, world_size=3, accumulate=2, workers=0
            ).epoch(1)
        )
        for mine, batch in zip(alone, shared, strict=True):
            for a, b, whole in zip(mine.parts, batch.shares[rank], batch.parts, strict=True):
                assert (a.size, a.of, a.of) == (b.size, b.of, whole.size)
                assert a.size == 0 or torch.equal(a.inputs, b.inputs)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_stream_is_taken_up_in_its_middle(start: int, workers: int) -> None:
    wanted = rows(StreamLoader(Noisy(), batch_size=8, workers=0), 4)
    assert (
        rows(StreamLoader(Noisy(), batch_size=8, workers=workers), 4, start) == wanted[start * 8 :]
    )


def test_other_epochs_seeds_and_evaluation_draw_other_numbers() -> None:
    loader = StreamLoader(Noisy(), batch_size=5, seed=5, workers=0)
    found = rows(loader) + rows(loader, 1)
    found += rows(StreamLoader(Noisy(), batch_size=5, seed=6, workers=0))
    found += rows(StreamLoader(Noisy(), batch_size=5, seed=5, workers=0, evaluation=True))
    assert len({v for row in found for v in row[1:]}) == 4 * 23 * 4


def test_set_epoch_is_called_and_a_pass_that_was_left_begins_anew() -> None:
    stream = Noisy()
    loader = StreamLoader(stream, batch_size=8, workers=0)
    assert next(loader.epoch(3)).samples.tolist() == list(range(8))
    assert next(loader.epoch(0)).samples.tolist() == list(range(8))
    assert [b.epoch for b in loader] == [0] * 3 and [b.epoch for b in loader] == [1] * 3
    assert stream.epochs == [3, 0, 0, 1]


def test_a_loader_worker_is_kept_and_a_pass_that_was_left_begins_anew() -> None:
    loader = StreamLoader(Noisy(), batch_size=4, workers=1)
    next(loader.epoch(0))
    for _ in range(3):
        assert [b.samples.tolist() for b in loader.epoch(0)] == [
            list(range(23))[k * 4 : k * 4 + 4] for k in range(6)
        ]
    loader.close()


def test_a_stream_without_draws_needs_no_seeds() -> None:
    class Quiet(Noisy):
        draws_random = False

        def __iter__(self) -> Iterator[Any]:
            for i in range(self.n):
                assert random.getstate() == state
                yield torch.tensor([float(i)]), i

    state = random.getstate()
    assert len(rows(StreamLoader(Quiet(), batch_size=5, workers=0))) == 23


def test_collate_sees_the_share_and_draws_by_the_place() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]) + torch.rand(()), [len(samples)]

    settings: Any = {"batch_size": 8, "world_size": 2, "collate": collate, "workers": 0}
    one, again = (list(StreamLoader(Noisy(), rank=1, **settings).epoch(0)) for _ in range(2))
    assert [b.parts[0].targets for b in one] == [[4], [4], [3]]
    assert all(
        torch.equal(a.parts[0].inputs, b.parts[0].inputs) for a, b in zip(one, again, strict=True)
    )


def test_batches_of_a_stream_serve_a_loop_of_ones_own() -> None:
    def function() -> Iterator[Any]:
        for i in range(10):
            yield torch.tensor([float(i)]), i

    for source in (function, iter_of([*function()]), lambda: iter_of([*function()])):
        loader = batches(source, batch_size=4, workers=0)
        for _ in range(2):
            assert [targets.tolist() for _, targets in loader] == [
                [0, 1, 2, 3],
                [4, 5, 6, 7],
                [8, 9],
            ]
    with pytest.raises(TypeError):
        len(loader)  # type: ignore[arg-type]


class iter_of:
    """Has nothing but ``__iter__``."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def test_batches_of_a_stream_move_to_an_accelerator() -> None:
    loader = StreamLoader(
        Noisy(9), batch_size=8, rank=1, world_size=2, workers=0, device=torch.device("meta")
    )
    full, last = loader.epoch(0)
    inputs, targets = full
    assert {inputs.device.type, targets.device.type} == {"meta"}
    assert last.parts[0].inputs is None and full.samples.is_cpu


def test_batches_of_a_stream_know_the_rank_in_a_launch() -> None:
    def loop(world: lockstep.World) -> list[float]:
        with seeded(0):
            model = mlp()
        step = lockstep.parallelize(model, torch.nn.CrossEntropyLoss(), plain_sgd, precision="fp64")
        return [
            step(batch).loss
            for _ in range(2)
            for batch in lockstep.batches(Stream(25), batch_size=8)
        ]

    reference = lockstep.launch(loop, devices="1xcpu")[0]
    for losses in lockstep.launch(loop, devices="3xcpu"):
        assert losses == pytest.approx(reference, abs=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_stream_copied_ahead_are_the_same(workers: int) -> None:
    loader = StreamLoader(Noisy(100), batch_size=8, workers=workers, device=torch.device("cuda", 0))
    wanted = rows(StreamLoader(Noisy(100), batch_size=8, workers=0), 1)
    assert rows(loader, 1) == wanted


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"order": lambda epoch: [0]},
            "order: train_data is a stream, which comes in its own order",
        ),
        (
            {"workers": 2},
            "loader_workers: 2, but train_data is a stream, and each worker would read all of it",
        ),
        ({"batch_size": 0}, "batch_size: 0"),
    ],
)
def test_what_a_stream_cant_have_is_refused(settings: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        StreamLoader(Noisy(), **{"batch_size": 4, **settings})


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        (lambda: iter_of([]), JobError, "^train_data: it is empty$"),
        (
            lambda: iter_of([(1, 2, 3)]),
            JobError,
            "train_data: a sample is tuple\\(int, int, int\\)",
        ),
        (
            lambda: broken,
            SampleError,
            r"^train_data: sample 2 of the stream raised ValueError: torn \(test_str",
        ),
        (lambda: Unready(), JobError, "train_data: going through it raised OSError: no such file"),
    ],
)
def test_a_stream_that_fails_is_said_in_one_line(
    source: Any, kind: Any, said: str, workers: int
) -> None:
    loader = StreamLoader(resolve(source(), World()), batch_size=4, workers=workers)
    with pytest.raises(kind, match=said):
        list(loader.epoch(0))
    loader.close()


def broken() -> Iterator[Any]:
    yield 0, 0
    yield 1, 1
    raise ValueError("torn")


class Unready:
    def __iter__(self) -> Iterator[Any]:
        raise OSError("no such file")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_is_used_up_is_said_when_it_begins_again(workers: int) -> None:
    loader = StreamLoader(zip(range(10), range(10), strict=True), batch_size=4, workers=workers)
    assert len(list(loader.epoch(0))) == 3
    with pytest.raises(
        RunError, match="train_data: the stream has no samples left: it can be iterated only once"
    ):
        list(loader.epoch(1))
    loader.close()


def test_a_stream_that_became_shorter_than_what_was_used_is_said() -> None:
    with pytest.raises(
        RunError, match="has ended after 23 samples, but the run had used 32 in this epoch"
    ):
        list(StreamLoader(Noisy(), batch_size=8, workers=0).epoch(0, 4))


SET = TensorDataset(torch.arange(3), torch.arange(3))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            DataLoader(SET),
            "a DataLoader cuts batches for one device: give its dataset",
        ),
        (
            [DataLoader(SET), DataLoader(SET)],
            "a DataLoader cuts batches .*combine several by ConcatDataset",
        ),
        (lambda: (SET, DataLoader(SET)), "a DataLoader cuts"),
        (
            (i for i in range(3)),
            "a generator can be iterated only once: give the function that makes it",
        ),
        ({"a": SET}, "sets by name are for eval_data"),
        (5, "int is no dataset"),
    ],
)
def test_what_is_no_data_to_train_on_is_said(source: Any, said: str) -> None:
    with pytest.raises(JobError, match=f"^train_data: {said}"):
        resolve(source, World())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({}, "eval_data: the dict has no sets in it"),
        ({1: SET}, "eval_data: the name of a set is 1, a text is expected"),
        ({"a": SET, "b": []}, r'eval_data\["b"\]: it is empty'),
        (lambda: {"a": DataLoader(SET)}, r'eval_data\["a"\]: a DataLoader cuts'),
    ],
)
def test_evaluation_sets_that_cant_be_are_said(source: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        resolve_sets(source, World())


def test_evaluation_sets_are_resolved_by_name() -> None:
    assert resolve_sets(SET, World()) == {"": SET}
    assert resolve_sets(lambda: SET, World()) == {"": SET}
    assert resolve_sets({"a": SET, "b": lambda: SET}, World()) == {"a": SET, "b": SET}
    assert resolve_sets(lambda: {"a": SET}, World()) == {"a": SET}
    for given in (generated, lambda: generated()):
        loader = StreamLoader(resolve_sets(given, World())[""], batch_size=8, workers=0)
        assert len(rows(loader)) == len(rows(loader)) == 25


# ---- in a training -------------------------------------------------------------------------------

ON = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu"}


def streamed(**settings: Any) -> Job:
    return ZOO["a stream that draws"].replace(precision="fp64", epochs=2, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_resumed_in_its_middle_under_another_strategy(
    workers: int, tmp_path: Path
) -> None:
    job = streamed(loader_workers=workers)
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    assert (
        whole.summary["steps"],
        whole.summary["train_samples"],
        whole.summary["eval_samples"],
    ) == (8, 29, 29)
    for steps, epochs in ((2, 0), (4, 1), (7, 1)):
        part = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True, steps=steps)
        assert (part.summary["steps"], part.summary["epochs"]) == (steps, epochs)
        assert part.summary["train_samples"] == (29 if epochs else None), (
            "known when the stream has ended once"
        )
        resumed = train(job, strategy="dp", devices="3xcpu", resume=part.folder, quiet=True)
        found = differences(job, resumed, whole)
        assert found.within(BOUND), str(found)


def test_steps_without_epochs_go_through_a_stream_as_often_as_it_takes(tmp_path: Path) -> None:
    run = train(
        streamed(steps=10).replace(epochs=None),
        strategy="ddp",
        devices="2xcpu",
        folder=tmp_path,
        quiet=True,
    )
    assert (run.summary["steps"], run.summary["epochs"]) == (10, 2)
    endless = Job(
        model=mlp,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=forever,
        batch_size=8,
        steps=5,
    )
    run = train(endless, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)
    assert (run.summary["steps"], run.summary["epochs"], run.summary["train_samples"]) == (
        5,
        0,
        None,
    )


def forever() -> Iterator[Any]:
    while True:
        yield torch.randn(6), int(torch.randint(3, ()))


def test_a_scheduler_and_the_lines_know_no_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for every in ("step", "epoch"):
        job = streamed(
            lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            lr_scheduler_every=every,
        )
        run = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path)
        assert run.history[1]["lr"] == pytest.approx(0.1 * 0.9 ** (8 if every == "step" else 1))
    out = capsys.readouterr().out
    assert "batches of 8 = 4 + 4 over the devices\na stream, a stream for evaluation" in out
    assert out.count("note: train_data is a stream, which isn't shuffled") == 2
    train(streamed(shuffle=False), strategy="single", devices="1xcpu", folder=tmp_path)
    assert "note:" not in capsys.readouterr().out


def test_an_order_for_a_stream_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="order: train_data is a stream"):
        train(streamed(order=lambda epoch: [0]), folder=tmp_path, quiet=True)
    with pytest.raises(JobError, match="loader_workers: 3, but train_data is a stream"):
        train(streamed(loader_workers=3), folder=tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_stream_that_is_used_up_ends_the_run_in_one_line_and_keeps_it(tmp_path: Path) -> None:
    used = [(x, y) for x, y in zip(drawn(20, 6), labels(20, 3), strict=True)]

    def once() -> Any:
        return map(tuple, [used.pop(0) for _ in range(len(used))])

    job = Job(
        model=mlp,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=once(),
        batch_size=8,
        epochs=2,
    )
    with pytest.raises(RunError, match="train_data: the stream has no samples left"):
        train(
            job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, loader_workers=0
        )
    (folder,) = tmp_path.iterdir()
    assert list((folder / "checkpoints").glob("step-*"))


class ByRank(IterableDataset[Any]):
    """Gives another number of samples, or other samples, on rank 1."""

    def __init__(self, counts: tuple[int, int], shift: bool = False) -> None:
        self.counts, self.shift = counts, shift

    def __iter__(self) -> Iterator[Any]:
        world = current()
        rank = world.rank if world else 0
        for i in range(self.counts[rank]):
            yield torch.full((6,), i + 0.5 * self.shift * rank), i % 3


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (ByRank((16, 24)), "it ends after 16 samples on rank 0, and rank 1 has more"),
        (ByRank((24, 21)), "it ends after 21 samples on rank 1, and rank 0 has more"),
        (ByRank((24, 23)), "it ends after 23 samples on rank 1, and rank 0 has more"),
        (ByRank((24, 24), shift=True), "batch 0 on rank 1 differs from the one on rank 0"),
    ],
)
@pytest.mark.parametrize("held_out", [False, True])
def test_ranks_that_read_different_streams_are_stopped(
    stream: Any, said: str, held_out: bool, tmp_path: Path
) -> None:
    field = "eval_data" if held_out else "train_data"
    job = streamed(**{field: stream}, loader_workers=0, metrics={})
    with pytest.raises(
        LockstepError, match=f"^{field}: the stream is not the same on every rank: {said}"
    ):
        train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)


# ---- evaluation sets by name ---------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ON)
def test_each_evaluation_set_is_told_by_its_name(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ZOO["evaluation sets by name"].replace(precision="fp64")
    run = train(job, strategy=strategy, devices=ON[strategy], folder=tmp_path, tensorboard=True)
    out = capsys.readouterr().out
    alone = {
        name: lockstep.evaluate(run, strategy="single", devices="1xcpu", eval_data=data)
        for name, data in job.eval_data.items()
    }
    wanted = {
        f"{name}/{metric}": v for name, values in alone.items() for metric, v in values.items()
    }
    assert list(run.metrics) == [
        "loss",
        "clean/loss",
        "clean/accuracy",
        "noisy/loss",
        "noisy/accuracy",
    ]
    assert run.metrics == pytest.approx({"loss": wanted["clean/loss"], **wanted}, rel=1e-6)
    assert lockstep.evaluate(run, strategy="dp", devices="2xcpu") == pytest.approx(
        run.metrics, rel=1e-6
    )
    assert "29 samples, 4 steps an epoch, a stream (clean) + 25 (noisy) for evaluation" in out
    (line,) = [line for line in out.splitlines() if line.startswith("epoch   2")]
    assert "clean/loss" in line and "noisy/accuracy" in line and "eval loss" not in line
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(
        r["eval_loss"] == r["clean/loss"] and {"noisy/loss", "noisy/accuracy"} <= r.keys()
        for r in records
    )
    assert run.summary["eval_samples"] == 34


def test_the_first_sets_loss_chooses_the_best_weights_and_the_plateau(tmp_path: Path) -> None:
    sets = {"hard": TensorDataset(drawn(9, 6, seed=5), labels(9, 3, seed=6)), "easy": Stream(9)}
    job = ZOO["mlp"].replace(
        eval_data=sets,
        epochs=6,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(
            o, factor=0.1, patience=0, threshold=0.0
        ),
    )
    run = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    losses = [record["hard/loss"] for record in run.history]
    assert lockstep.evaluate(run, best=True)["hard/loss"] == pytest.approx(min(losses), rel=1e-5)
    rate, best = 1.0, float("inf")
    for record in run.history:
        assert record["lr"] == pytest.approx(rate)
        rate *= 1.0 if record["hard/loss"] < best else 0.1
        best = min(best, record["hard/loss"])


def test_the_command_evaluates_every_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.cli.command import main

    file = tmp_path / "two_sets.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n" + TWO_SETS
    )
    assert main(["evaluate", str(file), "--devices", "1xcpu"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["loss", "clean/loss", "clean/accuracy", "noisy/loss", "noisy/accuracy"]


TWO_SETS = """
def job():
    from zoo import ZOO
    return ZOO["evaluation sets by name"]
"""


class Shifting(torch.utils.data.IterableDataset[Any]):
    """Gives other samples in a loader worker, as a stream of ``datasets`` shuffles otherwise
    there.
    """

    def __iter__(self) -> Any:
        shift = 0 if torch.utils.data.get_worker_info() is None else 100
        return iter([(torch.tensor([float(number + shift)]), number) for number in range(10)])


def test_a_stream_is_the_same_in_a_loader_worker() -> None:
    """Found by trial: strategies that choose a worker read others than those that choose none."""
    here, there = (
        torch.cat(
            [inputs for inputs, _ in lockstep.batches(Shifting(), batch_size=4, workers=workers)]
        )
        for workers in (0, 1)
    )
    assert torch.equal(here, there) and len(here) == 10
