"""docs/performance.md and its charts are what `python -m benchmarks page` writes, and leave no
result out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks import page
from benchmarks.__main__ import BENCHMARKS
from benchmarks.ratio_chart import Bar, chart

OWED = (page.HERE / "gpu-owed.md").read_text()


def test_the_page_and_its_charts_are_what_the_results_say() -> None:
    for path, text in page.written(page.read(), OWED).items():
        assert (page.DOCS / path).read_text() == text, f"{path}: run make performance"


def test_every_result_is_on_the_page() -> None:
    text = (page.DOCS / "performance.md").read_text()
    shown = re.findall(r"\(\.\./benchmarks/results/([\w.-]+)\)", text)
    assert set(shown) == {path.name for path in page.RESULTS.glob("*.json")}
    results = page.read()
    sections = [*page.SECTIONS, page.gpu_section(results)]
    wanted = [row for name in results for row in page.rows(results, name)]
    tables = [row for section in sections for row in section.rows(results)]
    assert sorted(map(str, wanted)) == sorted(map(str, tables))


def test_a_benchmark_without_a_file_is_named() -> None:
    missing = {name for name in BENCHMARKS if not (page.RESULTS / f"{name}.json").exists()}
    assert missing == set(page.NOT_RECORDED) - {"verifying"}


def test_what_gpus_owe_has_a_title_for_each_item() -> None:
    assert len(page.titles(OWED)) == len(re.findall(r"^\d+\. ", OWED, re.MULTILINE))


def test_bytes_are_turned_and_what_misses_its_goal_is_bold(tmp_path: Path) -> None:
    """Rates of bytes are one over them; of bytes less is better."""
    ratio = {"of": "a", "to": "b", "median": 4.0, "spread": [2.0, 5.0], "goal": 8.0}
    kept = {"recorded": "2026-01-01", "unit": "1 / GB", "ratios": [ratio], "rates": {"a": [1, 2]}}
    (tmp_path / "thing.json").write_text(json.dumps(kept))
    (row,) = page.rows(page.read(tmp_path), "thing")
    assert (row.median, row.spread, row.goal, row.rounds) == (0.25, [0.2, 0.5], 0.125, 2)
    assert row.less and row.missed


def test_a_chart_has_its_bars_apart_and_fetches_nothing() -> None:
    bars = [
        Bar("left", "2.00", 2.0, (1.9, 2.1), 1.5, False),
        Bar("a & b", "0.50", 0.5, (0.4, 0.6), 1, True),
    ]
    text = chart("A title", bars)
    assert text.count('class="met"') == text.count('class="missed"') == 1
    assert "a &amp; b" in text and "prefers-color-scheme: dark" in text
    assert not re.search("script|href|url", text)
    for path in (page.DOCS / "pictures").glob("performance-*.svg"):
        rows = re.findall(
            r'<text x="12"[^>]*>(.*?)</text>\n<text[^>]*>(.*?)</text>', path.read_text()
        )
        assert rows and all(len(label) + len(number) <= 64 for label, number in rows), path
