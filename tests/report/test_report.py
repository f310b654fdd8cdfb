"""The report: one file that needs nothing else, figures with their numbers, a page that a
browser shows.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.cli import command as cli
from lockstep.compare import comparison_folder
from lockstep.compare.agreement import Agreement
from lockstep.compare.comparison_page import page_of, write_page
from lockstep.compare.result import Comparison, Row
from lockstep.errors import SampleError
from lockstep.report.charts import Bars, Lines
from lockstep.training.records.run_page import write_page as page_of_run
from zoo import ZOO, drawn, labels, mlp, plain_sgd

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
KINDS = ("computing", "communicating", "waiting", "loading", "other")


def planted(folder: Path, **settings: Any) -> Comparison:
    """A comparison with one of everything: a sweep, what differs, what failed, curves."""

    def row(name: str, strategy: str, speed: float, count: int = 2, **more: Any) -> Row:
        seen = tuple(
            {"device": f"cpu:{i}", "inputs": {"": [8, 6]}, "outputs": {"": [8, 3]}}
            for i in range(count)
        )
        history = tuple(
            {
                "epoch": e + 1,
                "step": 4 * e,
                "train_loss": 2.0 / (e + 1),
                "eval_loss": 2.1 / (e + 1),
                "accuracy": 0.2 * e,
            }
            for e in range(4)
        )
        values: dict[str, Any] = {
            "role": "strategy",
            "agreement": Agreement(True, 3e-16),
            "peaks": (400_000_000,) * (2 if strategy == "ddp" else 1),
            "rates": (speed, speed * 1.02, speed * 0.97),
            "shapes": seen,
            "history": history,
            "started": 1.5,
            **more,
        }
        devices = tuple(f"cpu:{i}" for i in range(count))
        return Row(
            name=name,
            strategy=strategy,
            settings={},
            devices=devices,
            where=f"{count} CPU devices of 1 core",
            line=f"lockstep train jobs/mine.py --strategy {strategy}",
            one="single, 1 core",
            cores="single, 2 cores",
            **values,
        )

    rows = (
        row("single, 1 core", "single", 1000.0, 1, role="one device", agreement=None),
        row("single, 2 cores", "single", 1700.0, 1, role="all cores", agreement=None, history=()),
        row(
            "dp",
            "dp",
            1500.0,
            agreement=Agreement(False, 0.1),
            caveats=("BatchNorm is over the share",),
        ),
        row("ddp", "ddp", 1900.0),
        row("pp microbatches=4", "pp", 1600.0),
        row(
            "pp microbatches=64",
            "pp",
            0.0,
            rates=(),
            shapes=(),
            history=(),
            peaks=(),
            reason="out of memory",
        ),
    )
    found = Comparison(
        "jobs/mine.py",
        16,
        3,
        2.0,
        {"cores": 2},
        True,
        rows,
        str(folder),
    )
    return replace(found, **settings)


class Read(HTMLParser):
    """What a page refers to, its pictures, its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refers: list[str] = []
        self.pictures: list[str] = []
        self.words = ""
        self.tags: list[str] = []
        self._silent = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags.append(tag)
        self._silent = tag in ("style", "script")
        self.refers += [given[name] or "" for name in ("src", "href", "srcset") if name in given]
        if tag == "img":
            self.pictures.append(given["alt"] or "")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.words += data


def test_the_report_is_one_file_that_refers_to_nothing_else(tmp_path: Path) -> None:
    text = write_page(planted(tmp_path)).read_text()
    page = Read(text)
    assert page.refers and all(where.startswith("data:") for where in page.refers)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "script" not in page.tags
    for said in (
        "Take ddp: 1.90 times one CPU device",
        "Speed-ups on GPUs may be larger or smaller",
        "out of memory",
        "--strategy ddp",
    ):
        assert said in page.words
    assert "dp: BatchNorm is over the share" in page.words
    assert "equal 3e-16" in page.words and "8 x 3" in page.words


def test_every_figure_is_a_picture_a_text_and_a_file(tmp_path: Path) -> None:
    page = Read(write_page(planted(tmp_path)).read_text())
    figures = tmp_path / "figures"
    assert {path.name for path in figures.iterdir()} == {
        "speed.png",
        "train-loss.png",
        "eval-loss.png",
    }
    assert page.pictures == [
        "A chart of Samples per second.",
        "A chart of Training loss.",
        "A chart of Evaluation loss.",
    ]
    for path in figures.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_sweep_is_drawn_with_its_spreads_and_what_it_is_held_against(tmp_path: Path) -> None:
    found = planted(tmp_path)
    rows = []
    for count, speed in ((1, 900.0), (2, 1300.0), (8, 1600.0)):
        rates = (speed, speed * 1.02, speed * 0.97)
        rows.append(
            replace(found["pp microbatches=4"], name=f"pp microbatches={count}", rates=rates)
        )
        rows[-1] = replace(rows[-1], settings={"microbatches": count})
    page = Read(write_page(replace(found, rows=(*found.rows[:2], found["ddp"], *rows))).read_text())
    assert "Speed-up over one CPU device, by micro-batches" in page.words
    assert any("Speed-up over one CPU device, by micro-batches" in alt for alt in page.pictures)


def test_curves_have_a_point_for_each_epoch(tmp_path: Path) -> None:
    found = planted(tmp_path)
    within = {"epoch": 2, "step": 5, "eval_loss": 9.0}
    history = (*found["ddp"].history[:1], within, *found["ddp"].history[1:])
    rows = [replace(row, history=history if row.name == "ddp" else ()) for row in found.rows]
    (section,) = (
        one for one in page_of(replace(found, rows=rows)).sections if "learned" in one.title
    )
    (chart,) = (part.chart for part in section.parts if getattr(part, "name", "") == "eval-loss")
    assert list(chart.series) == ["ddp"] and chart.series["ddp"][1] == (2.0, 1.05)


def test_nothing_that_a_person_named_becomes_part_of_the_page(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>'
    found = planted(
        tmp_path,
        job=f"{evil}.py",
        machine={"cores": 2, "name": evil},
    )
    rows = tuple(
        replace(row, caveats=(evil,), history=({"epoch": 1, "train_loss": 1.0, evil: 0.5},))
        for row in found.rows
    )
    page = Read(write_page(replace(found, rows=rows)).read_text())
    assert "script" not in page.tags and evil in page.words


def test_a_dollar_in_a_name_is_no_formula(tmp_path: Path) -> None:
    chart = Bars(
        "$ per hour", ["cost $x_1", "a $^"], [1.0, 2.0], [(1.0, 1.0), (2.0, 2.0)], ["", "$"]
    )
    chart.draw().canvas.draw()
    Lines("epoch", "$", {"$a^": [(1.0, 2.0)]}).draw().canvas.draw()


def test_charts_have_nothing_outside_of_their_canvas() -> None:
    names = ["single, 1 core", "pp microbatches=16 batch_size=4096"]
    for chart in (
        Bars(
            "samples per second",
            names,
            [1000.0, 12345.0],
            [(900.0, 1100.0), (12000.0, 14000.0)],
            ["", "1.85 x"],
        ),
        Lines("epoch", "loss", {name: [(1.0, 2.0), (2.0, 1.0)] for name in names}),
        Lines(
            "micro-batches",
            "times one CPU device",
            {names[0]: [(1.0, 0.9), (64.0, 1.5)], names[1]: [(1.0, 1.2), (64.0, 1.2)]},
            {names[0]: [(0.8, 0.9), (1.4, 1.6)]},
            chosen=True,
        ),
    ):
        figure = chart.draw()
        figure.canvas.draw()
        whole = figure.bbox
        for axes in figure.axes:
            for text in (*axes.texts, *axes.get_yticklabels()):
                box = text.get_window_extent()
                assert box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1, (
                    f"{text.get_text()} sticks out"
                )


def test_values_that_were_chosen_are_marked_on_their_axis() -> None:
    for values, scale in (((32, 48, 64), "linear"), ((1, 2, 8), "log")):
        points = [(x, 1.0) for x in values]
        chart = Lines("samples", "times one CPU device", {"dp": points}, chosen=True)
        (axes,) = chart.draw().axes
        assert axes.get_xscale() == scale
        assert [label.get_text() for label in axes.get_xticklabels()] == [str(x) for x in values]


def test_without_the_extra_the_tables_are_there_and_the_report_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in ("jinja2", "matplotlib.figure"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            lines: list[str] = []
            comparison_folder.log_comparison(planted(tmp_path), lines.append)
            assert any("pip install 'torch-lockstep[report]'" in line for line in lines)
            assert any(line.startswith("Take ddp") for line in lines)
            assert (tmp_path / "compare.json").is_file()


# ---- of a run ------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> lockstep.Run:
    job = ZOO["mlp"].replace(metrics={"clean/<b>": ZOO["mlp"].metrics["accuracy"]})
    return lockstep.train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)


def test_the_page_of_a_run(run: lockstep.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run.folder)]) == 0
    page = Read((run.folder / "report.html").read_text())
    assert all(where.startswith("data:") for where in page.refers) and "b" not in page.tags
    for said in (
        "job: dp on 2 devices",
        "eval_loss",
        "clean/<b>",
        "after 2 epochs",
        "save_frozen",
    ):
        assert said in page.words + " ".join(page.pictures)
    assert {path.stem for path in (run.folder / "figures").glob("*.png")} == {
        "loss",
        "clean--b-",
    }
    assert lockstep.Run.open(run.folder).summary, "the run is as it was"


def test_the_page_of_a_run_that_was_stopped(run: lockstep.Run) -> None:
    (run.folder / "summary.json").unlink()
    assert cli.main(["report", str(run.folder)]) == 0
    assert (
        "The training was stopped before its end."
        in Read((run.folder / "report.html").read_text()).words
    )
    (run.folder / "metrics.jsonl").unlink()
    assert cli.main(["report", str(run.folder)]) == 0


class Breaking(TensorDataset):
    """Its samples are lost after some epochs, until somebody repairs it."""

    taken, broken = 0, True

    def __getitem__(self, i: int) -> Any:
        Breaking.taken += 1
        if Breaking.broken and Breaking.taken > 40:
            raise OSError("<i>the disk</i> is gone")
        return super().__getitem__(i)


def test_the_page_of_a_run_that_failed_says_why_until_it_goes_on(tmp_path: Path) -> None:
    data = Breaking(drawn(12, 6), labels(12, 3))
    broken = job(4).replace(train_data=data, epochs=5)
    with pytest.raises(SampleError):
        lockstep.train(broken, devices=1, folder=tmp_path, quiet=True)
    (folder,) = tmp_path.iterdir()
    page = Read(page_of_run(folder).read_text())
    assert "The training failed: " in page.words and "<i>the disk</i> is gone" in page.words
    assert "stopped before its end" not in page.words
    Breaking.broken = False
    lockstep.train(broken, resume=folder, quiet=True)
    assert "The training failed" not in Read(page_of_run(folder).read_text()).words


def job(size: int) -> lockstep.Job:
    data = TensorDataset(drawn(12, 6), labels(12, 3))
    return lockstep.Job(
        model=mlp, loss=nn.CrossEntropyLoss(), optimizer=plain_sgd, train_data=data, batch_size=size
    )


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "no run is kept there (it has no config.json)" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no run is kept there (there is no such folder)" in capsys.readouterr().err


# ---- in a browser --------------------------------------------------------------------------------

_FRAMES = """<html><body>
<iframe src="{page}" style="width:380px;height:800px"></iframe>
<iframe src="{page}" style="width:1200px;height:800px"></iframe>
<pre id="out"></pre>
<script>
window.onload = () => {{
  const seen = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument, root = page.documentElement;
    return {{wide: root.scrollWidth, room: root.clientWidth, title: page.title,
             pictures: [...page.images].map(one => one.naturalWidth)}};
  }});
  document.getElementById("out").textContent = JSON.stringify(seen);
}};
</script></body></html>"""


def browsed(page: str, folder: Path) -> tuple[str, str, list[str]]:
    """What a headless browser makes of a page: its document, what it says, the addresses that it
    asks for.
    """
    assert CHROMIUM is not None
    log = folder / "net.json"
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--allow-file-access-from-files",
    ]
    words += [
        "--disable-background-networking",
        "--disable-component-update",
        "--enable-logging=stderr",
    ]
    words += [
        f"--user-data-dir={folder / 'browser'}",
        f"--log-net-log={log}",
        "--virtual-time-budget=5000",
    ]
    done = subprocess.run(
        [CHROMIUM, *words, "--dump-dom", page],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    asked = set(re.findall(r'"url":"((?:https?|wss?|ftp)://[^"]*)"', log.read_text()))
    # The browser's own, which it asks for with any page.
    own = re.compile(r"https?://([\w.-]+\.)?(google|googleapis|gstatic|gvt1)\.com/")
    return done.stdout, said, sorted(address for address in asked if not own.match(address))


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium is installed here (apt-get install chromium)"
)
def test_a_browser_shows_it_narrow_and_wide_without_an_error_or_a_request(tmp_path: Path) -> None:
    page = write_page(planted(tmp_path)).as_uri()
    _, said, asked = browsed(page, tmp_path)
    assert (said, asked) == ("", [])
    frames = tmp_path / "frames.html"
    frames.write_text(_FRAMES.format(page=page))
    document, _, _ = browsed(frames.as_uri(), tmp_path)
    found = re.search(r'<pre id="out">(.*?)</pre>', document)
    assert found is not None
    narrow, wide = json.loads(found[1])
    assert narrow["title"] == "mine.py: strategies side by side"
    for frame in (narrow, wide):
        assert frame["wide"] <= frame["room"], "the page itself doesn't scroll sideways"
        assert len(frame["pictures"]) == 3 and all(frame["pictures"])


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium is installed here (apt-get install chromium)"
)
def test_the_browser_of_these_tests_would_have_seen_a_request_and_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<img src="http://nowhere.invalid/a.png"><script>console.error("planted")</script>'
    )
    _, said, asked = browsed(page.as_uri(), tmp_path)
    assert "planted" in said and asked == ["http://nowhere.invalid/a.png"]
