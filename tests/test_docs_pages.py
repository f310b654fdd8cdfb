"""The tour, the pages on comparing, resuming and exporting, and the README: each block prints
what is shown.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from docs_pages import ROOT, Piece, blocks, difference, pieces, printed

TOUR = ROOT / "docs" / "tour.md"
STRATEGIES = sorted((ROOT / "docs" / "strategies").glob("*.md"))


def each(*of: Piece) -> list[Any]:
    """A parameter for each piece; the slow ones are marked."""
    found = []
    for number, piece in enumerate(of):
        name = f"{piece.heading} {number}".replace("`", "")
        marks = [pytest.mark.slow] if "slow" in piece.block.said else []
        if "--format onnx" in piece.block.text and importlib.util.find_spec("onnxruntime") is None:
            marks.append(pytest.mark.skip(reason="onnxruntime isn't installed"))
        found.append(pytest.param(piece, id=name, marks=marks))
    return found


@pytest.mark.parametrize("piece", each(*pieces(ROOT / "README.md", ("console",))))
def test_the_readme_prints_what_it_shows(
    piece: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _holds(piece, tmp_path, monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "piece",
    each(
        *pieces(TOUR),
        *pieces(ROOT / "docs" / "compare.md", ("console",)),  # by make pictures
        *pieces(ROOT / "docs" / "resume.md"),
        *(piece for piece in pieces(ROOT / "docs" / "jobs.md") if piece.output is not None),
        *pieces(ROOT / "docs" / "export.md"),
        *pieces(ROOT / "docs" / "install.md"),
        *pieces(ROOT / "docs" / "five-minutes.md"),
        *(piece for page in STRATEGIES for piece in pieces(page)),
    ),
)
def test_the_pages_print_what_they_show(
    piece: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _holds(piece, tmp_path, monkeypatch)


def _holds(piece: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = printed(piece)
    shape = "shape" in piece.block.said
    shown = (
        [piece.shown] if piece.output is not None else [lines for _, lines in piece.block.commands]
    )
    for wanted, got in zip(shown, found, strict=True):
        assert not (said := difference(wanted, got, shape=shape)), said


def test_every_system_of_the_tour_has_a_picture_and_something_that_runs() -> None:
    by_heading: dict[str, list[str]] = {}
    for block in blocks(TOUR):
        by_heading.setdefault(block.heading, []).append(block.language)
    systems = {heading: found for heading, found in by_heading.items() if heading[:1].isdigit()}
    assert len(systems) >= 13
    for heading, found in systems.items():
        assert "" in found and {"python", "console"} & set(found), heading
    assert sum("elsewhere" in block.said for block in blocks(TOUR)) <= 1


SHOWN = ["epoch   1  loss 0.5012  accuracy 0.9000  1,234 samples/s", "...", "inputs 30 x 8", "done"]
GOT = [
    "epoch 1  loss 0.5013  accuracy 0.9000  99 samples/s",
    "note: a",
    "note: b",
    "inputs 30 x 8",
    "done",
]


def test_what_may_differ_is_not_held_against_a_page() -> None:
    assert difference(SHOWN, GOT) == ""
    assert (
        difference(
            ["a 12 MiB", "Take ddp: 1.9", "times it"], ["a 1.5 GiB", "", "Take dp: 1"], shape=True
        )
        == ""
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0.5013", "0.5213"),
        ("30 x 8", "30 x 9"),
        ("done", "failed"),
        ("0.9000", "0.9000  more"),
        ("epoch 1", "epoch 2"),
    ],
)
def test_what_may_not_differ_is(before: str, after: str) -> None:
    got = [line.replace(before, after) for line in GOT]
    assert got != GOT and difference(SHOWN, got)
    assert (
        difference(SHOWN, GOT[:-1])
        and difference(SHOWN[:1], GOT)
        and difference(SHOWN, [*GOT, "and more"])
    )


def test_a_shape_is_held_to_its_words_and_rows() -> None:
    assert difference(["ddp 1.8 2 x 391 MiB"], ["ddp 1.2 1.1 GiB"], shape=True)
    assert difference(["dp 1", "ddp 2"], ["dp 1"], shape=True)
    assert difference(["...", "dp 1", "ddp 2", "..."], ["a", "dp 1", "mp 3", "b"], shape=True)
    assert not difference(["1,450, 1,700"], ["26.3, 12"], shape=True)
    assert not difference(
        ["...", "3 turns of 2 s", "each", "..."], ["a", "2 turns", "of 0.1 s each", "b"], shape=True
    )
