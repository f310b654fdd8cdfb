"""`python -m benchmarks gpu` with a few samples: every measurement runs, on one card and on two."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu
from lockstep.launch.devices import Device


@pytest.mark.slow
def test_each_measurement_for_a_gpu_runs_on_cards(tmp_path) -> None:
    rows = gpu.run(gpu.TINY, tmp_path)
    assert [row["failed"] for row in rows if "failed" in row] == []
    assert all(ratio["median"] > 0 for row in rows for ratio in row["ratios"])
    names = (
        "resnet50 small experiment ddp stages look two-cards images replicas-resnet50 "
        "replicas-small loss loss-memory"
    )
    assert [row["benchmark"] for row in rows] == names.split()
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["machine"]["accelerators"].startswith("card") and len(kept["rows"]) == len(rows)


def test_a_measurement_that_fails_is_a_row_and_none_begins_too_late(tmp_path, monkeypatch) -> None:
    def broken(card: gpu.Card, sizes: gpu.Sizes) -> gpu.Turns:
        assert card.device == Device("card", 0)
        raise RuntimeError("out of cards")

    monkeypatch.setattr(gpu, "small", broken)
    rows = gpu.run(gpu.TINY, tmp_path, ["small"])
    assert rows[0]["failed"] == "RuntimeError: out of cards"
    assert "FAILED" in gpu.table(rows)
    late = gpu.run(gpu.TINY, tmp_path, ["small", "loss"], patience=-1.0)
    assert [row["failed"] for row in late] == ["TimeoutError: left out: 0 s are gone"] * 2
