"""examples/map_predict.py: a function over processes feeds a model over devices."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.mark.slow
def test_digits_turned_upright_by_processes_are_read_by_a_model_on_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    assert importlib.import_module("map_predict").main("2xcpu", epochs=6) > 0.9
