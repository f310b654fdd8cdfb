"""examples/translation_transformer.py: its numbers, its model, and that it learns the same with
a parallel loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.jobfile import loaded

FILE = str(Path(__file__).parents[2] / "examples" / "translation_transformer.py")
example = loaded(FILE)


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_numbers_have_their_english_names() -> None:
    names = {
        0: "zero",
        15: "fifteen",
        40: "forty",
        99: "ninety nine",
        407: "four hundred seven",
        1000: "one thousand",
        13_018: "thirteen thousand eighteen",
        999_999: "nine hundred ninety nine thousand nine hundred ninety nine",
    }
    for n, name in names.items():
        assert example.name(n) == name
    every = [example.name(n) for n in range(0, 1_000_000, 37)]
    assert len(set(every)) == len(every)
    assert max(len(name.split()) for name in every) < example.LONGEST
    assert len(set(example.TOKENS)) == len(example.TOKENS)


def test_a_tenth_of_the_numbers_of_each_length_is_held_out_and_never_drawn() -> None:
    held_out = [
        sum(map(example.is_held_out, range(10**d, 10 ** (d + 1)))) / (9 * 10**d)
        for d in range(2, 6)
    ]
    assert held_out == pytest.approx([0.1] * 4, abs=0.015)
    drawn = example.numbers(500, False, random.Random(0))
    assert not any(map(example.is_held_out, drawn))
    assert all(map(example.is_held_out, example.numbers(500, True, random.Random(0))))
    assert {len(str(n)) for n in drawn} == {1, 2, 3, 4, 5, 6}


def test_a_place_sees_neither_what_comes_after_it_nor_padding(_float64: None) -> None:
    torch.manual_seed(0)
    model = example.Transformer(len(example.TOKENS), 0, 16, 2, 4, 0.0, 20).eval()
    source, target = example.translated([7, 123_456])
    both = model(source, target)
    torch.testing.assert_close(
        model(source[:1, :1], target[:1, :2])[0], both[0, :2], rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        model(source[1:], target[1:, :5])[0], both[1, :5], rtol=0, atol=1e-12
    )


def test_it_learns_the_same_with_a_parallel_loss(_float64: None) -> None:
    small = {"updates": 6, "batch_size": 9, "width": 16, "layers": 1, "dropout": 0.0, "warm_up": 3}
    model, losses = example.train(False, **small)
    for devices in ("1xcpu", "2xcpu"):
        other, found = example.train(True, devices=devices, **small)
        assert found == pytest.approx(losses, rel=1e-10)
        for (name, expected), weight in zip(
            model.named_parameters(), other.parameters(), strict=True
        ):
            if not name.endswith(
                "in_proj_bias"
            ):  # that of the keys acts on nothing: Adam moves it by rounding alone
                torch.testing.assert_close(weight, expected, rtol=0, atol=1e-8, msg=name)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_names_99_of_100_numbers_held_out() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # with more, busy cores take ten times as long, and numbers depend on how many there are
    try:
        model, _ = example.train()
    finally:
        torch.set_num_threads(threads)
    assert example.exact(model, example.numbers(2000, True, random.Random(1))) >= 0.99
