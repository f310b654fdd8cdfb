"""Comparing strategies: what is measured against what, the table, the sentence; and a real one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.cli import command as cli
from lockstep.compare.advice import best_of, sentence, unsteady
from lockstep.compare.agreement import Agreement, agreement_of
from lockstep.compare.comparison_page import page_of
from lockstep.compare.comparison_table import lines_of
from lockstep.compare.planned_rows import Setup, line_up
from lockstep.compare.result import Comparison
from lockstep.compare.sweep_figures import sweeps_of
from lockstep.compare.timed_run import TrialResult, attempt
from lockstep.errors import InputError, OutOfMemory, StrategyError
from lockstep.jobfile import JobFile
from lockstep.launch.devices import slots
from lockstep.report.charts import Lines
from lockstep.run.events import Caveat
from lockstep.strategies.pp import PP
from lockstep.verify.measures import largest
from zoo import drawn, labels

measure = importlib.import_module("lockstep.compare.compare")
timed_run = importlib.import_module("lockstep.compare.timed_run")
EQUAL = Agreement(True, 3e-16)


def job(**settings: Any) -> lockstep.Job:
    defaults: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        "batch_size": 8,
    }
    return lockstep.Job(
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train_data=TensorDataset(drawn(29, 6), labels(29, 3)),
        **{**defaults, **settings},
    )


# ---- planted times -------------------------------------------------------------------------------

Rule = Callable[[Setup, int], float]


def shapes(setup: Setup) -> list[dict[str, Any]]:
    two = setup.strategy in ("dp", "ddp")
    return [
        {"device": f"cpu:{i}", "inputs": {"": [4, 6]}, "outputs": {"": [4, 3]}}
        for i in range(1 + two)
    ]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[tuple[Setup, bool]]]]:
    """A machine of four cores whose speed is a rule of the way and the round; it gives what was
    tried, in order.
    """
    tried: list[tuple[Setup, bool]] = []

    def obey(
        rule: Rule, agreement: Callable[[str], Agreement] = lambda strategy: EQUAL
    ) -> list[tuple[Setup, bool]]:
        turns: dict[str, int] = {}

        def attempted(
            job: Any, setup: Setup, *, seconds: float, looks: bool = False
        ) -> TrialResult:
            tried.append((setup, looks))
            turn = turns[str(setup)] = turns.get(str(setup), -1) + 1
            rate = rule(setup, turn)
            peaks = (410_000_000, 402_000_000) if setup.strategy == "ddp" else (433_000_000,)
            said = (
                (Caveat("batchnorm", "BatchNorm normalizes over each replica's local batch"),)
                if setup.strategy == "dp"
                else ()
            )
            seen = shapes(setup)
            return TrialResult(rate, 0.1, peaks, caveats=said, started=1.5, shapes=seen)

        monkeypatch.setattr(measure, "attempt", attempted)
        monkeypatch.setattr(timed_run, "attempt", attempted)
        monkeypatch.setattr(
            measure, "agreement_of", lambda job, entry: agreement(entry.setup.strategy)
        )
        monkeypatch.setattr(
            importlib.import_module("lockstep.launch.devices"), "usable_cores", lambda: (0, 1, 2, 3)
        )
        facts = {"processor": "Planted", "cores": 4, "memory": "8.0 GiB", "torch": "2.13.0"}
        monkeypatch.setattr(measure, "machine", lambda: facts)
        return tried

    yield obey


SPEEDS = {"single": 4000.0, "dp": 5200.0, "ddp": 7400.0, "mp": 3900.0, "pp": 6600.0}


def steady(setup: Setup, turn: int) -> float:
    """Two cores of a slot give what is planted, four cores 1.7 times that; a little spread."""
    rate = SPEEDS[setup.strategy] * (1.7 if setup == Setup("single", "1xcpu") else 1.0)
    return rate * (1.0, 1.0, 0.98, 1.01)[turn % 4]


def compared(**settings: Any) -> Comparison:
    defaults: dict[str, Any] = {
        "devices": "2xcpu",
        "rounds": 3,
        "seconds": 2.0,
        "folder": None,
        "log": None,
    }
    return lockstep.compare(job(), **{**defaults, **settings})


def test_the_table_fits_80_columns(machine: Callable[..., Any]) -> None:
    machine(steady)
    assert lines_of(compared(), 80) == [
        "job: batches of 8 samples, on 2 CPU devices of 2 cores",
        "each in fresh processes, 3 turns of 2 s or more, one after the other; the median",
        "of them",
        "",
        "                 samples/s  lowest, highest  x one  x cores  effic.       memory",
        "single, 2 cores      4,000     3,920, 4,040   1.00     0.59              413 MiB",
        "single, 4 cores      6,800     6,664, 6,868   1.70     1.00              413 MiB",
        "dp                   5,200     5,096, 5,252   1.30     0.76    65 %      413 MiB",
        "ddp                  7,400     7,252, 7,474   1.85     1.09    92 %  2 x 391 MiB",
        "mp                   3,900     3,822, 3,939   0.97     0.57    49 %      413 MiB",
        "pp                   6,600     6,468, 6,666   1.65     0.97    82 %      413 MiB",
        "x one: times one CPU device; x cores: times all 4 cores without a strategy;",
        "memory: of a process. CPU devices are cores of one machine; speed-ups on GPUs",
        "may be larger or smaller",
        "",
        "                 start       parity",
        "single, 2 cores  1.5 s",
        "single, 4 cores  1.5 s",
        "dp               1.5 s  equal 3e-16",
        "ddp              1.5 s  equal 3e-16",
        "mp               1.5 s  equal 3e-16",
        "pp               1.5 s  equal 3e-16",
        "dp: BatchNorm normalizes over each replica's local batch",
        "",
        "Take ddp: 1.85 times one CPU device of 2 cores, 1.09 times all 4 cores without a",
        "strategy, with single-device results.",
        '  lockstep.train(job, strategy="ddp", devices="2xcpu")',
    ]


@pytest.mark.parametrize("width", [66, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int, machine: Callable[..., Any]) -> None:
    machine(steady)
    found = compared(
        strategies=["dp", PP(microbatches=8)], sweep={"batch_size": [8, 4], "seed": [1000, 2000]}
    )
    *lines, paste = lines_of(found, width)
    assert max(map(len, lines)) <= width and paste.startswith("  lockstep.train(job, strategy=")
    assert sum("pp microbatches=8 batch_size=4 seed=2000" in line for line in lines) >= 2


def test_each_has_its_turn_after_a_look_at_all(machine: Callable[..., Any]) -> None:
    tried = machine(steady)
    compared(strategies=["ddp", "pp"], rounds=2)
    slot, cores, ddp, pp = (
        Setup("single", slots(2)[:1]),
        Setup("single", "1xcpu"),
        Setup("ddp", "2xcpu"),
        Setup("pp", "2xcpu"),
    )
    assert [setup for setup, looks in tried if looks] == [slot, cores, ddp, pp]
    assert [setup for setup, looks in tried if not looks] == [slot, cores, ddp, pp] * 2
    assert [looks for _, looks in tried] == [True] * 4 + [False] * 8


def test_ratios_are_taken_within_a_round(machine: Callable[..., Any]) -> None:
    # The machine gets twice as fast from round to round: a ratio of medians over all rounds would
    # not see 1.5.
    machine(lambda setup, turn: 2.0**turn * (150.0 if setup.strategy == "ddp" else 100.0))
    found = compared(strategies=["ddp"], rounds=4)
    speed_up = found.speed_up(found["ddp"])
    assert speed_up is not None and speed_up.spread == (1.5, 1.5)
    assert found.figures(found["ddp"])["efficiency"] == 0.75


def test_where_nothing_could_be_measured_there_is_no_empty_table(
    machine: Callable[..., Any],
) -> None:
    def broken(setup: Setup, turn: int) -> float:
        raise OutOfMemory("out of memory")

    machine(broken)
    lines = lines_of(compared(strategies=["ddp"]), 80)
    assert lines.count("    out of memory") == 3 and lines[-1].startswith(
        "Nothing here can train this job"
    )
    assert not any("samples/s" in line or "x one" in line for line in lines)


def test_what_fails_is_a_row_with_its_reason(machine: Callable[..., Any]) -> None:
    def rule(setup: Setup, turn: int) -> float:
        if setup.strategy == "dp":
            raise StrategyError("dp: a function holds on to the model\nand more")
        if setup.strategy == "ddp" and turn == 2:  # in its second timed turn
            raise OutOfMemory("rank 1: out of memory")
        return steady(setup, turn)

    tried = machine(rule)
    found = compared()
    assert {row.name: row.reason for row in found.rows if not row.rates} == {
        "dp": "dp: a function holds on to the model",
        "ddp": "rank 1: out of memory",
    }
    assert [setup.strategy for setup, _ in tried].count(
        "ddp"
    ) == 3  # a look, a turn, the one that failed
    assert "    rank 1: out of memory" in lines_of(found, 80)
    assert sentence(found).startswith("Take single, 4 cores: no strategy is clearly faster")


def test_the_fastest_with_one_devices_numbers_is_the_one_to_take(
    machine: Callable[..., Any],
) -> None:
    def wrong(strategy: str) -> Agreement:
        return Agreement(False, 0.2) if strategy == "ddp" else EQUAL

    machine(
        lambda setup, turn: steady(setup, turn) * (1.5 if setup.strategy == "pp" else 1.0), wrong
    )
    found = compared(strategies=["dp", "ddp", "pp"])
    best = best_of(found)
    assert best is not None and best.name == "pp"
    assert sentence(found) == (
        "Take pp: 2.48 times one CPU device of 2 cores, 1.46 times all 4 cores without a "
        "strategy, with "
        "single-device results."
    )
    machine(steady, wrong)
    assert "; ddp is 1.09 times as fast, but with other results than one device." in sentence(
        compared(strategies=["dp", "ddp", "pp"])
    )


def test_of_equally_fast_ones_the_simplest_is_taken(machine: Callable[..., Any]) -> None:
    def close(setup: Setup, turn: int) -> float:
        return {"single": 100.0, "dp": 180.0, "ddp": 180.0 * (1.05, 1.05, 0.99, 1.05)[turn]}[
            setup.strategy
        ]

    machine(close)
    said = sentence(compared(strategies=["dp", "ddp"]))
    assert said.startswith("Take dp: 1.80 times one CPU device")


def test_turns_that_differ_much_are_said_to(machine: Callable[..., Any]) -> None:
    machine(steady)
    assert unsteady(compared()) == ""
    machine(
        lambda setup, turn: (
            steady(setup, turn) * (0.7 if setup.strategy == "dp" and turn == 2 else 1.0)
        )
    )
    found = compared()
    assert unsteady(found).startswith("The turns of dp differ by 3")
    assert any(line.startswith("The turns of dp differ") for line in lines_of(found, 80))
    assert unsteady(found) in page_of(found).notes


def test_what_was_chosen_is_said_apart_from_what_is_of_the_numbers(
    machine: Callable[..., Any],
) -> None:
    machine(steady)
    found = compared(strategies=["pp"])
    plan = "stages: a (50 %) | b (50 %) of the time, measured"
    rows = tuple(replace(row, plans=(plan,)) if row.name == "pp" else row for row in found.rows)
    planned = replace(found, rows=rows)
    assert f"pp: {plan}" in lines_of(planned, 80)
    (section,) = (one for one in page_of(planned).sections if f"pp: {plan}" in one.text)
    assert section.title == "What else is known"


def test_the_numbers_of_one_device_that_cuts_its_batches_too_are_said_to_be_those(
    machine: Callable[..., Any],
) -> None:
    def faster(setup: Setup, turn: int) -> float:
        return steady(setup, turn) * (2.0 if setup.strategy == "pp" else 1.0)

    machine(
        faster,
        lambda strategy: Agreement(True, 3e-16, micro_batches=4 if strategy == "pp" else 1),
    )
    assert "with single-device results in 4 micro-batches" in sentence(compared(strategies=["pp"]))


def test_batch_norm_over_micro_batches_is_named_and_not_preferred(
    machine: Callable[..., Any],
) -> None:
    def cut(strategy: str) -> Agreement:
        parts = 4 if strategy == "pp" else 1
        return Agreement(True, 0.0, micro_batches=parts, norms_cut=parts > 1)

    machine(lambda setup, turn: 9000.0 if setup.strategy in ("ddp", "pp") else 4000.0, cut)
    said = sentence(compared(strategies=["pp"]))
    assert said.endswith(
        ", with the results of single in 4 micro-batches (BatchNorm normalizes over each of them)."
    )
    machine(steady, lambda strategy: Agreement(True, 0.0, without_dropout=True))
    said = sentence(compared(strategies=["ddp"]))
    assert "with single-device results but for the masks of dropout" in said
    machine(lambda setup, turn: 9000.0 if setup.strategy in ("ddp", "pp") else 4000.0, cut)
    both = compared(strategies=["pp", "ddp"])
    assert sentence(both).startswith("Take ddp: "), "pp takes less memory, but cuts the batch"


def test_a_strategy_that_gains_nothing_clear_is_not_taken(machine: Callable[..., Any]) -> None:
    machine(
        lambda setup, turn: {"single": 100.0, "ddp": (1.0, 103.0, 99.0, 101.0)[turn % 4]}[
            setup.strategy
        ]
    )
    assert sentence(compared(strategies=["ddp"])) == (
        "Take single, 2 cores: no strategy is clearly faster here, ddp is at 1.01 of its rate."
    )
    assert (
        sentence(compared(strategies=["single"]))
        == "Take single, 2 cores: no strategy with single-device results was measured."
    )


def test_strategies_that_could_not_be_measured_are_not_said_to_have_other_numbers(
    machine: Callable[..., Any],
) -> None:
    def only_single(setup: Setup, turn: int) -> float:
        if setup.strategy in ("mp", "pp"):
            raise StrategyError("2 devices, but the model has layers for 1 only")
        return steady(setup, turn)

    machine(only_single, lambda strategy: Agreement(False, 0.3))
    for strategies in (["mp", "pp"], ["dp", "pp"]):
        assert sentence(compared(strategies=strategies)) == (
            "Take single, 4 cores: no strategy with single-device results was measured."
        )


def test_a_map_that_fits_the_model_nowhere_is_said_before_the_turns(
    machine: Callable[..., Any],
) -> None:
    def unknown(setup: Setup, turn: int) -> float:
        if "device_map" in setup.options:
            raise StrategyError('device map: the model has no "conf": did you mean "conv"')
        return steady(setup, turn)

    tried = machine(unknown)
    said: list[str] = []
    found = compared(strategies=["mp", "pp"], device_map={"conf": 0, "": 1}, log=said.append)
    assert all(looks for setup, looks in tried if "device_map" in setup.options)
    before = said[: said.index("round 1/3 done")]
    assert 'mp: failed: device map: the model has no "conf": did you mean "conv"' in before
    assert [row.name for row in found.measured] == ["single, 2 cores", "single, 4 cores"]


def test_the_head_names_every_batch_of_a_sweep(machine: Callable[..., Any]) -> None:
    machine(steady)
    found = compared(strategies=["dp"], sweep={"batch_size": ["32", "64"]})
    assert lines_of(found, 80)[0].startswith("job: batches of 32 or 64 samples, on 2 CPU devices")
    assert page_of(found).notes[0].startswith("Batches of 32 or 64 samples; ")
    assert lines_of(compared(strategies=["dp"]), 80)[0].startswith("job: batches of 8 samples, on")


def test_the_command_ends_with_1_where_nothing_could_be_measured(
    machine: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(setup: Setup, turn: int) -> float:
        raise OutOfMemory("out of memory")

    machine(nothing)
    words = ["compare", "examples/digits.py", "--devices", "2xcpu", "--folder", str(tmp_path)]
    assert cli.main([*words, "-q"]) == 1
    assert "ddp: failed: out of memory\n" in capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    rows = json.loads((folder / "compare.json").read_text())["rows"]
    assert all(row["reason"] == "out of memory" for row in rows)
    assert (folder / "report.html").is_file()


def test_where_one_device_is_not_enough_the_sentence_says_so(machine: Callable[..., Any]) -> None:
    def rule(setup: Setup, turn: int) -> float:
        if setup.strategy == "single":
            raise OutOfMemory("out of memory on cpu:0")
        return steady(setup, turn)

    machine(rule)
    assert sentence(compared(strategies=["mp"])) == (
        "Take mp: one device can't train it (out of memory on cpu:0), with single-device results."
    )

    def nothing(setup: Setup, turn: int) -> float:
        raise OutOfMemory("out of memory")

    machine(nothing)
    assert sentence(compared()) == "Nothing here can train this job: each row has the reason."


# ---- what is measured against what ---------------------------------------------------------------


def test_a_sweep_is_held_against_one_device_with_the_same_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        importlib.import_module("lockstep.launch.devices"), "usable_cores", lambda: (0, 1, 2, 3)
    )
    entries = line_up(
        ["single", "mp", "pp"], "2xcpu", {"microbatches": ["2", "4"], "batch_size": ["8", "16"]}
    )
    by_name = {entry.name: entry for entry in entries}
    assert list(by_name) == [
        "single, 2 cores batch_size=8",
        "single, 4 cores batch_size=8",
        "single, 2 cores batch_size=16",
        "single, 4 cores batch_size=16",
        "mp batch_size=8",
        "pp microbatches=2 batch_size=8",
        "pp microbatches=4 batch_size=8",
        "mp batch_size=16",
        "pp microbatches=2 batch_size=16",
        "pp microbatches=4 batch_size=16",
    ]
    one = by_name["pp microbatches=4 batch_size=16"]
    assert one.setup == Setup("pp", "2xcpu", {"batch_size": 16}, {"microbatches": 4})
    assert (one.one, one.cores) == (
        "single, 2 cores batch_size=16",
        "single, 4 cores batch_size=16",
    )


def test_a_sweep_over_devices_has_a_slot_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("lockstep.launch.devices"), "usable_cores", lambda: (0, 1, 2, 3)
    )
    by_name = {entry.name: entry for entry in line_up(["ddp"], "auto", {"devices": ["2", "4"]})}
    assert list(by_name) == [
        "single, 2 cores",
        "single, 4 cores",
        "single, 1 core",
        "ddp devices=2",
        "ddp devices=4",
    ]
    assert (
        by_name["ddp devices=4"].one == "single, 1 core"
        and by_name["ddp devices=2"].one == "single, 2 cores"
    )
    assert by_name["single, 1 core"].devices == slots(4)[:1]
    rows = [entry.name for entry in line_up(["ddp", "mp", "pp"], "auto", {"devices": ["1", "2"]})]
    assert rows[2:] == ["ddp devices=1", "ddp devices=2", "mp devices=2", "pp devices=2"]
    assert len(line_up(["ddp"], "auto", {})[-1].devices) == 4, (
        "without an accelerator: a slot for each core"
    )


def test_a_sweep_is_a_line_for_each_strategy_that_has_the_setting(
    machine: Callable[..., Any],
) -> None:
    def rule(setup: Setup, turn: int) -> float:
        cut = setup.options.get("microbatches", 1)
        return steady(setup, turn) * (
            1.0 if setup.strategy != "pp" else {1: 0.6, 2: 0.8, 4: 1.0}[cut]
        )

    machine(rule)
    chart = swept(
        compared(strategies=["single", "mp", "pp"], sweep={"microbatches": ["4", "1", "2"]}),
        "microbatches",
    )
    assert chart.x == "micro-batches"
    assert list(chart.series) == ["pp", "single, 4 cores", "mp"]
    assert list(chart.spreads) == ["pp"]
    assert [(value, round(ratio, 2)) for value, ratio in chart.series["pp"]] == [
        (1, 0.99),
        (2, 1.32),
        (4, 1.65),
    ]
    assert [(value, round(ratio, 3)) for value, ratio in chart.series["mp"]] == [
        (1, 0.975),
        (2, 0.975),
        (4, 0.975),
    ]


def swept(found: Comparison, setting: str) -> Lines:
    """The chart of the one setting that was swept."""
    (figure,) = sweeps_of(found)
    assert figure.name == f"sweep-{setting}" and isinstance(figure.chart, Lines)
    return figure.chart


def test_a_sweep_of_the_job_has_a_line_for_each_row_against_one_device(
    machine: Callable[..., Any],
) -> None:
    machine(steady)
    chart = swept(
        compared(strategies=["ddp"], sweep={"batch_size": ["4", "8"], "seed": ["1"]}), "batch_size"
    )
    assert list(chart.series) == ["single, 4 cores seed=1", "ddp seed=1"]
    assert [value for value, _ in chart.series["ddp seed=1"]] == [4, 8]
    chart = swept(
        compared(strategies=["ddp"], devices="auto", sweep={"devices": ["2", "4"]}), "devices"
    )
    assert [value for value, _ in chart.series["ddp"]] == [2, 4]
    chart = swept(compared(strategies=["mp", "pp"], sweep={"split_size": ["4", "2"]}), "split_size")
    assert chart.x == "samples of a micro-batch, at most" and [
        value for value, _ in chart.series["pp"]
    ] == [2, 4]
    assert not list(sweeps_of(compared()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "there is no such file"),
        (
            ["examples/digits.py", "--strategies", "dppp"],
            'there is no strategy "dppp": did you mean',
        ),
        (
            ["examples/digits.py", "--sweep", "microbatches"],
            "write it as --sweep microbatches=1,2,4",
        ),
        (["examples/digits.py", "--sweep", "microbatch=1,2"], 'did you mean "microbatches"?'),
        (
            ["examples/digits.py", "--strategies", "ddp", "--sweep", "microbatches=2"],
            'sweep: "microbatches" is no setting of a job or of ddp',
        ),
        (
            ["examples/digits.py", "--sweep", "lr=1,2"],
            '"lr" is no setting of a job or of single, dp, ddp, mp, pp (and a parameter',
        ),
        (
            ["examples/digits.py", "--strategies", "single dpp"],
            'there is no strategy "dpp": did you mean "pp"?',
        ),
        (
            ["examples/digits.py", "--sweep", "microbatches=none"],
            "microbatches: 'none' is not a whole number",
        ),
        (["examples/digits.py", "--rounds", "0"], "number above 0"),
        (["examples/digits.py", "--seconds", "inf"], "number above 0"),
        (["examples/digits.py", "--seconds", "nan"], "number above 0"),
    ],
)
def test_bad_words_are_one_line(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["compare", *words, "--folder", str(tmp_path / "runs")]) == 2
    error = capfd.readouterr().err.strip()
    assert said in error and "\n" not in error
    assert not (tmp_path / "runs").exists()


# ---- what is kept --------------------------------------------------------------------------------


def test_the_folder_has_all_numbers(machine: Callable[..., Any], tmp_path: Path) -> None:
    machine(steady)
    found = compared(folder=tmp_path)
    folder = Path(found.folder)
    assert folder.parent == tmp_path and folder.name.startswith("job-compare-")
    kept = json.loads((folder / "compare.json").read_text())
    assert [row["name"] for row in kept["rows"]] == [row.name for row in found.rows]
    assert kept["rows"][3]["speed_up"] == pytest.approx(1.85)
    assert kept["best"] == "ddp"


def test_the_options_of_the_command_are_the_rows(
    machine: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machine(steady)
    words = "compare examples/digits.py --strategies dp,pp --devices 2xcpu --sweep microbatches=2,4"
    more = ["--rounds", "1", "--no-parity", "--folder", str(tmp_path), "--json"]
    assert cli.main([*words.split(), *more]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["command"] == "compare" and found["rounds"] == 1
    assert [row["name"] for row in found["rows"]][2:] == [
        "dp",
        "pp microbatches=2",
        "pp microbatches=4",
    ]


def test_a_comparison_that_is_stopped_leaves_nothing(
    machine: Callable[..., Any], tmp_path: Path
) -> None:
    def stopped(setup: Setup, turn: int) -> float:
        raise KeyboardInterrupt

    machine(stopped)
    with pytest.raises(KeyboardInterrupt):
        compared(folder=tmp_path)
    assert not list(tmp_path.iterdir())


# ---- really measured -----------------------------------------------------------------------------


def test_what_each_device_has_of_a_batch_is_observed() -> None:
    tried = attempt(job(), Setup("ddp", "2xcpu"), seconds=0.01, looks=True)
    assert len(tried.peaks) == 2 and tried.started > 0
    assert [one["inputs"] for one in tried.shapes] == [{"": [4, 6]}] * 2
    assert [one["outputs"] for one in tried.shapes] == [{"": [4, 3]}] * 2


@pytest.mark.parametrize("strategy", ["dp", "pp"])
def test_one_process_is_observed(strategy: str) -> None:
    tried = attempt(job(), Setup(strategy, "2xcpu"), seconds=0.01, looks=True)
    assert len(tried.peaks) == 1
    if strategy == "dp":
        assert [one["inputs"] for one in tried.shapes] == [{"": [4, 6]}] * 2
    else:
        (only,) = tried.shapes
        assert only["device"] == "cpu:0" and only["inputs"] == {"": [2, 6]}


def test_the_numbers_of_one_device_are_found_equal() -> None:
    for entry in line_up(["ddp", "pp"], "2xcpu", {})[2:]:
        found = agreement_of(job(), entry)
        assert found.equal and found.difference is not None and found.difference < 1e-12


def test_other_numbers_are_found_to_differ() -> None:
    normed = job(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    )
    entry = line_up(["ddp"], "2xcpu", {})[-1]
    found = agreement_of(normed, entry)
    assert found.equal is False and found.difference is not None and found.difference > 1e-3
    assert str(found).startswith("differs")


def test_what_adam_makes_of_rounding_is_equal_as_verify_finds_it() -> None:
    """A bias before a batch norm has the gradient zero, but for rounding."""
    normed = job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        sync_batchnorm=True,
    ).replace(optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-12))
    found = agreement_of(normed, line_up(["dp"], "2xcpu", {})[-1])
    assert found.difference is not None and found.difference > 1e-10, "nothing is tested"
    assert found.equal


def test_batch_norm_over_micro_batches_is_noted() -> None:
    normed = job(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    found = agreement_of(normed, line_up([PP(microbatches=2)], "2xcpu", {})[-1])
    assert found.equal and found.norms_cut and found.micro_batches == 2


def test_dropout_is_left_out_where_its_masks_differ() -> None:
    def drops() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    found = agreement_of(job(model=drops), line_up(["ddp"], "2xcpu", {})[-1])
    assert found.equal and found.without_dropout


def test_an_agreement_in_words() -> None:
    assert str(largest(torch.zeros(2))) == "0.0", "-0.0 in JSON"
    assert [
        str(one) for one in (Agreement(True, 0.0), Agreement(False, None), Agreement(None, None))
    ] == [
        "equal 0",
        "differs",
        "not known",
    ]


def test_a_comparison_as_a_person_runs_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.py"
    file.write_text("import test_compare\n\njob = test_compare.job()\n")
    words = ["--strategies", "ddp", "--devices", "2xcpu", "--rounds", "1", "--seconds", "0.05"]
    assert cli.main(["compare", str(file), *words, "--folder", str(tmp_path / "runs")]) == 0
    out = capfd.readouterr().out
    assert "single, 1 core" in out and "ddp" in out and "Take " in out
    (folder,) = (tmp_path / "runs").iterdir()
    rows = json.loads((folder / "compare.json").read_text())["rows"]
    assert all(row["rates"] and row["peaks"] and row["started"] > 0 for row in rows)
    assert rows[-1]["name"] == "ddp" and rows[-1]["agreement"]["equal"]


@pytest.mark.slow
def test_every_strategy_is_measured_and_trained(tmp_path: Path) -> None:
    assert isinstance(JobFile("examples/digits.py").load(), lockstep.Job)
    found = lockstep.compare(
        JobFile("examples/digits.py"),
        devices="2xcpu",
        rounds=1,
        seconds=0.05,
        folder=tmp_path,
        epochs=1,
        log=None,
    )
    assert [row.name for row in found.measured][2:] == ["dp", "ddp", "mp", "pp"]
    assert all(
        row.agreement is not None and row.agreement.equal
        for row in found.rows
        if row.role == "strategy"
    )
    losses = [row.history[-1]["eval_loss"] for row in found.rows if row.history]
    assert len(losses) == 5 and max(losses) - min(losses) < 1e-3


def test_under_torchrun_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(InputError, match="start it without torchrun"):
        compared()


def test_the_line_to_paste_has_the_strategys_own_settings() -> None:
    setup = Setup(
        "pp", "2xcpu", {"batch_size": 4}, {"microbatches": 8, "device_map": {"stem": 0, "": 1}}
    )
    assert setup.line(JobFile("a.py", {"lr": "0.1"}, {"epochs": 3})) == (
        "lockstep train a.py --set lr=0.1 --strategy pp --devices 2xcpu --microbatches 8 "
        """--map '{"stem": 0, "": 1}' --epochs 3 --batch-size 4"""
    )
    one = Setup("single", slots(2)[:1], {"seed": 1})
    threads = f"OMP_NUM_THREADS={slots(2)[0].threads}"
    assert one.line(JobFile("a.py")) == (
        f"{threads} lockstep train a.py --strategy single --devices 1xcpu --seed 1"
    )
    assert one.line(job()).endswith(
        '; lockstep.train(job, strategy="single", devices="1xcpu", seed=1)'
    )
    assert setup.replace().line(job()) == (
        'lockstep.train(job, strategy=named("pp", microbatches=8, device_map={"stem": 0, "": 1}), '
        'devices="2xcpu", batch_size=4)'
    )
