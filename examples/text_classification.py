"""A small BERT that tells which package of Python's standard library a paragraph of source is from.

lockstep train examples/text_classification.py --strategy ddp --devices 2

Nothing is downloaded: the model of transformers is built from its configuration, and the texts are
the files of four packages. Paragraphs, of lengths that vary, are padded in ``collate``, and the
attention mask leaves the padding out. The learning rate rises, then falls to zero, by steps. The
largest package is about a third of the paragraphs.
"""

import re
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import lockstep

PACKAGES = ["asyncio", "email", "importlib", "unittest"]
PADDING, BEGIN, UNKNOWN = range(3)


def words_of(text: str) -> list[str]:
    """Names, numbers and marks."""
    return re.findall(r"\w+|[^\w\s]", text)


@cache
def paragraphs() -> list[tuple[str, int]]:
    """The paragraphs of at least eight words that are in one package alone, with its number."""
    found: dict[str, set[int]] = {}
    for label, package in enumerate(PACKAGES):
        for path in sorted(Path(sysconfig.get_paths()["stdlib"], package).glob("*.py")):
            for text in re.split(r"\n\s*\n", path.read_text()):
                if len(words_of(text)) >= 8:
                    found.setdefault(text.strip(), set()).add(label)
    return [(text, *labels) for text, labels in found.items() if len(labels) == 1]


def samples(vocabulary: int, longest: int) -> list[tuple[torch.Tensor, int]]:
    """The words of each paragraph as numbers by frequency, after a BEGIN, and its package."""
    every = [(words_of(text), label) for text, label in paragraphs()]
    counts = Counter(word for words, _ in every for word in words)
    number = {word: i for i, (word, _) in enumerate(counts.most_common(vocabulary - 3), start=3)}
    found = []
    for words, label in every:
        numbers = [number.get(word, UNKNOWN) for word in words[: longest - 1]]
        found.append((torch.tensor([BEGIN, *numbers]), label))
    return found


def padded(batch: list[tuple[torch.Tensor, int]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs (batch, time of the longest) by the names of the model's arguments, and labels."""
    texts, labels = zip(*batch, strict=True)
    ids = pad_sequence(texts, batch_first=True, padding_value=PADDING)
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long()}, torch.tensor(labels)


def bert(vocabulary: int, longest: int, width: int, layers: int, dropout: float) -> nn.Module:
    """BERT with a classifier on its first word."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=longest,
        num_labels=len(PACKAGES),
    )
    return BertForSequenceClassification(config)


def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """The mean over paragraphs."""
    return F.cross_entropy(outputs.logits, labels)


def accuracy(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """How many are right, of how many."""
    return (outputs.logits.argmax(dim=1) == labels).sum(), len(labels)


def job(
    lr: float = 5e-4,
    vocabulary: int = 4000,
    longest: int = 64,
    width: int = 128,
    layers: int = 2,
    dropout: float = 0.1,
    updates: int = 400,
) -> lockstep.Job:
    """The job; its parameters are given as `--set layers=4`. A tenth is for evaluation."""
    every = samples(vocabulary, longest)
    return lockstep.Job(
        model=lambda: bert(vocabulary, longest, width, layers, dropout),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr, weight_decay=0.01),
        train_data=[sample for i, sample in enumerate(every) if i % 10],
        eval_data=every[::10],
        collate=padded,
        batch_size=32,
        steps=updates,
        clip_norm=1.0,
        lr_scheduler=lambda it: torch.optim.lr_scheduler.OneCycleLR(it, lr, updates, pct_start=0.1),
        lr_scheduler_every="step",
        metrics={"accuracy": accuracy},
    )
