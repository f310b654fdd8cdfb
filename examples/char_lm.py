"""A small GPT that learns the text of Python's own standard library, byte by byte.

lockstep train examples/char_lm.py --strategy ddp --devices 2

Windows of whole lines, of lengths that vary, are padded in ``collate``, and the loss ignores the
padding. Perplexity is ``exp(loss)``, the loss being a mean over bytes; the metric ``bits`` is its
logarithm to base 2. After the 1,200 updates (about six minutes of two cores) it is 5.3 on the
evaluation files; a bigram model's is 11.9, about 2.2 times as much.
"""

import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models.gpt import GPT
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import lockstep

VOCABULARY = 256
PADDING = -100
"""In place of a target where there is none."""


def standard_library(size: int) -> tuple[bytes, bytes]:
    """The first ``size`` bytes of the modules of the standard library, by name: to train on, and
    for evaluation.

    As many of the last files are for evaluation as make a tenth.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files: list[bytes] = []
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        if size > (so_far := sum(map(len, files))):
            files.append(path.read_bytes()[: size - so_far])
    if (found := sum(map(len, files))) < size:
        raise ValueError(f"size={size}: the .py files in {folder} have only {found} bytes")
    held_out: list[bytes] = []
    while sum(map(len, held_out)) < size / 10:
        held_out.insert(0, files.pop())
    return b"".join(files), b"".join(held_out)


def windows(text: bytes, longest: int) -> list[tuple[int, int]]:
    """Cut a text in windows of as many whole lines as fit (a longer line is cut): where each
    begins and ends.
    """
    spans = []
    start = 0
    while start < len(text):
        end = start + longest
        if end < len(text):
            end = text.rfind(b"\n", start, end) + 1 or end
        spans.append((start, min(end, len(text))))
        start = end
    return spans


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each byte of a text is a target once, in a window of it; the inputs are the bytes before
    the targets.
    """

    draws_random = False

    def __init__(self, text: bytes, longest: int) -> None:
        self.bytes = torch.frombuffer(bytearray(b"\n" + text), dtype=torch.uint8)
        self.spans = windows(text, longest)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self.spans[i]
        return self.bytes[start:end].long(), self.bytes[start + 1 : end + 1].long()


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (batch, time of the longest)."""
    inputs, targets = zip(*samples, strict=True)
    return pad_sequence(inputs, batch_first=True), pad_sequence(
        targets, batch_first=True, padding_value=PADDING
    )


def nats(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss: (total, count) over the bytes that are no padding."""
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum"
    )
    return total, (targets != PADDING).sum()


def bits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same to base 2."""
    total, count = nats(logits, targets)
    return total / math.log(2), count


def bigram_perplexity(train: bytes, held_out: bytes) -> float:
    """The perplexity on ``held_out`` of pairs counted in ``train``, with one added to each of
    the 256 x 256 counts.
    """

    def pairs(text: bytes) -> torch.Tensor:
        every = torch.frombuffer(bytearray(b"\n" + text), dtype=torch.uint8).long()
        return every[:-1] * VOCABULARY + every[1:]

    counts = (
        torch.bincount(pairs(train), minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double()
        + 1
    )
    log_p = (counts / counts.sum(dim=1, keepdim=True)).log().flatten()
    return math.exp(-log_p[pairs(held_out)].mean())


def job(
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    context: int = 256,
    size: int = 3_000_000,
    updates: int = 1200,
    lr: float = 3e-3,
) -> lockstep.Job:
    """The job; its parameters are given as `--set layers=8`.

    Args:
        width, layers, heads: of the model.
        context: the longest window, in bytes.
        size: bytes of the library, held-out ones included.
        updates: how many; the learning rate rises for the first twentieth of them, then falls to
            zero as a cosine does.
        lr: the highest learning rate.
    """

    def rate(update: int) -> float:
        rising = max(1, updates // 20)
        return min((update + 1) / rising, 0.5 + 0.5 * math.cos(math.pi * min(1, update / updates)))

    def against_bigrams(event: lockstep.Event) -> None:
        if event.kind == "finished":
            ours, theirs = (
                math.exp(event.metrics["eval_loss"]),
                bigram_perplexity(*standard_library(size)),
            )
            print(
                f"perplexity {ours:.2f}; of bigrams {theirs:.2f}, {theirs / ours:.2f} times as much"
            )

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)

    return lockstep.Job(
        model=lambda: GPT(VOCABULARY, context, width, layers, heads),
        loss=nats,
        optimizer=adamw,
        train_data=lambda: Windows(standard_library(size)[0], context),
        eval_data=lambda: Windows(standard_library(size)[1], context),
        collate=padded,
        batch_size=16,
        eval_batch_size=64,
        steps=updates,
        clip_norm=1.0,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        lr_scheduler_every="step",
        metrics={"bits": bits},
        on_event=[against_bigrams],
    )
