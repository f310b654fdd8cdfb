"""Parallel apply and the team: threads, state, exceptions, interrupts, forks."""

import contextlib
import contextvars
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.launch import devices
from lockstep.parallel import parallel_apply
from lockstep.threads.thread_pool import run

SLOTS = devices.slots(3)


def test_modules_get_their_arguments_and_results_come_in_order() -> None:
    def f(*args: int, **kwargs: int) -> tuple[object, ...]:
        return (*args, *sorted(kwargs.items()))

    found = parallel_apply([f, f, f], [(1, 2), [3], 4], [{}, {"a": 5}, None], devices="3xcpu")
    assert found == [(1, 2), (3, ("a", 5)), (4,)]


def test_modules_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=20)
    assert sorted(parallel_apply([barrier.wait] * 3, [()] * 3)) == [0, 1, 2]


def test_devices_are_found_where_none_are_named() -> None:
    def name(x: object) -> str:
        return threading.current_thread().name

    assert parallel_apply([name] * 2, [torch.zeros(1), 0]) == ["lockstep cpu:0", "lockstep cpu:1"]
    assert parallel_apply([name], [0], devices=devices.slots(2)[1]) == ["lockstep cpu:1"]
    assert parallel_apply([], []) == []


@pytest.mark.parametrize("wrong", [{"inputs": [1]}, {"kwargs_tup": [{}]}, {"devices": "3xcpu"}])
def test_lists_of_different_lengths_are_refused(wrong: dict[str, object]) -> None:
    given: dict[str, object] = {"inputs": [1, 2], **wrong}
    with pytest.raises(InputError, match=r"2 modules, but [13]"):
        parallel_apply([abs, abs], **given)  # type: ignore[arg-type]


def test_gradients_flow_through_the_threads() -> None:
    net = nn.Linear(2, 1)
    one, other = parallel_apply([net, net], [torch.ones(1, 2), torch.ones(3, 2)], devices="2xcpu")
    (one.sum() + other.sum()).backward()
    assert net.weight.grad is not None and net.weight.grad.tolist() == [[4, 4]]


def test_grad_mode_autocast_and_context_variables_are_taken_over() -> None:
    word = contextvars.ContextVar("word", default="unset")

    def state(_: object) -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            word.get(),
        )

    word.set("set")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        inside = parallel_apply([state] * 2, [0, 0], devices="2xcpu")
    with torch.inference_mode():
        assert parallel_apply([state], [0], devices="1xcpu")[0][:2] == (False, True)
    assert inside == [(False, False, True, torch.float16, "set")] * 2
    assert parallel_apply([state] * 2, [0, 0], devices="2xcpu") == [state(0)] * 2


def test_what_a_module_sets_does_not_reach_the_next_call() -> None:
    def spoil(_: object) -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)

    def state(_: object) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    parallel_apply([spoil] * 2, [0, 0], devices="2xcpu")
    assert parallel_apply([state] * 2, [0, 0], devices="2xcpu") == [(True, False)] * 2


def test_each_thread_has_the_limit_and_the_cores_of_its_slot_and_the_caller_keeps_its_own() -> None:
    before = torch.get_num_threads()
    slots = [dataclasses.replace(slot, index=100) for slot in devices.slots(3)]  # new threads

    def state() -> tuple[int, set[int]]:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        return torch.get_num_threads(), cores

    found = run(slots, [state] * 3)
    for slot, result in zip(slots, found, strict=True):
        assert result is not None and result[0] == slot.threads
        assert not result[1] or result[1] == set(slot.cores)
    assert torch.get_num_threads() == before
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before], "a thread that is made later doesn't get the limit of a slot"


def test_threads_stay_for_the_next_call() -> None:
    def which(_: object) -> int:
        return threading.get_ident()

    first = parallel_apply([which] * 2, [0, 0], devices="2xcpu")
    assert parallel_apply([which] * 2, [0, 0], devices="2xcpu") == first
    assert parallel_apply([which], [0], devices=[devices.slots(2)[0]]) == first[:1], (
        "a smaller batch uses fewer"
    )


def test_calls_inside_calls_do_not_wait_for_one_another() -> None:
    def outer(x: int) -> list[int]:
        return parallel_apply([abs, abs], [x, -x], devices="2xcpu")

    assert parallel_apply([outer, outer], [-1, 2], devices="2xcpu") == [[1, 1], [2, 2]]


def test_an_exception_keeps_its_type_and_traceback_and_names_the_replica() -> None:
    class Custom(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a, b)

    def fail(x: int) -> int:
        if x:
            raise Custom(x, 2)
        return x

    with pytest.raises(Custom) as caught:
        parallel_apply([fail, fail], [0, 1], devices="2xcpu")
    assert caught.value.args == (1, 2)
    text = "".join(traceback.format_exception(caught.value))
    assert "raised by replica 1 on cpu:1" in text and "raise Custom(x, 2)" in text
    assert parallel_apply([abs, abs], [-1, -2], devices="2xcpu") == [1, 2], "the threads work on"


def test_the_first_failure_wins_and_frees_those_that_wait_for_it() -> None:
    barrier = threading.Barrier(3)

    def fail() -> None:
        time.sleep(0.05)
        raise ValueError("first")

    start = time.monotonic()
    with pytest.raises(ValueError, match="first") as caught:
        run(SLOTS, [barrier.wait, fail, barrier.wait], on_abort=[barrier.abort])
    assert time.monotonic() - start < 5
    assert caught.value.__notes__ == ["raised by replica 1 on cpu:1"]
    barrier.reset()
    assert run(SLOTS, [int, int, None]) == [0, 0, None]


def test_an_abort_hook_that_fails_does_not_stop_the_others() -> None:
    called: list[int] = []
    hooks = [lambda: 1 // 0, lambda: called.append(1)]
    with pytest.raises(KeyError):
        run(SLOTS, [lambda: {}["missing"], int, int], on_abort=hooks)  # type: ignore[arg-type]
    assert called == [1]


def test_devices_may_sit_out() -> None:
    assert run(SLOTS, [None, lambda: 5, None]) == [None, 5, None]
    assert run(SLOTS, [None] * 3) == [None] * 3


def test_idle_threads_keep_no_results_alive() -> None:
    class Result:
        pass

    def make() -> Callable[[], Result]:
        return Result

    found = run(SLOTS, [make()] * 3)
    refs = [weakref.ref(result) for result in found if result is not None]
    del found
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_a_failed_call_keeps_nothing_alive_after_its_exception_is_gone() -> None:
    class Weights:
        pass

    def fail() -> None:
        weights = Weights()
        refs.append(weakref.ref(weights))
        raise ValueError

    refs: list[weakref.ref[Weights]] = []
    with contextlib.suppress(ValueError):
        run(SLOTS, [fail, int, int])
    assert refs[0]() is None


def test_ctrl_c_frees_the_threads_and_the_next_call_works() -> None:
    barrier = threading.Barrier(2)

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(SLOTS, [interrupt, barrier.wait, None], on_abort=[barrier.abort])
    assert time.monotonic() - start < 4
    assert run(SLOTS, [int, int, int]) == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_makes_threads_of_its_own() -> None:
    script = """
        import os, warnings
        warnings.simplefilter("ignore")
        from lockstep.launch.devices import slots
        from lockstep.parallel import parallel_apply
        from lockstep.threads.thread_pool import run
        assert run(slots(2), [int, int]) == [0, 0]
        assert parallel_apply([abs, abs], [-1, -2], devices="2xcpu") == [1, 2]
        child = os.fork()
        if child == 0:
            good = run(slots(2), [int, int]) == [0, 0] and parallel_apply([abs], [-1], devices="1xcpu") == [1]
            os._exit(0 if good else 1)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], timeout=60, env=dict(os.environ)
    )
    assert done.returncode == 0
