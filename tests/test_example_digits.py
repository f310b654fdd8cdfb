"""examples/digits.py, the job that `make demo` trains."""

from __future__ import annotations

from pathlib import Path

import lockstep

FILE = Path(__file__).parents[1] / "examples" / "digits.py"


def test_digits_are_learned_in_a_few_epochs(tmp_path: Path) -> None:
    run = lockstep.train(FILE, strategy="ddp", devices="2xcpu", epochs=4, folder=tmp_path, quiet=True)
    assert run.metrics["accuracy"] > 0.9
