"""examples/char_lm.py: what it counts, that it learns under every strategy, and how far it gets."""

from __future__ import annotations

import collections
import math
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.jobfile import JobFile, loaded

FILE = str(Path(__file__).parents[2] / "examples" / "char_lm.py")
TINY = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "context": 40,
    "size": 12_000,
    "updates": 24,
    "lr": 0.02,
}
char_lm = loaded(FILE)


def trained(strategy: str, devices: str, folder: Path) -> lockstep.Run:
    job = JobFile(FILE, TINY)
    return lockstep.train(
        job, strategy=strategy, devices=devices, folder=folder, precision="fp64", quiet=True
    )


def test_windows_are_whole_lines_and_lose_nothing() -> None:
    text = b"one\n\ntwo and three\n" + 50 * b"x" + b"\nlast, without an end"
    spans = char_lm.windows(text, 15)
    assert [text[start:end] for start, end in spans[:2]] == [b"one\n\n", b"two and three\n"]
    assert b"".join(text[start:end] for start, end in spans) == text
    assert [end - start for start, end in spans] == [5, 14, 15, 15, 15, 6, 15, 5]


def test_every_byte_is_a_target_once_after_the_byte_before_it() -> None:
    text = char_lm.standard_library(12_000)[1]
    samples = list(char_lm.Windows(text, 40))
    assert bytes(torch.cat([targets for _, targets in samples]).tolist()) == text
    assert bytes(torch.cat([inputs for inputs, _ in samples]).tolist()) == b"\n" + text[:-1]


def test_padding_is_neither_counted_nor_seen() -> None:
    torch.manual_seed(0)
    model = char_lm.GPT(256, 40, 16, 2, 2).double()
    data = char_lm.Windows(char_lm.standard_library(12_000)[1], 40)
    samples = [data[i] for i in range(9)]
    assert len({len(targets) for _, targets in samples}) > 3
    inputs, targets = char_lm.padded(samples)
    total, count = char_lm.nats(model(inputs), targets)
    alone = [char_lm.nats(model(x[None]), y[None])[0].item() for x, y in samples]
    assert total.item() == pytest.approx(sum(alone), rel=1e-12)
    assert count == sum(len(y) for _, y in samples)


def test_the_standard_library_is_cut_by_files_and_its_end_is_held_out() -> None:
    train, held_out = char_lm.standard_library(100_000)
    assert len(train) + len(held_out) == 100_000
    assert len(held_out) >= 10_000
    assert (train + held_out).startswith(train[:5000])
    with pytest.raises(ValueError, match="have only"):
        char_lm.standard_library(1 << 40)


def test_bigrams_are_counted_with_one_added_to_each() -> None:
    train, held_out = b"abracadabra\n", b"acab"
    pairs = collections.Counter(zip(b"\n" + train, train, strict=False))
    firsts = collections.Counter(b"\n" + train[:-1])
    logs = [
        math.log((pairs[a, b] + 1) / (firsts[a] + 256))
        for a, b in zip(b"\n" + held_out, held_out, strict=False)
    ]
    expected = math.exp(-sum(logs) / len(logs))
    assert char_lm.bigram_perplexity(train, held_out) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_it_learns_the_same_by_every_strategy(tmp_path: Path) -> None:
    reference = trained("single", "1xcpu", tmp_path)
    losses = [record["train_loss"] for record in reference.history]
    assert losses[-1] < losses[0] - 0.5
    assert reference.metrics["bits"] == pytest.approx(
        reference.metrics["loss"] / math.log(2), rel=1e-12
    )
    for strategy, devices in (("ddp", "2xcpu"), ("dp", "2xcpu")):
        run = trained(strategy, devices, tmp_path)
        assert run.metrics == pytest.approx(reference.metrics, rel=1e-8)
        assert [record["train_loss"] for record in run.history] == pytest.approx(losses, rel=1e-8)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_its_perplexity_is_less_than_half_of_a_bigram_models(tmp_path: Path) -> None:
    run = lockstep.train(FILE, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    bigrams = char_lm.bigram_perplexity(*char_lm.standard_library(3_000_000))
    assert math.exp(run.metrics["loss"]) < bigrams / 2
