"""``lockstep.map``: a function over processes, a module over devices; in order, lazily, and
nothing stays behind.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import DeviceError, InputError, ItemFailed
from lockstep.launch.processes import fork_server

pytestmark = pytest.mark.timeout(60)


def workers() -> list[psutil.Process]:
    """The processes that the forking process has forked and that run."""
    if fork_server._server is None or fork_server._server.process.poll() is not None:
        return []
    found = psutil.Process(fork_server._server.process.pid).children(recursive=True)
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(seconds: float = 3.0) -> None:
    limit = time.monotonic() + seconds
    while workers() and time.monotonic() < limit:
        time.sleep(0.01)
    assert not workers()


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """After each test: no worker runs, and no more files are open than before."""
    list(lockstep.map(abs, range(2), "2xcpu"))  # what is opened once
    before = len(os.listdir("/proc/self/fd"))
    yield
    wait_until_gone()
    assert len(os.listdir("/proc/self/fd")) <= before


# What comes back


def test_results_are_those_of_the_builtin_in_order() -> None:
    def uneven(i: int) -> int:
        time.sleep(0.01 if i % 7 == 0 else 0)
        return i * i

    assert list(lockstep.map(uneven, range(100), "2xcpu")) == [i * i for i in range(100)]


def test_lambdas_local_classes_and_what_they_refer_to_travel_both_ways() -> None:
    @dataclasses.dataclass
    class Point:
        x: int

    offset = 10
    found = list(
        lockstep.map(lambda p: Point(p.x + offset), [Point(1), Point(2), Point(3)], "2xcpu")
    )
    assert found == [Point(11), Point(12), Point(13)]


def test_the_work_is_done_by_as_many_processes_as_devices_and_not_by_this_one() -> None:
    def where(_: int) -> int:
        time.sleep(0.02)
        return os.getpid()

    found = set(lockstep.map(where, range(20), "3xcpu"))
    assert len(found) == 3 and os.getpid() not in found


def test_one_device_is_this_process() -> None:
    before = random.getstate(), torch.get_rng_state(), torch.get_num_threads()
    found = lockstep.map(
        lambda i: (i, os.getpid(), random.random(), torch.rand(1)), itertools.count(), "1xcpu"
    )
    assert [next(found)[:2] for _ in range(3)] == [(i, os.getpid()) for i in range(3)]
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert torch.get_num_threads() == before[2]


def test_no_items_give_no_results() -> None:
    assert list(lockstep.map(abs, [], "2xcpu")) == []
    assert list(lockstep.map(nn.Linear(2, 2), [], "2xcpu", batch_size=3)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("size", [1, 50_000, 3_000_000])
def test_tensors_and_arrays_of_any_size_in_any_nesting_come_back_as_they_were(size: int) -> None:
    class Own:
        def __init__(self, inside: object) -> None:
            self.inside = inside

    def made(item: Any) -> Any:
        (start,) = item["start"]
        base = torch.arange(size, dtype=torch.float64) + start
        return {
            "own": Own([base, (base > 1, base.to(torch.bfloat16), torch.tensor(3 + 4j))]),
            "array": np.arange(size, dtype=np.int16)[::-1],
            "empty": torch.empty(3, 0, 2),
            "transposed": base[: size // 2 * 2].view(2, -1).t(),
            "weight": nn.Parameter(base.clone()),
        }

    def tensors(of: dict[str, Any]) -> list[torch.Tensor]:
        inside = of["own"].inside
        return [inside[0], *inside[1], of["empty"], of["transposed"], of["weight"]]

    items = [{"start": [torch.full((), float(i))]} for i in range(5)]
    for i, found in enumerate(lockstep.map(made, items, "2xcpu")):
        expected = made(items[i])
        for a, b in zip(tensors(found), tensors(expected), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        assert isinstance(found["weight"], nn.Parameter) and found["weight"].requires_grad
        assert (found["array"] == expected["array"]).all() and found["array"].dtype == np.int16
        found["own"].inside[0].add_(1)  # it is ours to write


def test_large_items_and_large_results_that_are_no_tensors_pass_too() -> None:
    words = ["word " * 300_000, "x", "another " * 500_000]
    assert list(lockstep.map(lambda text: text + "!", words * 4, "2xcpu")) == [
        f"{w}!" for w in words * 4
    ]


@pytest.mark.slow
def test_very_many_tensors_in_one_item_and_one_result_pass_too() -> None:
    items = [
        [torch.full((600,), float(i)), *(torch.zeros(600) for _ in range(9000))] for i in range(3)
    ]
    found = lockstep.map(lambda tensors: [t + 1 for t in tensors], items, "2xcpu")
    assert [(len(tensors), tensors[0][0].item()) for tensors in found] == [
        (9001, i + 1) for i in range(3)
    ]


def test_a_map_may_feed_another() -> None:
    inner = lockstep.map(lambda i: torch.full((3000,), float(i)), range(200), "2xcpu")
    outer = lockstep.map(lambda t: t * 2, inner, "2xcpu")
    assert [t[-1].item() for t in outer] == [2 * i for i in range(200)]


def test_tensors_are_not_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("pickled")

    def made(i: int) -> list[torch.Tensor]:
        torch.Tensor.__reduce_ex__ = forbidden  # type: ignore[method-assign, assignment]
        return [torch.full((1000,), float(i))]

    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", forbidden)
    assert [r[0][0].item() for r in lockstep.map(made, range(10), "2xcpu")] == list(range(10))


def test_a_tensor_of_a_graph_comes_without_it() -> None:
    weight = torch.ones(3, requires_grad=True)
    (found,) = lockstep.map(lambda x: weight * x, [2.0], "2xcpu")
    assert found.tolist() == [2.0] * 3 and not found.requires_grad


# Lazily, and bounded


def test_an_endless_generator_is_drawn_from_a_little_ahead_only() -> None:
    drawn = 0

    def endless() -> Iterator[int]:
        nonlocal drawn
        for i in itertools.count():
            drawn += 1
            yield i

    results = lockstep.map(lambda i: time.sleep(0.06) or i, endless(), "2xcpu")
    assert drawn == 0 and not workers()
    assert list(itertools.islice(results, 5)) == [0, 1, 2, 3, 4]
    assert drawn <= 5 + 2 * 16
    del results


def test_results_that_wait_for_a_slow_one_are_bounded_by_their_size() -> None:
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for i in range(1000):
            drawn = i
            yield i

    def large(i: int) -> torch.Tensor:
        time.sleep(1.0 if i == 0 else 0.0)
        return torch.zeros(16 << 20, dtype=torch.uint8)

    results = lockstep.map(large, items(), "2xcpu")
    next(results)
    assert drawn <= 2 * 4 + 5, f"{drawn} results of 16 MB while the first was computed"
    del results


def test_a_slow_generator_does_not_keep_results_back() -> None:
    def slowly() -> Iterator[int]:
        for i in range(4):
            yield i
            time.sleep(0.3)

    began = time.monotonic()
    found = lockstep.map(lambda i: i, slowly(), "2xcpu")
    assert next(found) == 0
    assert time.monotonic() - began < 0.9, "it waited for more than the next item"
    assert list(found) == [1, 2, 3]


def test_an_error_of_the_items_comes_after_the_results_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise KeyError("no more")

    found = []
    with pytest.raises(KeyError, match="no more"):
        for result in lockstep.map(lambda i: i, items(), "2xcpu"):
            found.append(result)
    assert found == [0, 1, 2, 3, 4]


# Random numbers


def test_what_is_drawn_belongs_to_the_item_whatever_the_devices() -> None:
    def draws(_: int) -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    one, two, three = (
        list(lockstep.map(draws, range(50), devices)) for devices in ("1xcpu", "2xcpu", "3xcpu")
    )
    assert one == two == three and len(set(one)) == 50
    assert list(lockstep.map(draws, range(50), "2xcpu", seed=1)) != one


# Batches and folding


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu"])
def test_a_function_computes_in_the_modes_of_who_asks(devices: str) -> None:
    weight = torch.ones(3, 3, requires_grad=True)

    def modes(item: torch.Tensor) -> tuple[bool, bool, torch.dtype]:
        made = item @ weight
        return made.requires_grad, made.is_inference(), made.dtype

    items = [torch.ones(2, 3) for _ in range(3)]
    results = lockstep.map(modes, items, devices)
    with torch.no_grad():
        assert list(results) == [(False, False, torch.float32)] * 3
    with torch.inference_mode():
        assert list(lockstep.map(modes, items, devices)) == [(False, True, torch.float32)] * 3
        sums = list(lockstep.map(torch.sum, items, devices))
    assert torch.equal(torch.stack(sums), torch.full((3,), 6.0))
    with torch.autocast("cpu", torch.bfloat16):
        assert list(lockstep.map(modes, items, devices)) == [(True, False, torch.bfloat16)] * 3
    assert list(lockstep.map(modes, items, devices)) == [(True, False, torch.float32)] * 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_module_computes_without_gradients_whatever_the_mode(mode: Any) -> None:
    model = nn.Linear(3, 2)
    items = torch.randn(4, 3)
    with mode():
        found = list(lockstep.map(model, items, "2xcpu"))
    assert torch.equal(torch.stack(found), torch.stack([model(x) for x in items]))
    assert not any(one.requires_grad for one in found)


def test_a_function_of_lists_gets_lists() -> None:
    found = list(
        lockstep.map(
            lambda items: [(i, len(items)) for i in items], range(10), "2xcpu", batch_size=4
        )
    )
    assert found == [(i, 4 if i < 8 else 2) for i in range(10)]


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu"])
def test_a_function_of_lists_that_gives_too_few_is_told_both_numbers(devices: str) -> None:
    found = []
    with pytest.raises(ItemFailed, match=r"item 8 failed .* gave 1 results for 2 items") as caught:
        for result in lockstep.map(
            lambda items: items[:4] if len(items) > 2 else [0], range(10), devices, 4
        ):
            found.append(result)
    assert found == list(range(8)) and caught.value.index == 8


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu"])
def test_reduce_folds_in_order(devices: str) -> None:
    assert lockstep.map(str, range(12), devices, reduce=lambda a, b: f"({a}{b})") == (
        "(((((((((((01)2)3)4)5)6)7)8)9)10)11)"
    )
    assert lockstep.map(lambda i: [i], range(3), devices, reduce=(lambda a, b: a + b, [9])) == [
        9,
        0,
        1,
        2,
    ]
    assert lockstep.map(str, [], devices, reduce=(lambda a, b: a + b, "nothing")) == "nothing"
    with pytest.raises(InputError, match="there are no items; give a value to start with"):
        lockstep.map(str, [], devices, reduce=lambda a, b: a + b)
    wait_until_gone(0.5)


# Modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> dict[str, Any]:
        assert not self.training and not torch.is_grad_enabled()
        hidden = self.norm(self.linear(x))
        scale = scale.unsqueeze(1) if isinstance(scale, torch.Tensor) else scale
        return {
            "logits": self.dropout(hidden) * scale,
            "pair": (hidden.sum(1), None),
            "names": [str(len(x))] * len(x),
        }


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu", "3xcpu"])
def test_a_module_gives_for_each_item_its_rows(devices: str) -> None:
    net = Net().double()
    images = torch.randn(23, 3, dtype=torch.float64)
    found = list(lockstep.map(net, images, devices, batch_size=5))
    assert net.training and not net.norm.running_mean.any(), "the module itself is as it was"
    expected = net.eval().linear(images) / (1 + net.norm.eps) ** 0.5
    assert torch.allclose(
        torch.stack([row["logits"] for row in found]), expected, rtol=0, atol=1e-12
    )
    assert torch.allclose(
        torch.stack([row["pair"][0] for row in found]), expected.sum(1), rtol=0, atol=1e-12
    )
    assert [row["names"] for row in found] == ["5"] * 20 + ["3"] * 3
    assert found[0]["pair"][1] is None and not found[0]["logits"].requires_grad


def test_a_module_takes_tuples_and_dicts_as_in_a_job_and_batches_as_they_are() -> None:
    net = Net()
    x = torch.randn(8, 3)
    with torch.no_grad():
        expected = net.eval()(x, 2.0)["logits"]
    tuples = lockstep.map(net, [(row, torch.tensor(2.0)) for row in x], "2xcpu", 3)
    dicts = lockstep.map(net, [{"x": row, "scale": torch.tensor(2.0)} for row in x], "2xcpu", 3)
    (whole,) = lockstep.map(net, [(x, 2.0)], "2xcpu")
    for found in (
        torch.stack([r["logits"] for r in tuples]),
        torch.stack([r["logits"] for r in dicts]),
    ):
        torch.testing.assert_close(found, expected)
    assert torch.equal(whole["logits"], expected)


def test_items_of_varying_length_are_put_together_by_a_collate() -> None:
    sentences = [torch.arange(1, n + 2) for n in range(7)]
    embedding = nn.EmbeddingBag(9, 4, mode="sum", padding_idx=0)
    found = lockstep.map(
        embedding,
        sentences,
        "2xcpu",
        3,
        collate=lambda batch: nn.utils.rnn.pad_sequence(batch, batch_first=True),
    )
    expected = torch.stack([embedding(s[None])[0] for s in sentences]).detach()
    torch.testing.assert_close(torch.stack(list(found)), expected)
    with pytest.raises(
        InputError, match=r"items 0 to 2 can't be batched: .*; give a collate that can"
    ):
        list(lockstep.map(embedding, sentences, "2xcpu", 3))


def test_what_a_module_draws_follows_the_item_whatever_the_devices() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.randn(len(x), self.out_features)

    net, x = Noisy(3, 2), torch.randn(40, 3)
    before = torch.get_rng_state()
    one, two = (
        torch.stack(list(lockstep.map(net, x, devices, 4))) for devices in ("1xcpu", "2xcpu")
    )
    assert torch.equal(one, two) and torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one[:4] - net.weight.sum() * 0, one[4:8])


def test_replicas_compute_at_the_same_time() -> None:
    barrier = threading.Barrier(2)

    class Meets(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            barrier.wait(10)
            return super().forward(x)

    assert len(list(lockstep.map(Meets(3, 2), torch.randn(8, 3), "2xcpu", 2))) == 8


def test_a_module_that_fails_names_the_items() -> None:
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.max() > 6:
                raise ValueError("too large")
            return super().forward(x)

    found = []
    with pytest.raises(
        ItemFailed, match=r"items 6 to 8 failed on cpu:\d: ValueError: too large"
    ) as caught:
        for row in lockstep.map(Fails(1, 2), torch.arange(10.0)[:, None], "2xcpu", 3):
            found.append(row)
    assert (
        len(found) == 6
        and caught.value.index == 6
        and isinstance(caught.value.__cause__, ValueError)
    )


def test_outputs_without_a_row_for_each_item_are_shown() -> None:
    class Mean(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"mean": super().forward(x).mean()}

    with pytest.raises(InputError, match=r"no row for each of 3 items: mean is float32\(\)"):
        list(lockstep.map(Mean(1, 2), torch.arange(9.0)[:, None], "2xcpu", 3))


# What goes wrong


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu"])
def test_an_item_that_fails_is_named_with_its_traceback_after_those_before_it(devices: str) -> None:
    def inner(i: int) -> float:
        return 1 / (i - 137)

    found = []
    with pytest.raises(
        ItemFailed, match=r"^item 137 failed on cpu:\d: ZeroDivisionError: "
    ) as caught:
        for result in lockstep.map(lambda i: inner(i), range(1000), devices):
            found.append(result)
    assert len(found) == 137
    assert (
        caught.value.index == 137 and "in inner\n    return 1 / (i - 137)" in caught.value.traceback
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("error", [StopIteration("over"), SystemExit(3), KeyboardInterrupt()])
def test_exceptions_that_end_other_things_end_an_item_only(error: BaseException) -> None:
    def fails(i: int) -> int:
        if i == 5:
            raise error
        return i

    found = []
    with pytest.raises(ItemFailed, match="item 5 failed"):
        for result in lockstep.map(fails, range(10), "2xcpu"):
            found.append(result)
    assert found == [0, 1, 2, 3, 4]


def test_an_item_that_cant_be_sent_is_named_with_its_type_after_those_before_it() -> None:
    found = []
    with pytest.raises(
        InputError, match=r"item 40 \(a lock\) can't be sent to a process: .*pickle"
    ):
        for result in lockstep.map(lambda i: i, [*range(40), threading.Lock(), *range(9)], "2xcpu"):
            found.append(result)
    assert found == list(range(40))
    with pytest.raises(InputError, match=r"item 5 \(a lock\) can't be sent"):
        list(
            lockstep.map(lambda items: items, [*range(5), threading.Lock()], "2xcpu", batch_size=3)
        )


def test_a_result_that_cant_be_sent_back_is_named_with_its_type() -> None:
    found = []
    with pytest.raises(
        ItemFailed, match=r"item 30 failed .*its result \(a lock\) can't be sent back"
    ) as caught:
        for result in lockstep.map(
            lambda i: threading.Lock() if i == 30 else i, range(50), "2xcpu"
        ):
            found.append(result)
    assert found == list(range(30)) and caught.value.index == 30


@pytest.mark.parametrize(
    ("death", "how"),
    [
        (lambda: os._exit(7), "exited with code 7"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            r"was killed by SIGKILL .*possibly out of memory",
        ),
    ],
)
def test_a_worker_that_dies_is_told_at_once_with_the_items_it_was_at(death: Any, how: str) -> None:
    def dies(i: int) -> int:
        if i == 0:
            time.sleep(30)
        if i == 150:
            death()
        return i

    began = time.monotonic()
    with pytest.raises(ItemFailed, match=how) as caught:
        list(lockstep.map(dies, [0, *range(101, 200)], "2xcpu"))
    items = re.search(r"at items? (\d+)(?: to (\d+))?", str(caught.value))
    assert items is not None
    first, last = items.groups()
    assert caught.value.index == int(first) and int(first) <= 50 <= int(last or first)
    assert time.monotonic() - began < 10


def test_a_worker_that_is_killed_between_two_items_is_told() -> None:
    results = lockstep.map(lambda i: i, itertools.count(), "2xcpu")
    assert next(results) == 0
    time.sleep(0.3)
    for process in workers():
        process.kill()
    with pytest.raises(ItemFailed, match="SIGKILL"):
        for _ in range(10_000_000):
            next(results)


def test_a_function_that_cant_be_sent_or_begun_is_said() -> None:
    lock = threading.Lock()
    with pytest.raises(
        InputError, match=r"the function \(.*\) can't be sent to another process: .*lock"
    ):
        lockstep.map(lambda i: lock, range(3), "2xcpu")

    class Unreadable:
        def __reduce__(self) -> tuple[Any, ...]:
            return int, ("no number",)

        def __call__(self, item: object) -> object:
            return item

    with pytest.raises(
        lockstep.LockstepError,
        match=r"the process of the map on cpu:\d could not begin: ValueError",
    ):
        list(lockstep.map(Unreadable(), range(3), "2xcpu"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: lockstep.map(3, range(3)), "a function or a module is expected first, not int"),
        (lambda: lockstep.map(abs, 3), "items: 'int' object is not iterable"),
        (
            lambda: lockstep.map(abs, [1], batch_size=0),
            "batch_size: 0 is too small, it must be above 0",
        ),
        (
            lambda: lockstep.map(abs, [1], "2xcpu", reduce=(max, 1, 2)),
            "reduce: a function of two results, or a pair",
        ),
        (lambda: lockstep.map(abs, [1], collate=list), "collate: it is for a module"),
        (
            lambda: lockstep.map(nn.Linear(1, 1), [1], collate=list),
            "collate: it needs a batch_size",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(wrong: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        wrong()


def test_devices_that_are_not_there_are_refused_at_once() -> None:
    with pytest.raises(DeviceError):
        lockstep.map(abs, [1], "xpu:7")


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu"])
@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_generator_may_write_its_next_item_into_the_same_memory(
    devices, kind, batch_size
) -> None:
    made = {"tensor": torch.zeros(3), "array": np.zeros(3), "list": [0.0] * 3}[kind]

    def items() -> Iterator[object]:
        for i in range(30):
            made[:] = [float(i)] * 3 if kind == "list" else i
            yield made

    def first(item: Any) -> float:
        return float(item[0])

    call = first if batch_size is None else lambda batch: [first(item) for item in batch]
    assert list(lockstep.map(call, items(), devices, batch_size=batch_size)) == list(range(30))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_so_it_may_for_a_module(batch_size: int | None) -> None:
    made = torch.zeros(1, 2) if batch_size is None else torch.zeros(2)

    def items() -> Iterator[torch.Tensor]:
        for i in range(30):
            made.fill_(i)
            yield made

    found = lockstep.map(nn.Flatten(), items(), "2xcpu", batch_size=batch_size)
    assert [float(row.flatten()[0]) for row in found] == list(range(30))


# What stays: nothing


def test_closing_the_iterator_early_leaves_no_process() -> None:
    results = lockstep.map(lambda i: time.sleep(60) if i == 3 else i, itertools.count(), "2xcpu")
    assert next(results) == 0 and workers()
    results.close()
    assert not workers()


def test_an_exception_of_the_consumer_leaves_no_process() -> None:
    with pytest.raises(ValueError, match="mine"):
        for _ in lockstep.map(lambda i: i, itertools.count(), "2xcpu"):
            raise ValueError("mine")
    assert not workers()


def test_ctrl_c_leaves_no_process_and_comes_as_itself() -> None:
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(lockstep.map(lambda i: time.sleep(60), range(4), "2xcpu"))
    assert time.monotonic() - began < 10 and not workers()
    timer.join()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_where_the_caller_is_killed(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import itertools, os, sys, tempfile, torch, lockstep
        tempfile.tempdir = sys.argv[1]
        for pid, _ in lockstep.map(lambda i: (os.getpid(), torch.zeros(100_000)), itertools.count(), "2xcpu"):
            print(pid, flush=True)
        """)
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    source = str(Path(lockstep.__file__).parents[1])
    shared = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, script, temporary],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    ) as process:
        assert process.stdout is not None
        pids = {int(next(process.stdout)) for _ in range(200)}
        process.send_signal(how)
    limit = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    while list(temporary.iterdir()) and time.monotonic() < limit:
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []
    assert not [
        name
        for name in set(os.listdir("/dev/shm")) - shared
        if "lockstep" in name or str(process.pid) in name
    ]


def test_a_thousand_tensors_hold_no_files_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    results = lockstep.map(lambda i: torch.full((2000,), float(i)), range(1000), "2xcpu")
    kept = [next(results) for _ in range(900)]
    assert len(os.listdir("/proc/self/fd")) < before + 40
    assert [t[0].item() for t in [*kept, *results]] == list(range(1000))


# Inside one another, and what is seen


def test_a_map_in_a_map_runs_in_its_process() -> None:
    def outer(i: int) -> tuple[list[int], bool]:
        inner = list(lockstep.map(lambda j: (i * j, os.getpid()), range(4)))
        return [value for value, _ in inner], {pid for _, pid in inner} == {os.getpid()}

    assert list(lockstep.map(outer, range(3), "2xcpu")) == [
        ([0, i, 2 * i, 3 * i], True) for i in range(3)
    ]
    assert list(lockstep.map(lambda i: list(lockstep.map(abs, [i], "2xcpu")), [1], "2xcpu")) == [
        [1]
    ]


def test_a_map_in_a_rank_runs_on_its_device() -> None:
    def rank(world: Any) -> list[int]:
        return list(lockstep.map(lambda i: i + world.rank, range(2)))

    assert lockstep.launch(rank, "2xcpu") == [[0, 1], [1, 2]]


def test_a_training_may_run_in_a_map() -> None:
    def trained(lr: float) -> float:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        step = lockstep.parallelize(
            model, nn.MSELoss(), optimizer, strategy="single", devices="1xcpu"
        )
        return [step(torch.ones(4, 2), torch.ones(4, 1)).loss for _ in range(20)][-1]

    found = list(lockstep.map(trained, [0.0, 0.1], "2xcpu"))
    assert found[1] < 0.01 * found[0]


def test_what_workers_print_comes_out(capsys: pytest.CaptureFixture[str]) -> None:
    def says(i: int) -> int:
        print(f"item {i}")
        print(f"warning {i}", file=sys.stderr)
        return i

    list(lockstep.map(says, range(20), "2xcpu"))
    out, err = capsys.readouterr()
    assert sorted(out.split("\n")) == sorted(["", *(f"item {i}" for i in range(20))])
    assert sorted(err.split("\n")) == sorted(["", *(f"warning {i}" for i in range(20))])


@pytest.mark.slow
def test_a_script_without_a_main_guard_may_map(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import lockstep\n\ndef f(i):\n    return i + 1\n\nprint(list(lockstep.map(f, range(5), "
        "'2xcpu')))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.stderr) == ("[1, 2, 3, 4, 5]\n", "")
