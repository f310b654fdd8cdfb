"""A strategy that is new is one file and one line: it is then in the command, in compare, in
verify and in the docs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import cli, train, verify
from lockstep.strategies import STRATEGIES

from strategy_of_ones_own import EveryOther  # isort: skip
from docs_pages import table_of_strategies  # isort: skip
from zoo import ZOO, mlp  # isort: skip

JOB = """
import sys
sys.path.insert(0, {tests!r})
from zoo import ZOO
job = ZOO["mlp"]
"""


@pytest.fixture(autouse=True)
def _listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(STRATEGIES, "every_other", EveryOther)
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB.format(tests=str(Path(__file__).parents[1])))


def test_it_updates_on_even_steps_only(tmp_path: Path) -> None:
    def weights(**settings: Any) -> torch.Tensor:
        run = train(ZOO["mlp"], folder=tmp_path, quiet=True, devices="1xcpu", **settings)
        return torch.cat([p.flatten() for p in run.model().parameters()])

    first = torch.cat([p.double().flatten() for p in run_model_at_start().parameters()])
    assert torch.equal(weights(strategy="every_other", steps=1), first)
    assert not torch.equal(weights(strategy="every_other", steps=2), first)
    assert torch.equal(
        weights(strategy=EveryOther(every=1), steps=3), weights(strategy="single", steps=3)
    )


def run_model_at_start() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(ZOO["mlp"].seed)
        return mlp()


def test_the_command_trains_by_it_and_has_its_settings(capsys: Any) -> None:
    assert (
        cli.main(
            ["train", "job.py", "--strategy", "every_other", "--every", "3", "--devices", "1xcpu"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "note: every_other updates on even steps only, so results differ" in out
    (folder,) = Path("runs").iterdir()
    assert json.loads((folder / "config.json").read_text())["strategy_settings"] == {"every": 3}
    with pytest.raises(SystemExit):
        cli.main(["train", "--strategy", "every_other", "--help"])
    assert "--every" in capsys.readouterr().out


@pytest.mark.slow
def test_compare_has_a_row_for_it(capsys: Any) -> None:
    words = [
        "--strategies",
        "single,every_other",
        "--devices",
        "1xcpu",
        "--rounds",
        "1",
        "--seconds",
        "0.05",
    ]
    assert cli.main(["compare", "job.py", *words]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert rows.count("every_other") >= 1


def test_verify_names_its_caveat() -> None:
    found = verify(ZOO["mlp"], strategy="every_other", devices="1xcpu")
    assert not found.equal
    assert [cause.kind for cause in found.causes] == ["declared"]


def test_the_table_of_the_docs_has_it() -> None:
    assert (
        f"| `every_other` | {EveryOther.summary} | {EveryOther.good_for} |" in table_of_strategies()
    )
