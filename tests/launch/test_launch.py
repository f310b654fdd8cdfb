"""Ranks start, answer, fail and stop as promised. Other processes are looked at from outside,
through psutil.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import lockstep
from lockstep.errors import FolderError, InputError, JobError, LockstepError, RankFailed, RunError
from lockstep.launch import launch
from lockstep.launch import world as worlds
from lockstep.launch.devices import Device, slots
from lockstep.launch.processes import failure_records, fork_server, supervisor
from lockstep.launch.processes.failure_records import Failure
from lockstep.launch.processes.pickling import loads, pickled
from lockstep.launch.processes.supervisor import Lines
from zoo import ZOO

pytestmark = pytest.mark.timeout(60)

SOURCE = str(Path(__file__).resolve().parents[2] / "src")


def script(body: str, tmp_path: Path, name: str = "script.py") -> Path:
    path = tmp_path / name
    path.write_text(textwrap.dedent(body))
    return path


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SOURCE, **more}


def python(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        **options,
    )


def forking_process() -> psutil.Process:
    assert fork_server._server is not None
    return psutil.Process(fork_server._server.process.pid)


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def wait_until_gone(pids: list[int], seconds: float = 3.0) -> None:
    limit = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not left, [psutil.Process(pid).cmdline() for pid in left]


@pytest.fixture(autouse=True)
def nothing_stays(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """After each test: no rank runs, and no scratch folder is left."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    if fork_server._server is not None and fork_server._server.process.poll() is None:
        wait_until_gone([child.pid for child in forking_process().children(recursive=True)], 1.0)
    assert list(temporary.iterdir()) == []


# Starting, and what comes back


def test_results_come_in_rank_order() -> None:
    def who(world, word):
        total = world.all_reduce(torch.tensor([float(world.rank)]))
        return world.rank, world.size, world.local_rank, str(world.device), word, total.item()

    assert launch(who, "3xcpu", ("hello",)) == [
        (i, 3, i, f"cpu:{i}", "hello", 3.0) for i in range(3)
    ]


def test_lambdas_and_local_classes_travel_both_ways() -> None:
    class Pair:
        def __init__(self, left: object, right: object) -> None:
            self.left, self.right = left, right

    found = launch(
        lambda world, f, pair: Pair(f(world.rank), pair.right),
        "2xcpu",
        (lambda x: x + 10, Pair(1, 2)),
    )
    assert [type(pair) for pair in found] == [Pair, Pair]
    assert [(pair.left, pair.right) for pair in found] == [(10, 2), (11, 2)]


def test_one_device_runs_in_this_process() -> None:
    seen: list[tuple[int, str]] = []

    def inside(world):
        assert worlds.current() is world
        world.emit("here")
        return os.getpid(), world.size, world.backend

    found = launch(inside, slots(4)[:1], on_event=lambda rank, event: seen.append((rank, event)))
    assert found == [(os.getpid(), 1, None)]
    assert seen == [(0, "here")]
    assert worlds.current() is None


def test_one_device_gives_its_thread_limit_and_world_back_also_after_an_error() -> None:
    before = torch.get_num_threads()

    def fails(world):
        assert torch.get_num_threads() == 1
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        launch(fails, [Device("cpu", 0, (0,))])
    assert worlds.current() is None
    assert torch.get_num_threads() == before


def test_later_launches_are_quick_and_come_from_the_same_process() -> None:
    first = launch(lambda world: os.getppid(), "2xcpu")
    began = time.monotonic()
    assert launch(lambda world: os.getppid(), "2xcpu") == first
    assert time.monotonic() - began < 1.5


def test_starting_the_forking_process_needs_no_torch() -> None:
    code = (
        "import sys; from lockstep.launch.processes import fork_server; fork_server.start(); "
        "print('torch' "
        "in sys.modules)"
    )
    began = time.monotonic()
    done = python("-c", code)
    assert (done.stdout, done.stderr, done.returncode) == ("False\n", "", 0)
    assert time.monotonic() - began < 1.5  # and nobody waits for its imports on the way out


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    body = """
        import functools
        from lockstep.launch import launch
        print("the script")
        class Local:
            value = 3
            @functools.cached_property
            def kept(self):
                return self.value
        @functools.lru_cache(maxsize=4)
        def cached(value):
            return value
        def fn(world):
            return cached(Local().kept) * world.rank
        print(launch(fn, "2xcpu"))
        def breaks_here(world):
            if world.rank == 1:
                raise ValueError("bad value")
            world.barrier()
        launch(breaks_here, "2xcpu")
    """
    return python(script(body, tmp_path_factory.mktemp("unguarded")))


def test_a_script_without_a_main_guard_runs_once(
    unguarded: subprocess.CompletedProcess[str],
) -> None:
    assert unguarded.stdout == "the script\n[0, 3]\n"


def test_an_uncaught_failure_shows_the_rank_s_traceback_once(
    unguarded: subprocess.CompletedProcess[str],
) -> None:
    assert unguarded.returncode == 1
    assert unguarded.stderr.count("in breaks_here") == 1
    last = unguarded.stderr.splitlines()[-1]
    assert last.endswith(
        "RankFailed: rank 1 (cpu:1) failed before the first step: ValueError: bad value"
    )


@pytest.mark.slow
def test_a_script_from_standard_input_runs() -> None:
    code = """if True:
        from lockstep.launch import launch
        from lockstep.launch.processes import fork_server
        fork_server.start()
        def fn(world):
            return world.rank
        print(launch(fn, "2xcpu"))
    """
    done = python("-", input=code)
    assert (done.stdout, done.stderr) == ("[0, 1]\n", "")


@pytest.mark.slow
def test_a_model_of_the_script_is_compiled_in_ranks(tmp_path: Path) -> None:
    """Found by trial: what torch.compile guards is a global variable of ``__main__``."""
    body = """
        import torch, lockstep
        class Net(torch.nn.Linear):
            def forward(self, x):
                return torch.relu(super().forward(x))
        data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
        job = lockstep.Job(
            model=lambda: Net(4, 3), loss=torch.nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            train_data=data, batch_size=8, compile="eager",
        )
        lockstep.train(job, strategy="ddp", devices="2xcpu")
    """
    done = python(script(body, tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_ranks_see_the_surroundings_of_each_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(world):
        import sys

        return (
            os.environ.get("LOCKSTEP_TEST"),
            os.getcwd(),
            sys.argv[-1],
            sys.path[0],
            sys.modules["__main__"].__dict__,
        )

    for word in ("first", "second"):
        (tmp_path / word).mkdir()
        monkeypatch.setenv("LOCKSTEP_TEST", word)
        monkeypatch.chdir(tmp_path / word)
        monkeypatch.setattr(sys, "argv", ["program", word])
        monkeypatch.syspath_prepend(str(tmp_path / word))
        for found in launch(look, "2xcpu"):
            assert found[:4] == (word, str(tmp_path / word), word, str(tmp_path / word))
            assert not [name for name in found[4] if not name.startswith("__")]
    monkeypatch.delenv("LOCKSTEP_TEST")
    assert launch(look, "2xcpu")[1][0] is None


@pytest.mark.sweep
@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.enable_grad,
    ],
)
def test_ranks_compute_in_the_modes_of_the_caller(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    def modes(world):
        x = torch.ones(2, 2, requires_grad=True)
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            (x @ x).dtype,
            (x + 1).requires_grad,
        )

    with mode():
        here = modes(None)
        assert launch(modes, "1xcpu") == [here]
        assert launch(modes, "2xcpu") == [here, here]
    assert launch(modes, "2xcpu") == [modes(None)] * 2


@pytest.mark.slow
def test_a_large_result_comes_back() -> None:
    found = launch(lambda world: torch.full((25_000_000,), float(world.rank)), "2xcpu")
    assert [(len(one), one[0].item(), one[-1].item()) for one in found] == [
        (25_000_000, 0, 0),
        (25_000_000, 1, 1),
    ]


def test_large_arguments_arrive() -> None:
    assert launch(lambda world, data: data.sum().item(), "2xcpu", (torch.ones(5_000_000),)) == [
        5e6,
        5e6,
    ]


def test_events_arrive_in_order_with_their_rank() -> None:
    class Odd:
        value = 3

    def tells(world):
        for i in range(100):
            world.emit((i, world.rank))
        world.emit(Odd())

    seen: dict[int, list[object]] = {0: [], 1: []}
    launch(tells, "2xcpu", on_event=lambda rank, event: seen[rank].append(event))
    for rank, events in seen.items():
        assert events[:-1] == [(i, rank) for i in range(100)]
        assert isinstance(events[-1], Odd)


def test_launches_from_other_threads_run_side_by_side() -> None:
    found: dict[int, list[int]] = {}

    def one(i: int) -> None:
        found[i] = launch(lambda world, i: i + world.rank, "2xcpu", (i,))

    threads = [threading.Thread(target=one, args=(i,)) for i in (10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [i, i + 1] for i in (10, 20, 30)}


@pytest.mark.slow
def test_a_fork_of_this_process_starts_a_forking_process_of_its_own() -> None:
    mine = launch(lambda world: os.getppid(), "2xcpu")[0]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        theirs = launch(lambda world: os.getppid(), "2xcpu")[0]
        fork_server.stop()
        os.write(writing, str(theirs).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        theirs = int(answers.read())
    os.waitpid(child, 0)
    assert theirs != mine
    assert launch(lambda world: os.getppid(), "2xcpu")[0] == mine


def test_numpy_draws_differ_between_ranks_and_launches() -> None:
    def draw(world):
        import numpy

        return float(numpy.random.rand())

    assert len({*launch(draw, "2xcpu"), *launch(draw, "2xcpu")}) == 4


def test_a_launch_inside_a_rank_is_refused() -> None:
    with pytest.raises(InputError, match=r"this process is already rank \d of 2"):
        launch(lambda world: launch(lambda inner: 0, "2xcpu"), "2xcpu")


@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_a_training_inside_a_rank_is_refused(call: str) -> None:
    with pytest.raises(
        InputError,
        match=r"this process is already rank \d of 2: start a training or a launch outside",
    ):
        launch(
            lambda world: getattr(lockstep, call)(ZOO["mlp"], strategy="dp", devices="2xcpu"),
            "2xcpu",
        )


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(
        InputError, match=r"args\[1\] \(a lock\) can't be sent to another process: cannot pickle"
    ):
        launch(lambda world, *args: None, "2xcpu", (1, lock))

    def holds_a_lock(world):
        return lock

    with pytest.raises(InputError, match=r"the function \(.*holds_a_lock\) can't be sent"):
        launch(holds_a_lock, "2xcpu")


def test_a_result_that_cannot_be_sent_is_the_failure_of_its_rank() -> None:
    with pytest.raises(RankFailed, match=r"rank . .*the result \(a lock\) can't be sent back"):
        launch(lambda world: threading.Lock(), "2xcpu")


def test_nothing_listens_beyond_loopback() -> None:
    def listening(world):
        world.barrier()
        found = [
            c.laddr.ip
            for c in psutil.Process().net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        ]
        world.barrier()
        return found

    for addresses in launch(listening, "2xcpu"):
        assert addresses
        assert set(addresses) <= {"127.0.0.1", "::1"}
    assert [
        c for c in forking_process().net_connections("inet") if c.status == psutil.CONN_LISTEN
    ] == []


def test_rank_0_is_heard_live_and_the_others_write_to_their_logs(tmp_path: Path) -> None:
    times: list[tuple[str, str, float]] = []

    def prints(world):
        print(f"out {world.rank}")
        print(f"err {world.rank}", file=sys.stderr)
        world.barrier()
        time.sleep(0.3)
        os.system("echo from a child")
        print("no newline at the end", end="")

    launch(
        prints,
        "2xcpu",
        folder=tmp_path,
        on_output=lambda text, name: times.append((text, name, time.monotonic())),
    )
    assert "".join(text for text, name, _ in times if name == "stdout") == (
        "out 0\nfrom a child\nno newline at the end"
    )
    assert "".join(text for text, name, _ in times if name == "stderr") == "err 0\n"
    assert times[-1][2] - times[0][2] > 0.25
    assert (
        tmp_path / "ranks" / "1.log"
    ).read_text() == "out 1\nerr 1\nfrom a child\nno newline at the end"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks"]


@pytest.mark.parametrize("name", ["with space", "run #3?", "50%25 ü"])
def test_any_folder_name_will_do(name: str, tmp_path: Path) -> None:
    assert (
        launch(lambda world: world.folder, "2xcpu", folder=tmp_path / name)
        == [str(tmp_path / name)] * 2
    )
    assert [path.name for path in (tmp_path / name).iterdir()] == ["ranks"]


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="the folder of the run can't be written"):
        launch(lambda world: 0, "2xcpu", folder=tmp_path / "file" / "run")


def test_rank_0_is_printed_above_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    launch(lambda world: print("hello", world.rank), "2xcpu")
    assert capsys.readouterr().out == "hello 0\n"


def test_a_child_of_rank_0_that_keeps_its_output_open_delays_nothing() -> None:
    def leaves_a_child(world):
        return subprocess.Popen(["sleep", "50"], start_new_session=world.rank == 0).pid

    began = time.monotonic()
    pids = launch(leaves_a_child, "2xcpu")
    assert time.monotonic() - began < 5
    wait_until_gone([pids[1]])  # rank 1's stayed in its process group
    os.kill(pids[0], signal.SIGKILL)
    wait_until_gone([pids[0]])


def test_lines_are_whole_and_progress_bars_live() -> None:
    seen: list[str] = []
    lines = Lines(seen.append)
    for piece in (b"a\nb", b"c\r", "ü".encode()[:1], "ü".encode()[1:] + b"\n", b"end"):
        lines.feed(piece)
    lines.end()
    assert seen == ["a\n", "bc\r", "ü\n", "end"]


# Failures


def one_raises_and_three_wait(world):
    for step in range(1, 4):
        world.step = step
        world.all_reduce(torch.ones(4))
    world.step = 4
    if world.rank == 2:
        world.emit(time.monotonic())
        raise ValueError("bad value")
    world.all_reduce(torch.ones(4))


def raising_rank_is_named(trials: int) -> None:
    faults: list[float] = []
    for _ in range(trials):
        with pytest.raises(RankFailed) as caught:
            launch(
                one_raises_and_three_wait,
                "4xcpu",
                on_event=lambda rank, moment: faults.append(moment),
            )
        assert time.monotonic() - faults[-1] < 2
        failed = caught.value
        assert str(failed) == "rank 2 (cpu:2) failed at step 4: ValueError: bad value"
        assert (failed.rank, failed.step) == (2, 4)
        assert failed.traceback.count("Traceback (most recent call last)") == 1
        assert failed.traceback.count("in one_raises_and_three_wait") == 1
        assert f"launch{os.sep}rank.py" not in failed.traceback
        assert isinstance(failed.__cause__, ValueError)
        assert failed.__cause__.args == ("bad value",)


def test_the_rank_that_raised_first_is_named() -> None:
    raising_rank_is_named(5)


@pytest.mark.slow
def test_the_rank_that_raised_first_is_named_25_times_of_25() -> None:
    raising_rank_is_named(25)


def test_the_tracebacks_of_other_ranks_are_kept_in_their_logs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        supervisor, "_PATIENCE", 20.0
    )  # a loaded machine may take long to end the other

    def all_raise(world):
        if world.rank:
            time.sleep(0.05)
        raise ValueError(f"bad {world.rank}")

    with pytest.raises(RankFailed, match="bad 0"):
        launch(all_raise, "2xcpu", folder=tmp_path)
    assert "ValueError: bad 1" in (tmp_path / "ranks" / "1.log").read_text()


def test_lockstep_s_own_errors_come_through_as_themselves() -> None:
    def refuses(world):
        if world.rank == 1:
            raise JobError("batch_size: 3 is not a multiple of 2: use 4")
        world.barrier()

    with pytest.raises(JobError) as caught:
        launch(refuses, "2xcpu")
    assert str(caught.value) == "batch_size: 3 is not a multiple of 2: use 4"
    assert caught.value.__cause__ is None
    assert "in refuses" in caught.value.traceback  # type: ignore[attr-defined]


def test_an_exception_that_cannot_be_pickled_is_still_told() -> None:
    class Awkward(Exception):
        def __init__(self, left: int, right: int) -> None:
            super().__init__(f"{left} and {right}")

    def fails(world):
        raise Awkward(1, 2)

    with pytest.raises(RankFailed, match="Awkward: 1 and 2") as caught:
        launch(fails, "2xcpu")
    assert "in fails" in str(caught.value.__cause__)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "was killed by SIGKILL at step 7 (possibly out of memory",
        ),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV at step 7"),
        (lambda: os.abort(), "was killed by SIGABRT at step 7"),
        (lambda: os._exit(3), "exited with code 3 at step 7, before its function returned"),
        (lambda: os._exit(0), "exited with code 0 at step 7, before its function returned"),
        (lambda: sys.exit(5), "failed at step 7: SystemExit: 5"),
    ],
    ids=["SIGKILL", "SIGSEGV", "SIGABRT", "_exit 3", "_exit 0", "sys.exit"],
)
def test_a_rank_that_ends_without_a_result_is_named(end, words: str) -> None:
    def ends(world):
        world.step = 7
        if world.rank == 1:
            world.emit(time.monotonic())
            end()
        world.barrier()

    faults: list[float] = []
    with pytest.raises(RankFailed) as caught:
        launch(ends, "3xcpu", on_event=lambda rank, moment: faults.append(moment))
    assert time.monotonic() - faults[0] < 2
    assert str(caught.value).startswith(f"rank 1 (cpu:1) {words}")
    assert (caught.value.rank, caught.value.step) == (1, 7)
    if "SEGV" in words:
        assert "in ends" in caught.value.traceback  # told by faulthandler, in its log


def test_the_last_words_of_a_rank_that_dies_at_once_are_shown(monkeypatch) -> None:
    """Found by review: what a rank printed before its log was measured was taken for earlier."""
    start_rank = fork_server.start_rank

    def start_slowly(number: int, files: list[int]) -> Any:
        life = start_rank(number, files)
        limit = time.monotonic() + 20
        while number and not os.fstat(files[0]).st_size and time.monotonic() < limit:
            time.sleep(0.01)
        return life

    class Prints:
        def __reduce__(self):
            return exec, ("print('last words', flush=True)",)

    monkeypatch.setattr(fork_server, "start_rank", start_slowly)
    with pytest.raises(RankFailed) as caught:
        launch(
            lambda world, words: os._exit(3) if world.rank else time.sleep(50), "2xcpu", (Prints(),)
        )
    assert "last words" in caught.value.traceback


def test_a_rank_that_cannot_be_started_leaves_no_file_open(monkeypatch) -> None:
    def refuses(*of: object, **settings: object) -> None:
        raise OSError("no more processes")

    fork_server.stop()
    monkeypatch.setattr(subprocess, "Popen", refuses)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no more processes") as caught:
        fork_server.start_rank(0, [])
    assert os.listdir("/proc/self/fd") == before, caught


def test_a_stopped_rank_does_not_delay_the_end() -> None:
    def fails_beside_a_stopped_one(world):
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        if world.rank == 1:
            time.sleep(0.2)
            world.emit(time.monotonic())
            raise ValueError("bad")
        world.barrier()

    faults: list[float] = []
    with pytest.raises(
        RankFailed, match=r"rank 1 \(cpu:1\) failed before the first step: ValueError: bad"
    ):
        launch(
            fails_beside_a_stopped_one, "3xcpu", on_event=lambda rank, moment: faults.append(moment)
        )
    assert time.monotonic() - faults[0] < 2


def test_a_collective_that_gives_up_says_of_whom_nothing_was_heard() -> None:
    def hangs(world):
        if world.rank == 2:
            time.sleep(50)
        torch.distributed.all_reduce(torch.ones(1))

    with pytest.raises(RankFailed, match=r"rank [01] .*; no report from rank 2"):
        launch(hangs, "3xcpu", timeout=1.0)


def test_an_error_in_the_event_handler_ends_the_launch() -> None:
    pids: list[int] = []

    def handler(rank: int, event: int) -> None:
        pids.append(event)
        if len(pids) == 2:
            raise LookupError("from the handler")

    def works(world):
        world.emit(os.getpid())
        time.sleep(50)

    with pytest.raises(LookupError, match="from the handler"):
        launch(works, "2xcpu", on_event=handler)
    assert not alive(pids)


@pytest.mark.slow
def test_the_death_of_the_forking_process_is_told_and_the_next_launch_starts_another() -> None:
    pids: list[int] = []

    def handler(rank: int, pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            forking_process().kill()

    def works(world):
        world.emit(os.getpid())
        time.sleep(50)

    with pytest.raises(RunError, match="the process that forks the ranks has died"):
        launch(works, "2xcpu", on_event=handler)
    wait_until_gone(pids)
    assert launch(lambda world: world.rank, "2xcpu") == [0, 1]


def record(rank: int, time: float, peer: bool = False) -> Failure:
    return Failure(rank, time, 1, "failed", ": ValueError: bad", order=3 if peer else 1)


def death(rank: int, time: float, code: int) -> Failure:
    return Failure.of_end(code, time, rank, 1, "")


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([record(0, 2.0), record(1, 1.0)], 1),
        ([record(0, 1.0, peer=True), record(1, 2.0)], 1),
        ([record(0, 1.0, peer=True), record(1, 2.0, peer=True)], 0),
        ([record(0, 1.0, peer=True), death(1, 2.0, -signal.SIGKILL)], 1),
        ([record(0, 1.0), death(1, 2.0, -signal.SIGSEGV)], 0),
        ([death(0, 1.0, -signal.SIGABRT), record(1, 2.0)], 1),
        ([record(0, 1.0, peer=True), death(1, 2.0, -signal.SIGABRT)], 1),
        ([record(0, 1.0, peer=True), death(1, 2.0, 3)], 1),
    ],
)
def test_who_failed_first(failures: list[Failure], rank: int) -> None:
    assert failure_records.guilty(failures).rank == rank
    assert failure_records.guilty(reversed(failures)).rank == rank


def test_an_error_that_came_from_a_peer_s_is_a_peer_s() -> None:
    try:
        try:
            raise RuntimeError(
                "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
            )
        except RuntimeError as error:
            raise LockstepError("the step failed") from error
    except LockstepError as error:
        assert failure_records.looks_like_peers(error)
    assert not failure_records.looks_like_peers(ValueError("Connection closed by peer"))


# The person's process ends, or is interrupted

LONG = """
    import os, signal, subprocess, sys, time
    from lockstep.launch import launch
    from lockstep.launch.processes import fork_server
    fork_server.start()
    import torch
    from torch.utils.data import DataLoader

    def works(world):
        batches = iter(DataLoader(range(1000), num_workers=1))
        next(batches)
        moved_away = subprocess.Popen(["sleep", "50"], start_new_session=True)
        world.emit((os.getpid(), batches._workers[0].pid, moved_away.pid))
        world.barrier()
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        torch.distributed.all_reduce(torch.ones(1))

    if "handler" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        launch(works, "3xcpu", on_event=lambda rank, pids: print(*pids, flush=True), folder=sys.argv[1])
    except BaseException as error:
        print(type(error).__name__, flush=True)
        raise
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "handler", "code", "word"),
    [
        (signal.SIGKILL, "", -signal.SIGKILL, ""),
        pytest.param(
            signal.SIGINT, "", -signal.SIGINT, "KeyboardInterrupt\n", marks=pytest.mark.slow
        ),
        pytest.param(signal.SIGTERM, "", -signal.SIGTERM, "", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "handler", 143, "SystemExit\n", marks=pytest.mark.slow),
    ],
    ids=["kill -9", "Ctrl-C", "SIGTERM", "SIGTERM with a handler"],
)
def test_no_process_outlives_the_person_s(
    number: signal.Signals, handler: str, code: int, word: str, tmp_path: Path
) -> None:
    """Of three ranks one is stopped and two wait in a collective; each has a loader worker and a
    child elsewhere.
    """
    command = [sys.executable, str(script(LONG, tmp_path)), str(tmp_path / "run"), handler]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        theirs = [[int(pid) for pid in process.stdout.readline().split()] for _ in range(3)]
        pids = [pid for three in theirs for pid in three]
        pids += [child.pid for child in psutil.Process(process.pid).children()]
        assert len(alive(pids)) == 10
        limit = time.monotonic() + 10
        while not any(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid, *_ in theirs):
            assert time.monotonic() < limit
            time.sleep(0.02)
        process.send_signal(number)
        began = time.monotonic()
        assert process.stdout.read() == word
        assert process.wait(10) == code
        wait_until_gone(pids, 2.0)
        assert time.monotonic() - began < 3
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ranks"]


def test_the_person_s_signal_handlers_are_left_alone() -> None:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP]
    before = [signal.getsignal(number) for number in numbers]

    def inside(world):
        return [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
        ]

    assert launch(inside, "2xcpu") == [[signal.SIG_IGN, signal.SIG_DFL, signal.SIG_DFL]] * 2
    with pytest.raises(RankFailed):
        launch(one_raises_and_three_wait, "3xcpu")
    assert [signal.getsignal(number) for number in numbers] == before


def test_loader_workers_end_with_their_rank() -> None:
    def loads(world):
        batches = iter(
            torch.utils.data.DataLoader(range(8), num_workers=2, persistent_workers=True)
        )
        next(batches)
        world.batches = batches
        return [worker.pid for worker in batches._workers]

    pids = [pid for found in launch(loads, "2xcpu") for pid in found]
    assert len(pids) == 4
    assert not alive(pids)


# Under torchrun

TORCHRUN = """
    import torch
    from lockstep.launch import launch

    class Local:
        def __init__(self, value):
            self.value = value

    def fn(world, scale):
        world.step = 3
        if scale == 30 and world.rank == 1:
            raise ValueError("bad value")
        total = world.all_reduce(torch.ones(1)).item()
        return Local((world.rank * scale, world.local_size, str(world.device), total))

    for scale in (10, 20, 30):
        found = [one.value for one in launch(fn, args=(scale,))]
        print(f"{found}\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    path = script(TORCHRUN, tmp_path_factory.mktemp("torchrun"))
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path)


def test_under_torchrun_each_process_is_a_rank_and_gets_all_results(
    torchrun: subprocess.CompletedProcess[str],
) -> None:
    expected = [
        str([(rank * i, 2, f"cpu:{rank}", 2.0) for rank in range(2)]) for i in (10, 10, 20, 20)
    ]
    assert sorted(line for line in torchrun.stdout.splitlines() if line) == sorted(expected), (
        torchrun.stderr
    )


def test_under_torchrun_a_failure_names_rank_and_step(
    torchrun: subprocess.CompletedProcess[str],
) -> None:
    assert torchrun.returncode == 1
    assert "rank 1 (cpu:1) failed at step 3: ValueError: bad value" in torchrun.stderr


def test_one_process_under_torchrun_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    assert launch(lambda world: (world.size, world.backend, str(world.device))) == [
        (1, None, "cpu:0")
    ]


FLAGS = """
import torch
from lockstep.launch import launch
from lockstep.launch.processes import modes

def ranks(world):
    return modes.switches()

for change in CHANGES:
    exec(change)
    assert launch(ranks, "2xcpu") == [modes.switches()] * 2, change
"""
CHANGES = [
    "torch.set_float32_matmul_precision('high')",
    "torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.cudnn.benchmark = True",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",  # the old names raise from here on
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.backends.fp32_precision = 'ieee'",
]


@pytest.mark.slow
def test_precisions_that_were_set_by_old_and_by_new_names_reach_the_ranks(tmp_path: Path) -> None:
    """After the new one of a matrix product was set, every launch died of reading the old one."""
    (tmp_path / "flags.py").write_text(FLAGS.replace("CHANGES", repr(CHANGES)))
    done = subprocess.run(
        [sys.executable, "flags.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def filled(
    world: Any, layer: torch.nn.Linear, others: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    layer.weight.data.fill_(5)
    return list(others)


def test_tensors_that_share_memory_do_so_on_the_ranks() -> None:
    """Found by trial: a loss that holds ``weight.detach()`` had the first weights under ddp, and
    went on with them.
    """
    layer = torch.nn.Linear(3, 2)
    others = (
        layer.weight.data,
        layer.weight.detach()[1:],
        torch.arange(4)[::2],
        torch.ones(2, requires_grad=True),
    )
    found = launch(filled, "2xcpu", (layer, others))[1]
    assert [t.tolist() for t in found] == [[[5.0] * 3] * 2, [[5.0] * 3], [0, 2], [1.0, 1.0]]
    assert [t.requires_grad for t in found] == [False, False, False, True]


def shared_variable() -> tuple[Any, Any, Any]:
    number = 1

    def get() -> int:
        return number

    def set_it(value: int) -> None:
        nonlocal number
        number = value

    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    def unassigned() -> Any:
        return later

    if number > 1:
        later = 0
    return get, set_it, (factorial, unassigned)


def test_functions_that_share_a_variable_share_it_in_the_ranks() -> None:
    """Found by trial: each had its own there, and what a callback rebound the loss never saw."""
    get, set_it, (factorial, unassigned) = loads(
        pickled({"a function": shared_variable, "variables": shared_variable()})
    )[1]
    set_it(7)
    assert get() == 7 and factorial(5) == 120
    with pytest.raises(NameError):
        unassigned()
