"""examples/notebook.ipynb: its cells, run in order in a process of their own, as a notebook runs
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
PACKAGE = str(Path(__file__).parents[2] / "src")

KERNEL = """
import json, sys

for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"<{cell['id']}>", "exec"))
print(json.dumps([run.metrics, predicted.tolist(), labels[1400:1410].tolist(), losses]))
"""


def notebook() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def test_the_notebook_is_of_format_4_and_keeps_no_outputs() -> None:
    content = notebook()
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    for cell in content["cells"]:
        expected = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            expected |= {"execution_count", "outputs"}
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
        assert set(cell) == expected
        assert cell["cell_type"] in ("code", "markdown")
        assert all(line.endswith("\n") for line in cell["source"][:-1])


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": PACKAGE, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", KERNEL, str(FILE)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    metrics, predicted, labels, losses = json.loads(done.stdout.splitlines()[-1])
    assert metrics["accuracy"] > 0.85
    assert sum(p == label for p, label in zip(predicted, labels, strict=True)) >= 8
    assert sum(losses[-1]) < sum(losses[0]) / 2
    assert [path.name.startswith("job-ddp-") for path in (tmp_path / "runs").iterdir()] == [True]
