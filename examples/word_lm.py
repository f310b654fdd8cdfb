"""A language model over words: an LSTM whose hidden state is carried from batch to batch.

lockstep train examples/word_lm.py --strategy ddp --devices 2

The text is Python's own language reference, cut in columns, as many as a batch has rows. Row r of
each batch is the next window of column r, so the LSTM goes on with the state in which it left that
column, and back-propagation ends where the window begins. The model keeps the states in a table by
column, which is right however a batch is cut. `get_extra_state` gives the table to checkpoints: a
run that is resumed on as many devices goes on with the states that it had.
"""

import re
from collections import Counter
from functools import cache
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep

UNKNOWN = 0
"""In place of a word that is not in the vocabulary."""


@cache
def words(vocabulary: int) -> Tensor:
    """All words, marks and ends of lines of the reference, as their numbers by frequency.

    Topics share paragraphs. Each is taken once: no text for evaluation is known from training.
    """
    paragraphs = [part for name in sorted(topics) for part in topics[name].split("\n\n")]
    text = "\n".join(dict.fromkeys(paragraphs))
    found = re.findall(r"\w+|[^\w\s]|\n", text)
    common = Counter(found).most_common(vocabulary - 1)
    number = {word: i for i, (word, _) in enumerate(common, start=1)}
    return torch.tensor([number.get(word, UNKNOWN) for word in found])


class Columns(Dataset[tuple[tuple[Tensor, int, int], Tensor]]):
    """Sample i is window ``i // columns`` of column ``i % columns``, and the words that follow."""

    draws_random = False

    def __init__(self, text: Tensor, columns: int, window: int) -> None:
        self.columns = columns
        self.window = window
        self.windows = (len(text) // columns - 1) // window
        self.text = text[: len(text) // columns * columns].view(columns, -1)

    def __len__(self) -> int:
        return self.windows * self.columns

    def __getitem__(self, i: int) -> tuple[tuple[Tensor, int, int], Tensor]:
        number, column = divmod(i, self.columns)
        start = number * self.window
        words = self.text[column, start : start + self.window + 1]
        return (words[:-1], column, number), words[1:]


class WordLM(nn.Module):
    """Words (batch, time), columns and windows (batch,) to logits (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int, columns: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.states = torch.zeros(2, layers, columns, width)  # h and c of each column

    def forward(self, words: Tensor, column: Tensor, window: Tensor) -> Tensor:
        """Logits of the next words; in evaluation each window begins with a state of zeros."""
        x = self.embedding(words)
        if not self.training:
            return self.head(self.lstm(x)[0])
        self.states = self.states.to(x)
        h, c = self.states[:, :, column].masked_fill((window == 0).view(-1, 1), 0.0)
        x, after = self.lstm(x, (h, c))
        self.states = self.states.index_copy(2, column, torch.stack(after).detach())
        return self.head(x)

    def get_extra_state(self) -> Tensor:
        """What a checkpoint keeps beside the weights: the states."""
        return self.states

    def set_extra_state(self, states: Tensor) -> None:
        """Go on with the states of a checkpoint."""
        self.states = states


def nats(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The loss: (total, count) over words; ``exp(loss)`` is the perplexity."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def job(
    vocabulary: int = 4000,
    columns: int = 20,
    window: int = 32,
    width: int = 128,
    layers: int = 2,
    lr: float = 3e-3,
) -> lockstep.Job:
    """The job; its parameters are given as `--set width=256`. A tenth is for evaluation."""
    text = words(vocabulary)
    cut = len(text) * 9 // 10
    return lockstep.Job(
        model=lambda: WordLM(vocabulary, columns, width, layers),
        loss=nats,
        optimizer=lambda params: torch.optim.Adam(params, lr=lr),
        train_data=lambda: Columns(text[:cut], columns, window),
        eval_data=lambda: Columns(text[cut:], columns, window),
        batch_size=columns,
        shuffle=False,
        epochs=5,
        clip_norm=1.0,
    )
