"""A language model whose hidden state goes from batch to batch, as extra state."""

import torch
from torch import nn

import lockstep

ROWS, LENGTH, WORDS = 16, 8, 50


class Windows(torch.utils.data.Dataset):
    """A text in rows: samples 0 to 15 are the first window of each row, and sample 16 continues sample 0."""

    def __init__(self, windows: int = 12):
        draw = torch.Generator().manual_seed(0)
        self.text = torch.randint(WORDS, (ROWS, windows * LENGTH + 1), generator=draw)

    def __len__(self):
        return ROWS * (self.text.shape[1] // LENGTH)

    def __getitem__(self, index):
        window, row = divmod(index, ROWS)
        words = self.text[row, window * LENGTH : (window + 1) * LENGTH + 1]
        return words[:-1], words[1:]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(WORDS, 32), nn.LSTM(32, 32, batch_first=True)
        self.out = nn.Linear(32, WORDS)
        self.hidden = None  # (h, c) after the last training batch, for the rows of this device

    def forward(self, words):  # words: (rows, time)
        hidden = self.hidden if self.training else None
        if hidden is not None and hidden[0].shape[1] != len(words):  # a smaller last batch
            hidden = None
        outputs, hidden = self.lstm(self.embed(words), hidden)
        if self.training:
            self.hidden = tuple(state.detach() for state in hidden)
        return self.out(outputs).transpose(1, 2)

    def get_extra_state(self):
        return self.hidden

    def set_extra_state(self, state):
        device = self.out.weight.device
        self.hidden = None if state is None else tuple(part.to(device) for part in state)


def job() -> lockstep.Job:
    return lockstep.Job(
        model=Words,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
        train_data=Windows(),
        batch_size=ROWS,
        shuffle=False,
    )
