"""A Transformer that translates numbers to English, with the loss on every device: "4 0 7" to "four
hundred seven".

python examples/translation_transformer.py [--parallel]

A loop of your own. Source, target and output layer share one embedding; the loss has label
smoothing, the learning rate a warm-up. With ``--parallel`` the trunk runs on two slots, its outputs
stay there, and ``ParallelLoss`` works through them there, four time steps at a time, with the same
numbers. A tenth of the numbers from 100 to 999,999 is for evaluation; after the 1,600 updates (two
to three minutes of two cores) 2,000 of 2,000 of those were named right to the last word.
"""

import argparse
import random
from collections.abc import Callable

import torch
from models.transformer import Transformer
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from lockstep.parallel import DataParallel, ParallelLoss

TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
TEENS = ["thir", "four", "fif", "six", "seven", "eigh", "nine"]
ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ONES += ["ten", "eleven", "twelve", *(f"{teen}teen" for teen in TEENS)]
TOKENS = ["<padding>", "<start>", "<end>", *"0123456789", *ONES, *TENS, "hundred", "thousand"]
PADDING, START, END = 0, 1, 2
NUMBER = {token: i for i, token in enumerate(TOKENS)}
LONGEST = 12
"""Words of the longest name, with its end, and some to spare."""


def name(n: int) -> str:
    """The English name of a number below a million."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f" {ONES[n % 10]}" if n % 10 else "")
    large, word = (100, "hundred") if n < 1000 else (1000, "thousand")
    return f"{name(n // large)} {word}" + (f" {name(n % large)}" if n % large else "")


def is_held_out(n: int) -> bool:
    """Whether no training may see this number: a tenth of those with three digits or more, by a
    hash.
    """
    return n >= 100 and n * 2654435761 % 2**32 < 2**32 // 10


def numbers(count: int, held_out: bool, draw: random.Random) -> list[int]:
    """Numbers of one to six digits, short ones as often as long ones, all for evaluation or
    none.
    """
    found: list[int] = []
    while len(found) < count:
        digits = draw.randint(1, 6)
        n = draw.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        if is_held_out(n) is held_out:
            found.append(n)
    return found


def translated(batch: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits and names as tokens: (batch, digits), (batch, words) with start and end."""

    def padded(texts: list[list[str]]) -> torch.Tensor:
        rows = [torch.tensor([NUMBER[token] for token in text]) for text in texts]
        return pad_sequence(rows, batch_first=True, padding_value=PADDING)

    return padded([list(str(n)) for n in batch]), padded(
        [["<start>", *name(n).split(), "<end>"] for n in batch]
    )


def exact(model: Transformer, batch: list[int]) -> float:
    """How many of the numbers the model names right to the last word, by greedy decoding: from 0
    to 1.
    """
    model.eval()
    said = model.greedy(translated(batch)[0], START, LONGEST).tolist()
    model.train()
    texts = [
        " ".join(TOKENS[t] for t in row[: row.index(END)]) if END in row else "" for row in said
    ]
    return sum(text == name(n) for text, n in zip(texts, batch, strict=True)) / len(batch)


def train(
    parallel: bool = False,
    *,
    devices: str = "2xcpu",
    updates: int = 1600,
    batch_size: int = 128,
    width: int = 96,
    layers: int = 2,
    dropout: float = 0.0,
    warm_up: int = 400,
    told: Callable[[str], None] = print,
) -> tuple[Transformer, list[float]]:
    """Train; gives the model and the loss of each update."""
    torch.manual_seed(0)
    draw = random.Random(0)
    model = Transformer(
        len(TOKENS), PADDING, width, layers, heads=4, dropout=dropout, longest=LONGEST + 1
    )
    criterion = nn.CrossEntropyLoss(ignore_index=PADDING, label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)

    def rate(update: int) -> float:  # rises for the warm-up, then falls to 0
        return (width * warm_up) ** -0.5 * min(
            (update + 1) / warm_up, (updates - update) / (updates - warm_up)
        )

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    trunk = DataParallel(model, devices, balanced=True)
    parallel_loss = ParallelLoss(model.generator, criterion, devices, chunk_size=4)

    def loss_of(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        said, wanted = target[:, :-1], target[:, 1:]
        if parallel:
            return parallel_loss(trunk(source, said), wanted).loss
        return criterion(model.generator(model(source, said)).flatten(0, 1), wanted.flatten())

    losses = []
    for update in range(updates):
        loss = loss_of(*translated(numbers(batch_size, False, draw)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if (update + 1) % 100 == 0:
            told(f"update {update + 1}  loss {sum(losses[-100:]) / 100:.3f}")
    return model, losses


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument(
        "--parallel", action="store_true", help="the trunk and the loss on two devices"
    )
    options.add_argument("--updates", type=int, default=1600)
    given = options.parse_args()
    model, _ = train(given.parallel, updates=given.updates)
    held_out = numbers(2000, True, random.Random(1))
    for n in held_out[:5]:
        said = model.eval().greedy(translated([n])[0], START, LONGEST)[0].tolist()
        print(n, " ".join(TOKENS[t] for t in said[: said.index(END) if END in said else None]))
    print(
        f"{100 * exact(model, held_out):.1f} % of 2,000 numbers for evaluation are named right to "
        "the last word"
    )
