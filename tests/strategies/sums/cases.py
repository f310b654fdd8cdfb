"""Small trainings as people write them: those whose numbers depend on where a batch is cut, and
those that look so.

A strategy that cuts batches adds up what the parts give, which is right where samples don't act on
one another and the loss is a sum over items. Each case says whether it is that: ``test_table_of_cases``
proves it by plain trainings.

- common: what many people write. It must not train with other numbers in silence.
- rare: what few people write.
- innocent: what only looks as if it depended on the cut. It must not be stopped.

What PyTorch draws is the same for the rows of the parts as for those of the whole. One number that
is drawn for a whole batch is drawn anew for each part.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep import Job


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: it in tests.
        kind: "common", "rare" or "innocent".
        job: makes the job.
        cut: how parts have to be computed for a difference: by "replicas", which begin alike, "in
            turn" by one model, "both" or "none".
        note: what depends on the cut, or why nothing does.
        first: the update (from 1) in which it first differs.
        parts: the samples of both parts of a batch of 8.
        bound: how far an innocent one may be apart; above 1e-9 where something is computed in a
            coarser format.
        dtype: float64, or the format that the model has to be computed in.
        slow: whether it takes long to import.
    """

    name: str
    kind: str
    job: Callable[[], Job]
    cut: str
    note: str
    first: int = 1
    parts: tuple[int, int] = (5, 3)
    bound: float = 1e-9
    dtype: torch.dtype = torch.float64
    slow: bool = False


CASES: list[Case] = []


def case(kind: str, cut: str, **more: Any) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    """Put the function below into the table, by its name and its docstring."""

    def add(job: Callable[[], Job]) -> Callable[[], Job]:
        name = job.__name__.strip("_").replace("_", "-")
        CASES.append(Case(name, kind, job, cut, job.__doc__ or "", **more))
        return job

    return add


common = partial(case, "common")
rare = partial(case, "rare")
innocent = partial(case, "innocent", "none")
float32_only: dict[str, Any] = {"dtype": torch.float32, "bound": 1e-4}


# ---- Data ----------------------------------------------------------------------------------------

SAMPLES = 24  # three batches
CLASSES = 3
WORDS = 11
PAD = 0


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(high: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def points(samples: int = SAMPLES) -> TensorDataset:
    """Six numbers, and a class."""
    return TensorDataset(drawn(samples, 6), whole_numbers(CLASSES, samples))


def measured(samples: int = SAMPLES, values: int = 1) -> TensorDataset:
    """Six numbers, and what is to be predicted."""
    inputs = drawn(samples, 6)
    return TensorDataset(inputs, inputs[:, :values].sin() + 0.3 * drawn(samples, values, seed=3))


def answers(samples: int = SAMPLES) -> TensorDataset:
    """Six numbers, and yes or no."""
    return TensorDataset(drawn(samples, 6), whole_numbers(2, samples, 1).float())


def images(samples: int = SAMPLES) -> TensorDataset:
    return TensorDataset(drawn(samples, 3, 8, 8), whole_numbers(CLASSES, samples))


def masks(samples: int = SAMPLES) -> TensorDataset:
    """Images, and which of their pixels belong to the object, whose size differs."""
    sizes = whole_numbers(5, samples, 1, 1, 1) - 2
    return TensorDataset(
        drawn(samples, 3, 8, 8), (drawn(samples, 1, 8, 8, seed=4) > 0.5 * sizes).float()
    )


def series(samples: int = SAMPLES) -> TensorDataset:
    """(time, features), and a class."""
    return TensorDataset(drawn(samples, 7, 4), whole_numbers(CLASSES, samples))


def lengths_of(samples: int, longest: int) -> Tensor:
    return 2 + whole_numbers(longest - 1, samples, seed=5)


def sentences(samples: int = SAMPLES, padded_from: int = 0) -> TensorDataset:
    """Words, and the next word of each. Sentences are padded, those before ``padded_from`` are
    all of one length.
    """
    words = 1 + whole_numbers(WORDS - 1, samples, 8)
    lengths = lengths_of(samples, 8)
    lengths[:padded_from] = 8
    words[torch.arange(8) >= lengths[:, None]] = PAD
    return TensorDataset(words[:, :-1], words[:, 1:])


class Samples(Dataset[Any]):
    """A list of samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def ragged(samples: int = SAMPLES) -> Samples:
    """Sequences of different lengths, and a class."""
    lengths = lengths_of(samples, 9).tolist()
    wanted = whole_numbers(CLASSES, samples)
    return Samples([(drawn(length, 4, seed=i), wanted[i]) for i, length in enumerate(lengths)])


def padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Sequences as long as the longest of the batch."""
    return pad_sequence([x for x, _ in samples], batch_first=True), torch.stack(
        [y for _, y in samples]
    )


def padded_with_lengths(samples: list[Any]) -> tuple[Any, Tensor]:
    inputs, targets = padded(samples)
    return (inputs, torch.tensor([len(x) for x, _ in samples])), targets


# ---- Jobs ----------------------------------------------------------------------------------------


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def training(model: Any, data: Any, loss: Any = None, **settings: Any) -> Job:
    """A job of three updates."""
    return Job(
        model=model,
        loss=nn.CrossEntropyLoss() if loss is None else loss,
        optimizer=sgd,
        train_data=data,
        **{"batch_size": 8, "shuffle": False, "steps": 3, **settings},
    )


# ---- Models --------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def around(layer: Callable[[], nn.Module]) -> nn.Module:
    """A layer with one before and one behind."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), layer(), nn.Linear(8, CLASSES))


def around_of_images(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), layer(), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, CLASSES)
    )


class Segmenter(nn.Module):
    """A number for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class LanguageModel(nn.Module):
    """Gives (batch, time, words)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0])


class Recurrent(nn.Module):
    """Classifies a sequence by the last state."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, **{"batch_first": True, **settings})
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Embedder(nn.Module):
    """Points as vectors of length 1, for losses of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(x), dim=-1)


class TwoViews(nn.Module):
    """Embeds two views of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = Embedder()

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedder(one), self.embedder(other)


def views() -> Samples:
    """Pairs of points that lie near each other, and a class."""
    inputs, wanted = points().tensors
    noisy = inputs + 0.3 * drawn(SAMPLES, 6, seed=6)
    return Samples([((x, z), y) for x, z, y in zip(inputs, noisy, wanted, strict=True)])


# ---- Common: layers that compute over the batch --------------------------------------------------


def of_images_with_batch_norm() -> nn.Module:
    return around_of_images(partial(nn.BatchNorm2d, 4))


@common("both")
def batchnorm() -> Job:
    """Mean and variance are those of the batch. (Its type is known.)"""
    return training(of_images_with_batch_norm, images())


class FunctionalBatchNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


@common("both")
def functional_batch_norm() -> Job:
    """Mean and variance are those of the batch."""
    return training(partial(around, FunctionalBatchNorm), points())


class Standardised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-5)


@common("both")
def batch_std_of_features() -> Job:
    """Mean and deviation are those of the batch."""
    return training(partial(around, Standardised), points())


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0, keepdim=True)


@common("both")
def embeddings_centred_over_batch() -> Job:
    """The mean is that of the batch."""
    return training(partial(around, Centred), points())


class DividedByLargest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().max()


@common("both")
def divided_by_largest_of_batch() -> Job:
    """The largest value is that of the batch."""
    return training(partial(around, DividedByLargest), points())


class NormalisedWhole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape)


@common("both")
def layer_norm_over_all_dimensions() -> Job:
    """The batch is one of the dimensions that are normalised."""
    return training(partial(around, NormalisedWhole), points())


class NormalisedWithoutDim(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm()


@common("both")
def norm_without_dim() -> Job:
    """The norm is that of all samples."""
    return training(partial(around, NormalisedWithoutDim), points())


class NormalisedOverDim0(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=0)


@common("both")
def normalize_over_dim_0() -> Job:
    """The norm is that of a feature over the batch."""
    return training(partial(around, NormalisedOverDim0), points())


@common("both")
def softmax_over_dim_0() -> Job:
    """A gate is a softmax over the batch."""
    return training(partial(around, partial(nn.Softmax, dim=0)), points())


class MinibatchDeviation(nn.Module):
    """As in GANs: the deviation over the batch as one more channel."""

    def forward(self, x: Tensor) -> Tensor:
        deviation = x.std(0, unbiased=False).mean().expand(len(x), 1, *x.shape[2:])
        return torch.cat([x[:, 1:], deviation], dim=1)


@common("both")
def minibatch_stddev() -> Job:
    """The deviation over the batch is a channel."""
    return training(partial(around_of_images, MinibatchDeviation), images())


@common("both")
def lstm_batch_first_forgotten() -> Job:
    """The LSTM goes through the batch as if it were time."""
    return training(partial(Recurrent, batch_first=False), series())


class Attending(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **settings)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


@common("both")
def attention_batch_first_forgotten() -> Job:
    """Samples attend to one another."""
    return training(Attending, series())


class EncodedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(
            self.encoder(self.first(x))
        )  # (batch, features) is taken as (time, features)


@common("both")
def encoder_takes_the_batch_as_time() -> Job:
    """A batch of vectors is one unbatched sequence to a transformer's layer."""
    return training(EncodedBatch, points())


def dice_of_squeezed(outputs: Tensor, targets: Tensor) -> Tensor:
    found = outputs.sigmoid().squeeze().flatten(1)
    wanted = targets.squeeze().flatten(1)
    overlap = (found * wanted).sum(1)
    return 1 - (2 * overlap / (found.sum(1) + wanted.sum(1) + 1)).mean()


@common("both", parts=(7, 1))
def squeeze_of_one_sample() -> Job:
    """One image loses its batch's dimension too, and the mean is over rows of pixels."""
    return training(Segmenter, masks(), dice_of_squeezed)


class Shifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.roll(1, dims=0)


@common("both")
def roll_over_the_batch() -> Job:
    """Each sample is added to its neighbour."""
    return training(partial(around, Shifted), points())


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


@common("both")
def manifold_mixup_in_forward() -> Job:
    """Each sample is mixed with another one of the batch."""
    return training(partial(around, Mixed), points())


class Reshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, features = x.shape
        return self.head(self.lstm(x.view(time, batch, features).transpose(0, 1))[0][:, -1])


@common("both")
def view_instead_of_transpose() -> Job:
    """``view`` mixes the samples' values, where ``transpose`` was meant."""
    return training(Reshaped, series())


class NearestNeighbours(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(-torch.cdist(x, x), dim=1)
        return x + weights @ x


@common("both")
def graph_of_the_batch() -> Job:
    """Samples get messages from those near them."""
    return training(partial(around, NearestNeighbours), points())


def hidden_channels_first() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Unflatten(1, (1, 8)),
        BatchAsChannels(),
        nn.Linear(8, CLASSES),
    )


class BatchAsChannels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.transpose(0, 1), 1).squeeze(0)


@common("both")
def group_norm_over_the_batch() -> Job:
    """The batch stands where channels are expected."""
    return training(hidden_channels_first, points())


# ---- Common: losses of pairs of samples ----------------------------------------------------------


def simclr(outputs: Any, targets: Tensor) -> Tensor:
    z = torch.cat(outputs)
    n = len(z) // 2
    similar = z @ z.T / 0.5
    similar = similar.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(similar, (torch.arange(2 * n) + n) % (2 * n))


@common("both")
def simclr_in_batch_negatives() -> Job:
    """Other samples of the batch are negatives."""
    return training(TwoViews, views(), simclr)


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = Embedder()
        self.text = Embedder()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return self.scale.exp() * self.image(image) @ self.text(text).T


def clip_loss(logits: Tensor, targets: Tensor) -> Tensor:
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


@common("both")
def clip_logits_in_forward() -> Job:
    """Logits are those of each image and each text of the batch."""
    return training(CLIP, views(), clip_loss)


def siglip_loss(outputs: Any, targets: Tensor) -> Tensor:
    one, other = outputs
    signs = 2 * torch.eye(len(one)) - 1
    return -F.logsigmoid(signs * (one @ other.T * 5 - 1)).sum() / len(one)


@common("both")
def sigmoid_pairs() -> Job:
    """Each sample is held against each other one."""
    return training(TwoViews, views(), siglip_loss)


def batch_hard(z: Tensor, targets: Tensor) -> Tensor:
    far = (z[:, None] - z[None]).pow(2).sum(-1)
    same = targets[:, None] == targets[None]
    positive = far.masked_fill(~same, 0).amax(1)
    negative = far.masked_fill(same, 1e3).amin(1)
    return F.relu(positive - negative + 0.3).mean()


@common("both")
def batch_hard_triplet() -> Job:
    """The hardest positive and negative are looked for in the batch."""
    return training(Embedder, points(), batch_hard)


def supervised_contrast(z: Tensor, targets: Tensor) -> Tensor:
    n = len(z)
    itself = torch.eye(n, dtype=torch.bool)
    logits = (z @ z.T / 0.5).masked_fill(itself, -1e9)
    same = (targets[:, None] == targets[None]) & ~itself
    logs = F.log_softmax(logits, dim=1)
    return -((logs * same).sum(1) / same.sum(1).clamp(min=1)).mean()


@common("both")
def supcon() -> Job:
    """Positives are the samples of the same class in the batch."""
    return training(Embedder, points(), supervised_contrast)


def barlow(outputs: Any, targets: Tensor) -> Tensor:
    one, other = (z - z.mean(0) for z in outputs)
    correlation = (one / one.std(0)).T @ (other / other.std(0)) / len(one)
    return (correlation - torch.eye(4)).pow(2).sum()


@common("both")
def barlow_twins() -> Job:
    """Correlations of features are over the batch."""
    return training(TwoViews, views(), barlow)


def vicreg(outputs: Any, targets: Tensor) -> Tensor:
    one, other = outputs
    spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in outputs)
    return F.mse_loss(one, other) + spread


@common("both")
def vicreg_variance() -> Job:
    """The variance is that of the batch."""
    return training(TwoViews, views(), vicreg)


class WithoutRoot(TwoViews):
    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedder.layers(one), self.embedder.layers(other)


def far_views() -> Samples:
    return Samples([((x, 2 * z + 1), y) for (x, z), y in views().samples])


def distances(z: Tensor) -> Tensor:
    """Those of each pair."""
    i, j = torch.triu_indices(len(z), len(z), 1)
    return (z[i] - z[j]).norm(dim=-1)


def energy(outputs: Any, targets: Tensor) -> Tensor:
    one, other = outputs
    return 2 * torch.cdist(one, other).mean() - distances(one).mean() - distances(other).mean()


@common("both")
def domain_distance() -> Job:
    """The distance of two distributions is that of two sets of samples."""
    return training(WithoutRoot, far_views(), energy)


def coral(outputs: Any, targets: Tensor) -> Tensor:
    one, other = outputs
    return (torch.cov(one.T) - torch.cov(other.T)).pow(2).sum()


@common("both")
def coral_covariances() -> Job:
    """Covariances are over the batch."""
    return training(WithoutRoot, far_views(), coral)


def pairwise_ranks(outputs: Tensor, targets: Tensor) -> Tensor:
    gap = (outputs - outputs.T)[targets > targets.T]
    return F.softplus(-gap).mean()


@common("both")
def ranking_of_pairs() -> Job:
    """Pairs of samples are ranked."""
    return training(partial(MLP, 1), measured(), pairwise_ranks)


def listwise(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(targets.softmax(0) * outputs.log_softmax(0)).sum()


@common("both")
def ranking_of_the_batch() -> Job:
    """The batch is one list that is ranked."""
    return training(partial(MLP, 1), measured(), listwise)


def lifetimes() -> TensorDataset:
    times = drawn(SAMPLES, seed=7).exp()
    died = whole_numbers(2, SAMPLES, seed=8).float()
    return TensorDataset(drawn(SAMPLES, 6), torch.stack([times, died], dim=1))


def cox(outputs: Tensor, targets: Tensor) -> Tensor:
    risks, times, died = outputs[:, 0], targets[:, 0], targets[:, 1]
    order = times.argsort(descending=True)
    risks, died = risks[order], died[order]
    return -((risks - risks.logcumsumexp(0)) * died).sum() / died.sum()


@common("both")
def cox_partial_likelihood() -> Job:
    """Each death is held against those of the batch who lived longer."""
    return training(partial(MLP, 1), lifetimes(), cox)


def in_batch_softmax(outputs: Any, targets: Tensor) -> Tensor:
    users, items = outputs
    return F.cross_entropy(users @ items.T, torch.arange(len(users)))


class TwoTowers(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.users = nn.Embedding(12, 4, **settings)
        self.items = nn.Embedding(15, 4, **settings)

    def forward(self, user: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        return self.users(user), self.items(item)


def clicks() -> Samples:
    users, items = whole_numbers(12, SAMPLES), whole_numbers(15, SAMPLES, seed=9)
    rated = drawn(SAMPLES, seed=10)
    return Samples([((u, i), y) for u, i, y in zip(users, items, rated, strict=True)])


@common("both")
def two_towers_in_batch_softmax() -> Job:
    """Items of the other samples are negatives."""
    return training(TwoTowers, clicks(), in_batch_softmax)


def prototypes(z: Tensor, targets: Tensor) -> Tensor:
    wanted = F.one_hot(targets, CLASSES).to(z.dtype)
    means = wanted.T @ z / wanted.sum(0).clamp(min=1)[:, None]
    return F.cross_entropy(-(z[:, None] - means).pow(2).sum(-1), targets)


@common("both")
def prototypes_of_the_batch() -> Job:
    """A class's prototype is the mean of its samples in the batch."""
    return training(Embedder, points(), prototypes)


def leave_one_out(outputs: Tensor, targets: Tensor) -> Tensor:
    actions, gains = targets[:, :1].long(), targets[:, 1]
    baseline = (gains.sum() - gains) / max(len(gains) - 1, 1)
    return -(outputs.log_softmax(-1).gather(1, actions)[:, 0] * (gains - baseline)).mean()


@common("both")
def baseline_of_the_other_samples() -> Job:
    """The baseline is the mean gain of the other samples."""
    return training(MLP, played(), leave_one_out)


# ---- Common: means over something else than samples ----------------------------------------------


def masked_mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    mask = targets != PAD
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


@common("both")
def masked_mean() -> Job:
    """A mean over the words of the batch; samples have different numbers of them."""
    return training(LanguageModel, sentences(), masked_mean_loss)


@common("both", first=3)
def masked_mean_late_3() -> Job:
    """The same; sentences are of one length in the first two batches."""
    return training(LanguageModel, sentences(padded_from=16), masked_mean_loss)


def known_labels(samples: int, unknown_from: int, unknown: int) -> TensorDataset:
    """Two labels for each sample. One of some is missing."""
    wanted = whole_numbers(CLASSES, samples, 2)
    wanted[unknown_from::2, 1] = unknown
    return TensorDataset(drawn(samples, 6), wanted)


class TwoHeads(nn.Module):
    """Gives (batch, classes, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.body(x))
        return torch.stack([head(features) for head in self.heads], dim=-1)


def mean_of_known(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return losses[targets >= 0].mean()


@common("both", first=3)
def masked_mean_late_int() -> Job:
    """Labels are missing, as -1, from the third batch on."""
    return training(TwoHeads, known_labels(32, 16, -1), mean_of_known, steps=4)


def ignoring_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


@common("both", first=7)
def ignored_labels_late_7() -> Job:
    """Labels are -100 from the seventh batch on, and a person's function calls
    ``cross_entropy``.
    """
    return training(TwoHeads, known_labels(64, 48, -100), ignoring_loss, steps=8)


def token_mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=PAD)


@common("both")
def token_mean() -> Job:
    """``cross_entropy`` in a person's function; padding is ignored."""
    return training(LanguageModel, sentences(), token_mean_loss)


@common("both", parts=(7, 1))
def token_mean_local_batch_of_1() -> Job:
    """The same where a part is one sentence."""
    return training(LanguageModel, sentences(), token_mean_loss)


def with_gaps() -> TensorDataset:
    inputs, wanted = measured(values=2).tensors
    wanted = wanted.masked_fill(drawn(SAMPLES, 2, seed=11) > 0.8, math.nan)
    return TensorDataset(inputs, wanted)


def nanmean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    gaps = targets.isnan()
    return (outputs - targets.nan_to_num()).pow(2).masked_fill(gaps, math.nan).nanmean()


@common("both")
def nan_targets_nanmean() -> Job:
    """A mean over the targets that are known."""
    return training(partial(MLP, 2), with_gaps(), nanmean_loss)


def weighted_points() -> Samples:
    weights = drawn(SAMPLES, seed=12).exp()
    return Samples([(x, (y, w)) for (x, y), w in zip(points(), weights, strict=True)])


def weighted_mean(outputs: Tensor, targets: Any) -> Tensor:
    classes, weights = targets
    losses = F.cross_entropy(outputs, classes, reduction="none")
    return (losses * weights).sum() / weights.sum()


@common("both")
def sample_weights_over_their_sum() -> Job:
    """The sum of weights is another one in each part."""
    return training(MLP, weighted_points(), weighted_mean)


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


def class_weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=CLASS_WEIGHTS.to(outputs.dtype))


@common("both")
def class_weights_in_a_function() -> Job:
    """The mean divides by the weights of the batch's classes."""
    return training(MLP, points(), class_weighted)


def balanced(outputs: Tensor, targets: Tensor) -> Tensor:
    frequency = torch.bincount(targets, minlength=CLASSES).clamp(min=1)
    weights = len(targets) / (CLASSES * frequency[targets])
    return (F.cross_entropy(outputs, targets, reduction="none") * weights).mean()


@common("both")
def balanced_by_batch_frequency() -> Job:
    """Weights are by the frequency of classes in the batch."""
    return training(MLP, points(), balanced)


def with_boxes() -> Samples:
    """Images, and one to four boxes in each."""
    numbers = 1 + whole_numbers(4, SAMPLES, seed=13)
    boxes = [
        torch.rand(n, 4, generator=torch.Generator().manual_seed(i))
        for i, n in enumerate(numbers.tolist())
    ]
    return Samples([(drawn(3, 8, 8, seed=i), {"boxes": boxes[i]}) for i in range(SAMPLES)])


def images_and_lists(samples: list[Any]) -> tuple[Tensor, list[Any]]:
    return torch.stack([image for image, _ in samples]), [target for _, target in samples]


class Detector(nn.Module):
    """Four boxes for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, stride=2)
        self.head = nn.Linear(36, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)).flatten(1)).view(-1, 4, 4)


def mean_over_boxes(outputs: Tensor, targets: list[Any]) -> Tensor:
    losses = [
        F.l1_loss(o[: len(t["boxes"])], t["boxes"].to(o), reduction="sum")
        for o, t in zip(outputs, targets, strict=True)
    ]
    return sum(losses) / sum(len(t["boxes"]) for t in targets)


@common("both")
def detection_mean_over_boxes() -> Job:
    """A mean over the boxes of the batch."""
    return training(Detector, with_boxes(), mean_over_boxes, collate=images_and_lists)


def retina(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    focus = (outputs.sigmoid() - targets).abs().pow(2)
    return (focus * losses).sum() / targets.sum().clamp(min=1)


@common("both")
def focal_over_positives() -> Job:
    """The sum is divided by the number of positive pixels in the batch."""
    return training(Segmenter, masks(), retina)


def mean_of_foreground(outputs: Tensor, targets: Tensor) -> Tensor:
    wanted = targets > 0
    return F.softplus(-outputs[wanted]).mean() + F.softplus(outputs[~wanted]).mean()


@common("both")
def foreground_and_background_means() -> Job:
    """Two means over different numbers of pixels."""
    return training(Segmenter, masks(), mean_of_foreground)


def soft_iou(outputs: Tensor, targets: Tensor) -> Tensor:
    found = outputs.sigmoid()
    overlap = (found * targets).sum()
    return 1 - overlap / (found.sum() + targets.sum() - overlap)


@common("both")
def iou_over_batch() -> Job:
    """A quotient of two sums over the batch."""
    return training(Segmenter, masks(), soft_iou)


def dice_and_bce(outputs: Tensor, targets: Tensor) -> Tensor:
    found = outputs.sigmoid()
    dice = (2 * (found * targets).sum() + 1) / (found.sum() + targets.sum() + 1)
    return F.binary_cross_entropy_with_logits(outputs, targets) + 1 - dice


@common("both")
def dice_over_batch() -> Job:
    """The same, beside a mean over pixels."""
    return training(Segmenter, masks(), dice_and_bce)


def advantage_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    actions, gains = targets[:, 0].long(), targets[:, 1]
    advantages = (gains - gains.mean()) / (gains.std() + 1e-8)
    logs = outputs.log_softmax(-1).gather(1, actions[:, None])[:, 0]
    return -(logs * advantages).mean()


def played() -> TensorDataset:
    """What was seen, done, and gained."""
    actions = whole_numbers(CLASSES, SAMPLES).float()
    return TensorDataset(drawn(SAMPLES, 6), torch.stack([actions, drawn(SAMPLES, seed=14)], dim=1))


@common("both")
def advantages_normalised() -> Job:
    """Mean and deviation of advantages are those of the batch."""
    return training(MLP, played(), advantage_loss)


@common("both")
def sum_reduction() -> Job:
    """A sum is taken as a mean over samples."""
    return training(MLP, points(), nn.CrossEntropyLoss(reduction="sum"))


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).pow(2).sum()


@common("both")
def sum_of_squares() -> Job:
    """A sum that isn't divided by anything."""
    return training(partial(MLP, 1), measured(), summed)


def mean_as_total(outputs: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(outputs, targets), 1


@common("both")
def count_of_one() -> Job:
    """A mean with a count of 1 is a mean of means."""
    return training(TwoHeads, known_labels(SAMPLES, 0, -100), mean_as_total)


def token_mean_times_len_loss(outputs: Tensor, targets: Tensor) -> Any:
    return token_mean_loss(outputs, targets) * len(targets), len(targets)


@common("both")
def token_mean_times_len() -> Job:
    """A mean over words is weighted by the number of sentences."""
    return training(LanguageModel, sentences(), token_mean_times_len_loss)


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).pow(2).sum() / (targets - targets.mean()).pow(2).sum()


@common("both")
def r2_loss() -> Job:
    """The variance of the targets is that of the batch."""
    return training(partial(MLP, 1), measured(), r2)


def pearson(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(outputs - outputs.mean(), targets - targets.mean(), dim=0).mean()


@common("both")
def correlation_over_batch() -> Job:
    """A correlation is that of the batch."""
    return training(partial(MLP, 1), measured(), pearson)


def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets).sqrt()


@common("both")
def rmse_over_batch() -> Job:
    """The root is that of a mean over the batch."""
    return training(partial(MLP, 1), measured(), rmse)


def log_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets).log()


@common("both")
def log_of_mean() -> Job:
    """The logarithm is that of a mean over the batch."""
    return training(partial(MLP, 1), measured(), log_mean)


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none").topk(len(targets) // 2).values.mean()


@common("both")
def hard_examples_of_the_batch() -> Job:
    """Only the samples of the batch with the largest losses count."""
    return training(MLP, points(), hardest)


def median_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().median()


@common("both")
def median_of_the_batch() -> Job:
    """The median of parts isn't that of the batch."""
    return training(partial(MLP, 1), measured(), median_loss)


def trimmed(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = (outputs - targets).pow(2).flatten()
    return losses[losses <= losses.detach().quantile(0.8)].mean()


@common("both")
def outliers_by_quantile() -> Job:
    """What an outlier is depends on the batch."""
    return training(partial(MLP, 1), measured(), trimmed)


def soft_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    found = outputs.sigmoid()
    true = (found * targets).sum(0)
    return 1 - (2 * true / (found.sum(0) + targets.sum(0) + 1e-6)).mean()


@common("both")
def f1_over_batch() -> Job:
    """A quotient of two sums over the batch."""
    return training(partial(MLP, 1), answers(), soft_f1)


def critic(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[targets == 0].mean() - outputs[targets == 1].mean()


@common("both")
def critic_of_real_and_fake() -> Job:
    """Two means over different numbers of samples."""
    return training(partial(MLP, 1), answers(), critic)


def matching(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.mean(0) - targets.mean(0)).pow(2).sum()


@common("both")
def feature_matching() -> Job:
    """Means over the batch are compared."""
    return training(partial(MLP, 2), measured(values=2), matching)


def with_marginal_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    mean = outputs.softmax(-1).mean(0)
    return F.cross_entropy(outputs, targets) + (mean * mean.log()).sum()


@common("both")
def entropy_of_the_mean_prediction() -> Job:
    """The mean prediction is that of the batch."""
    return training(MLP, points(), with_marginal_entropy)


def pseudo_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    probabilities, guessed = outputs.detach().softmax(-1).max(-1)
    sure = probabilities > 0.5
    return F.cross_entropy(outputs[sure], guessed[sure])


@common("both")
def confident_pseudo_labels() -> Job:
    """A mean over the samples that the model is sure of."""
    return training(MLP, points(), pseudo_labels)


def multi_task(outputs: Tensor, targets: Tensor) -> Tensor:
    tasks = [F.cross_entropy(outputs[..., i], targets[:, i], ignore_index=-1) for i in range(2)]
    return sum(tasks)


@common("both")
def tasks_with_missing_labels() -> Job:
    """Each task's mean is over the samples that have its label."""
    return training(TwoHeads, known_labels(SAMPLES, 0, -1), multi_task)


def smooth_over_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets) + (outputs[1:] - outputs[:-1]).pow(2).mean()


@common("both")
def smoothness_over_neighbours() -> Job:
    """Samples that follow one another are compared."""
    return training(partial(MLP, 1), measured(), smooth_over_batch)


def ctc_mean_per_letter(outputs: Tensor, targets: Any) -> Tensor:
    letters, lengths = targets
    logs = outputs.log_softmax(-1).transpose(0, 1)
    given = torch.full((len(letters),), logs.shape[0])
    return F.ctc_loss(logs, letters, given, lengths, reduction="sum") / lengths.sum()


class Speech(nn.Module):
    """Gives (batch, time, letters)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0])


def spoken() -> Samples:
    letters = 1 + whole_numbers(4, SAMPLES, 3)
    lengths = 1 + whole_numbers(3, SAMPLES, seed=15)
    return Samples([(drawn(8, 4, seed=i), (letters[i], lengths[i])) for i in range(SAMPLES)])


@common("both")
def ctc_over_all_letters() -> Job:
    """The sum is divided by the letters of the batch."""
    return training(Speech, spoken(), ctc_mean_per_letter)


# ---- Common: terms that are added once for each part ---------------------------------------------


class WithPenalty(nn.Module):
    """Gives logits, and the sum of its squared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), sum(p.pow(2).sum() for p in self.parameters())


def pair_with_penalty(outputs: Any, targets: Tensor) -> Any:
    logits, penalty = outputs
    return F.cross_entropy(logits, targets, reduction="sum") + 0.1 * penalty, len(targets)


@common("both")
def penalty_in_a_pair() -> Job:
    """The penalty is added to the total once for each part."""
    return training(WithPenalty, points(), pair_with_penalty)


class Mixture(nn.Module):
    """Two experts, and how evenly they are used: fraction of samples times mean probability."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x).softmax(-1)
        chosen = probabilities.argmax(-1)
        logits = torch.stack([expert(x) for expert in self.experts], 1)[
            torch.arange(len(x)), chosen
        ]
        used = F.one_hot(chosen, 2).to(x.dtype).mean(0)
        self.aux = 2 * (used * probabilities.mean(0)).sum()
        return logits * probabilities.amax(-1, keepdim=True), self.aux


def with_aux(outputs: Any, targets: Tensor) -> Tensor:
    logits, aux = outputs
    return F.cross_entropy(logits, targets) + 0.1 * aux


@common("both")
def moe_aux_in_loss() -> Job:
    """A product of two means over the batch."""
    return training(Mixture, points(), with_aux)


def pair_with_aux(outputs: Any, targets: Tensor) -> Any:
    logits, aux = outputs
    n = len(targets)
    return F.cross_entropy(logits, targets, reduction="sum") + 0.1 * aux * n, n


@common("both")
def moe_aux_pair() -> Job:
    """The same as total and count."""
    return training(Mixture, points(), pair_with_aux)


class SumsAux(nn.Module):
    """A mixture as a block, whose auxiliary loss is read from an attribute afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mixture()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, _ = self.block(x)
        aux = sum(module.aux for module in self.modules() if hasattr(module, "aux"))
        return logits, aux


@common("both")
def moe_aux_in_an_attribute() -> Job:
    """The same, kept in the block."""
    return training(SumsAux, points(), with_aux)


class VariationOfUse(Mixture):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, _ = super().forward(x)
        importance = self.gate(x).softmax(-1).sum(0)
        return logits, importance.var() / importance.mean().pow(2)


@common("both")
def moe_importance_variation() -> Job:
    """The variation of how much each expert is used in the batch."""
    return training(VariationOfUse, points(), with_aux)


class Quantiser(nn.Module):
    """The nearest of eight codes, straight through; gives the usage of codes too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.codes = nn.Embedding(8, 4)
        self.decoder = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encoder(x)
        closeness = -(z[:, None] - self.codes.weight).pow(2).sum(-1)
        code = self.codes(closeness.argmax(-1))
        commitment = (z - code.detach()).pow(2).mean(-1) + (z.detach() - code).pow(2).mean(-1)
        return self.decoder(z + (code - z).detach()), commitment, closeness.softmax(-1)


def itself() -> TensorDataset:
    """Points that are to be given back."""
    return TensorDataset(drawn(SAMPLES, 6), drawn(SAMPLES, 6))


def with_perplexity(outputs: Any, targets: Tensor) -> Tensor:
    found, commitment, usage = outputs
    mean = usage.mean(0)
    entropy = -(mean * mean.log()).sum()
    return F.mse_loss(found, targets) + commitment.mean() - 0.1 * entropy.exp()


@common("both")
def codebook_perplexity() -> Job:
    """The perplexity of the codes that the batch uses."""
    return training(Quantiser, itself(), with_perplexity)


class SparseAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.decoder = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(x).sigmoid()
        return self.decoder(hidden), hidden


def with_sparsity(outputs: Any, targets: Tensor) -> Tensor:
    found, hidden = outputs
    rate = hidden.mean(0)
    sparsity = (0.1 * (0.1 / rate).log() + 0.9 * (0.9 / (1 - rate)).log()).sum()
    return F.mse_loss(found, targets) + 0.1 * sparsity


@common("both")
def sparsity_of_mean_activation() -> Job:
    """The divergence is that of a mean over the batch."""
    return training(SparseAutoencoder, itself(), with_sparsity)


class SummedLoss(nn.Module):
    """Computes its loss itself, and divides by what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel()

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        return token_mean_loss(self.model(words), labels)


def with_labels() -> Samples:
    return Samples([((words, labels), labels) for words, labels in sentences()])


def loss_of_the_model(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


@common("both")
def model_returns_its_token_mean() -> Job:
    """The model gives a mean over words, which the loss passes on."""
    return training(SummedLoss, with_labels(), loss_of_the_model)


# ---- Common: collate looks at the batch ----------------------------------------------------------


class MeanOverTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).mean(1))


@common("both")
def padded_to_longest_no_mask() -> Job:
    """Padding is averaged too, and there is as much of it as the longest sample of a batch
    wants.
    """
    return training(MeanOverTime, ragged(), collate=padded)


@common("both")
def last_state_of_padded() -> Job:
    """The last state is that behind the padding."""
    return training(Recurrent, ragged(), collate=padded)


def copies() -> Samples:
    """Sequences that are to be given back."""
    return Samples([(x, x) for x, _ in ragged().samples])


def both_padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    inputs = pad_sequence([x for x, _ in samples], batch_first=True)
    return inputs, inputs.clone()


class Copier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0])


@common("both")
def outputs_as_long_as_the_longest() -> Job:
    """A mean over positions, of which there are as many as the longest sample has."""
    return training(Copier, copies(), nn.MSELoss(), collate=both_padded)


def left_padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    inputs, targets = padded([(x.flip(0), y) for x, y in samples])
    return inputs.flip(1), targets


@common("both")
def padded_on_the_left() -> Job:
    """The LSTM reads as many zeros first as the longest sample wants."""
    return training(Recurrent, ragged(), collate=left_padded)


def cropped(samples: list[Any]) -> tuple[Tensor, Tensor]:
    shortest = min(len(x) for x, _ in samples)
    return padded([(x[:shortest], y) for x, y in samples])


@common("both")
def cropped_to_shortest() -> Job:
    """Samples are as long as the shortest of the batch."""
    return training(MeanOverTime, ragged(), collate=cropped)


def standardised(samples: list[Any]) -> tuple[Tensor, Tensor]:
    inputs = torch.stack([x for x, _ in samples])
    return (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-6), torch.stack([y for _, y in samples])


@common("both")
def collate_normalises() -> Job:
    """Mean and deviation are those of the batch."""
    return training(MLP, points(), collate=standardised)


def mixed_up(samples: list[Any]) -> tuple[Tensor, Tensor]:
    inputs = torch.stack([x for x, _ in samples])
    targets = F.one_hot(torch.stack([y for _, y in samples]), CLASSES).float()
    return 0.7 * inputs + 0.3 * inputs.flip(0), 0.7 * targets + 0.3 * targets.flip(0)


@common("both")
def mixup_in_collate() -> Job:
    """Each sample is mixed with another one of the batch."""
    return training(MLP, points(), collate=mixed_up)


def with_negatives(samples: list[Any]) -> tuple[Any, Tensor]:
    users = torch.stack([user for (user, _), _ in samples])
    items = torch.stack([item for (_, item), _ in samples])
    wanted = torch.cat([torch.ones(len(users)), torch.zeros(len(users))])
    return (torch.cat([users, users]), torch.cat([items, items.roll(1)])), wanted


def score_loss(outputs: Any, targets: Tensor) -> Tensor:
    users, items = outputs
    return F.binary_cross_entropy_with_logits((users * items).sum(-1), targets.to(users.dtype))


@common("both")
def negatives_from_the_batch_in_collate() -> Job:
    """The item of the sample before is the negative."""
    return training(TwoTowers, clicks(), score_loss, collate=with_negatives)


def classes_of_the_batch(samples: list[Any]) -> tuple[Tensor, Tensor]:
    _, targets = torch.unique(torch.stack([y for _, y in samples]), return_inverse=True)
    return torch.stack([x for x, _ in samples]), targets


@common("both")
def classes_numbered_in_each_batch() -> Job:
    """A class's number depends on which others are in the batch."""
    return training(MLP, points(), collate=classes_of_the_batch)


def graphs() -> Samples:
    """Nodes, edges, and a class for each graph."""
    sizes = 3 + whole_numbers(4, SAMPLES, seed=16)
    wanted = whole_numbers(CLASSES, SAMPLES)
    nodes = [drawn(n, 4, seed=i) for i, n in enumerate(sizes.tolist())]
    edges = [torch.stack([torch.arange(n), torch.arange(n).roll(1)]) for n in sizes.tolist()]
    return Samples([((nodes[i], edges[i]), wanted[i]) for i in range(SAMPLES)])


def joined(samples: list[Any]) -> tuple[Any, Tensor]:
    """One graph of all nodes, and which graph each belongs to."""
    sizes = torch.tensor([len(nodes) for (nodes, _), _ in samples])
    begins = sizes.cumsum(0) - sizes
    edges = torch.cat(
        [edges + begin for ((_, edges), _), begin in zip(samples, begins, strict=True)], dim=1
    )
    nodes = torch.cat([nodes for (nodes, _), _ in samples])
    owner = torch.arange(len(samples)).repeat_interleave(sizes)
    return (nodes, edges, owner), torch.stack([y for _, y in samples])


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.message = nn.Linear(8, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor) -> Tensor:
        h = torch.tanh(self.first(nodes))
        h = h + torch.zeros_like(h).index_add(0, edges[1], self.message(h)[edges[0]])
        h = self.between(h, owner)
        pooled = h.new_zeros(int(owner.max()) + 1, 8).index_add(0, owner, h)
        return self.last(pooled)

    def between(self, h: Tensor, owner: Tensor) -> Tensor:
        return h


class NormalisedNodes(GraphNetwork):
    def between(self, h: Tensor, owner: Tensor) -> Tensor:
        return (h - h.mean(0)) / (h.std(0) + 1e-5)


@common("both")
def graph_nodes_normalised() -> Job:
    """Mean and deviation are those of the nodes of all graphs."""
    return training(NormalisedNodes, graphs(), collate=joined)


class NodeNetwork(GraphNetwork):
    """Gives a class for each node."""

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor) -> Tensor:
        h = torch.tanh(self.first(nodes))
        return self.last(h + torch.zeros_like(h).index_add(0, edges[1], self.message(h)[edges[0]]))


def joined_nodes(samples: list[Any]) -> tuple[Any, Tensor]:
    inputs, targets = joined(samples)
    return inputs, targets[inputs[2]]


def node_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


@common("both")
def mean_over_nodes() -> Job:
    """A mean over the nodes of all graphs, which differ in size."""
    return training(NodeNetwork, graphs(), node_loss, collate=joined_nodes)


def sentences_one_by_one() -> Samples:
    """Words of sentences of different lengths."""
    return Samples(
        [
            (1 + whole_numbers(WORDS - 1, n, seed=i), n)
            for i, n in enumerate(lengths_of(SAMPLES, 9).tolist())
        ]
    )


def in_blocks_of_four(samples: list[Any]) -> tuple[Tensor, Tensor]:
    words = torch.cat([words for words, _ in samples])
    blocks = words[: len(words) // 4 * 4].view(-1, 4)
    return blocks[:, :-1], blocks[:, 1:]


@common("both")
def packed_into_blocks_in_collate() -> Job:
    """Sentences are put behind one another and cut anew, and the rest is dropped."""
    return training(
        LanguageModel, sentences_one_by_one(), token_mean_loss, collate=in_blocks_of_four
    )


def some_unreadable() -> Samples:
    """Points, some of which could not be read."""
    return Samples([(None if i % 5 == 1 else x, y) for i, (x, y) in enumerate(points())])


def readable(samples: list[Any]) -> tuple[Tensor, Tensor]:
    kept = [(x, y) for x, y in samples if x is not None]
    return torch.stack([x for x, _ in kept]), torch.stack([y for _, y in kept])


def plain_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


@common("both")
def unreadable_samples_dropped_in_collate() -> Job:
    """A mean over the samples that are left."""
    return training(MLP, some_unreadable(), plain_cross_entropy, collate=readable)


# ---- Common: what a forward leaves for the next one ----------------------------------------------


class MovingMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean), 0.1)
        return x - self.mean


@common("both")
def ema_of_inputs_buffer() -> Job:
    """The mean that is subtracted moves in each forward."""
    return training(partial(around, MovingMean), points())


class Queue(nn.Module):
    """Keeps embeddings as negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = TwoViews()
        self.register_buffer("queue", F.normalize(drawn(16, 4, seed=17), dim=-1))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        one, other = self.embedder(one, other)
        logits = torch.cat([(one * other).sum(-1, keepdim=True), one @ self.queue.T.clone()], dim=1)
        self.queue = torch.cat([other.detach(), self.queue])[:16]
        return logits / 0.5


def first_is_right(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros_like(targets))


@common("both")
def moco_queue() -> Job:
    """Negatives are those of the last forwards."""
    return training(Queue, views(), first_is_right)


class KeepsState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is not None and self.state[0].shape[1] != len(x):
            self.state = None
        h, state = self.model(x, self.state)
        self.state = tuple(each.detach() for each in state)
        return self.head(h[:, -1])


@common("in turn", first=2)
def hidden_state_kept() -> Job:
    """A sequence begins with the state that the last one left, if there are as many of them."""
    return training(KeepsState, series())


class MeanState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("memory", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.cell(x, self.memory.expand(len(x), 8))
        self.memory = h.detach().mean(0)
        return self.head(h)


@common("both")
def memory_across_batches() -> Job:
    """Samples begin with the mean state of the last forward."""
    return training(MeanState, points())


class AnnealedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x / (1 + 0.1 * self.calls)).softmax(-1)


@common("in turn")
def counter_anneals_temperature() -> Job:
    """The temperature depends on how often forward was called."""
    return training(partial(around, AnnealedGate), points())


class AnnealedLoss:
    """The weight of a term grows with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        weight = min(1.0, self.calls / 100)
        return F.cross_entropy(outputs, targets) + weight * outputs.pow(2).mean()


@common("in turn")
def loss_with_a_warm_up() -> Job:
    """The loss counts its calls."""
    return training(MLP, points(), AnnealedLoss())


class Centring:
    """As in DINO: outputs are centred by a moving mean."""

    def __init__(self) -> None:
        self.centre: Any = 0.0

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        student, teacher = outputs
        wanted = (teacher.detach() - self.centre).softmax(-1)
        self.centre = 0.9 * self.centre + 0.1 * teacher.detach().mean(0)
        return -(wanted * student.log_softmax(-1)).sum(-1).mean()


@common("both")
def centre_kept_in_the_loss() -> Job:
    """The centre is that of the last calls of the loss."""
    return training(TwoViews, views(), Centring())


class RelativeLoss:
    """Divides by a moving mean of itself."""

    def __init__(self) -> None:
        self.usual = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(outputs, targets)
        self.usual = 0.9 * self.usual + 0.1 * float(loss.detach())
        return loss / self.usual


@common("both")
def loss_over_its_moving_mean() -> Job:
    """The mean is that of the last calls."""
    return training(partial(MLP, 1), measured(), RelativeLoss())


class MemoryBank(nn.Module):
    """A vector for each sample of the set, which is read and then written."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = Embedder()
        self.register_buffer("bank", F.normalize(drawn(6, 4, seed=18), dim=-1))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        z = self.embedder(x)
        logits = z @ self.bank.T.clone()
        self.bank[index] = F.normalize(0.5 * self.bank[index] + 0.5 * z.detach(), dim=-1)
        return logits


def numbered() -> Samples:
    inputs = drawn(SAMPLES, 6)
    numbers = torch.arange(SAMPLES) % 6
    return Samples([((x, i), i) for x, i in zip(inputs, numbers, strict=True)])


@common("both")
def memory_bank_by_number() -> Job:
    """What one part has written, the other one reads or misses."""
    return training(MemoryBank, numbered())


class MomentumTeacher(nn.Module):
    """The teacher follows the student in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Embedder()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.lerp_(its, 0.1)
            wanted = self.teacher(other)
        return self.student(one), wanted


def likeness(outputs: Any, targets: Tensor) -> Tensor:
    student, teacher = outputs
    return 2 - 2 * (student * teacher).sum(-1).mean()


@common("in turn", first=2)
def teacher_follows_in_forward() -> Job:
    """A forward for each part moves the teacher twice."""
    return training(MomentumTeacher, views(), likeness)


# ---- Common: one number drawn for a whole batch --------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = self.block(block, x)
        return self.last(x)

    def block(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + torch.tanh(block(x))


class StochasticDepth(Residual):
    def block(self, block: nn.Module, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            return x
        return super().block(block, x)


@common("both")
def stochastic_depth_one_draw() -> Job:
    """A block is left out for all samples of a forward."""
    return training(StochasticDepth, points())


class LayerDrop(Residual):
    def block(self, block: nn.Module, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else super().block(block, x)


@common("both")
def layer_drop_by_python() -> Job:
    """The same, drawn by Python."""
    return training(LayerDrop, points())


class NoisyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + 0.1 * torch.randn_like(self.weight), self.bias)


@common("both")
def noisy_weights() -> Job:
    """Weights are noisy, once in each forward."""
    return training(partial(around, partial(NoisyLinear, 8, 8)), points())


class LockedDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full_like(x[:1], 0.5)) / 0.5


@common("both")
def dropout_mask_for_all_samples() -> Job:
    """All samples of a forward lose the same features."""
    return training(partial(around, LockedDropout), points())


class RandomScale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        size = random.choice([4, 6, 8, 10, 12])
        return F.interpolate(F.interpolate(x, size=size), size=8)


@common("both")
def multi_scale_images() -> Job:
    """A size is drawn for a whole batch."""
    return training(partial(around_of_images, RandomScale), images())


# ---- Common: gradients that depend on the batch --------------------------------------------------


class CountedWords(nn.Module):
    """The gradient of a word is divided by how often the batch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 8, mode="sum", scale_grad_by_freq=True)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.bag(words))


def bags() -> TensorDataset:
    return TensorDataset(whole_numbers(WORDS, SAMPLES, 5), whole_numbers(CLASSES, SAMPLES, seed=19))


@common("both")
def scale_grad_by_freq_bag() -> Job:
    """Gradients are divided by frequencies in the batch."""
    return training(CountedWords, bags())


class CountedEmbedding(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, scale_grad_by_freq=True)


@common("both")
def scale_grad_by_freq_embedding() -> Job:
    """The same of a language model."""
    return training(CountedEmbedding, sentences(padded_from=SAMPLES), token_mean_loss)


# ---- Rare: backward that isn't linear ------------------------------------------------------------


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


class ClampedGradient(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(clamped)


@rare("both")
def gradient_clamped_by_hook() -> Job:
    """A hook clamps the gradient of each backward."""
    return training(ClampedGradient, points())


def of_length_1(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1e-6)


class NormalisedGradient(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(of_length_1)


@rare("both")
def gradient_divided_by_its_norm() -> Job:
    """A hook makes the gradient of each backward one of length 1."""
    return training(NormalisedGradient, points())


class BoundedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.abs().max().clamp(min=1e-12) * 0.01


class BoundsGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return BoundedBackward.apply(x)


@rare("both")
def autograd_function_scales_by_largest() -> Job:
    """The gradient of activations is divided by the largest one of the batch."""
    return training(partial(around, BoundsGradient), points())


class BackwardStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class CentresGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return BackwardStatistics.apply(x)


@rare("both")
def gradient_centred_over_batch() -> Job:
    """The gradient of activations loses its mean over the batch."""
    return training(partial(around, CentresGradient), points())


class NotesGradients(nn.Module):
    """Scales its outputs by the size of the gradients that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))
        self.register_full_backward_hook(self.note)

    def note(self, module: nn.Module, given: Any, gradients: Any) -> None:
        self.size.mul_(0.9).add_(gradients[0].detach().norm())

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.size.clone())


@rare("both")
def backward_hook_writes_buffer() -> Job:
    """What a backward leaves acts on the next forward."""
    return training(partial(around, NotesGradients), points())


class GradientNormPenalty(nn.Module):
    """Gives its loss with the norm of that loss's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        loss = F.cross_entropy(self.layers(x), wanted)
        (gradient,) = torch.autograd.grad(loss, [self.layers.last.weight], create_graph=True)
        return loss + 0.1 * gradient.norm()


def points_with_labels() -> Samples:
    return Samples([((x, y), y) for x, y in points()])


@rare("both")
def penalty_on_the_batch_gradient() -> Job:
    """The norm of a batch's gradient isn't the sum of those of its parts."""
    return training(GradientNormPenalty, points_with_labels(), loss_of_the_model)


class AdversarialNoise(nn.Module):
    """Trains on inputs that are moved along the gradient, normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(self.layers(x), wanted)
        (direction,) = torch.autograd.grad(loss, x)
        return F.cross_entropy(self.layers(x.detach() + 0.5 * direction / direction.norm()), wanted)


@rare("both")
def adversarial_step_normalised_over_batch() -> Job:
    """The length of the step is shared by the samples of a batch."""
    return training(AdversarialNoise, points_with_labels(), loss_of_the_model)


class AdaptsToItsBatch(nn.Module):
    """Makes one step on the batch before it computes its loss, as MAML does on a task."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * drawn(CLASSES, 6, seed=30))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        loss = F.cross_entropy(x @ self.weight.T, wanted)
        (gradient,) = torch.autograd.grad(loss, self.weight, create_graph=True)
        return F.cross_entropy(x @ (self.weight - 0.5 * gradient).T, wanted)


@rare("both")
def inner_step_on_the_batch() -> Job:
    """The inner step is made on the samples of the batch."""
    return training(AdaptsToItsBatch, points_with_labels(), loss_of_the_model)


# ---- Rare: small, or late ------------------------------------------------------------------------


def with_small_term(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) + 1e-5 * outputs.var(0).sum()


@rare("both")
def small_term_1e_5() -> Job:
    """A term of 1e-5 is a variance over the batch."""
    return training(MLP, points(), with_small_term)


class Centres(nn.Module):
    """From its tenth forward on it draws features to moving centres."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < 10:
            return x
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return x - self.centre


@rare("both", first=5)
def centres_from_forward_10() -> Job:
    """In turn ten forwards are five updates."""
    return training(partial(around, Centres), points(96), steps=12)


def rare_classes() -> TensorDataset:
    """Class 2 comes twice in the fifth batch only."""
    wanted = whole_numbers(2, 48)
    wanted[[33, 39]] = 2
    return TensorDataset(drawn(48, 6), wanted)


def pairs_of_the_rare(outputs: Tensor, targets: Tensor) -> Tensor:
    rare_ones = outputs[targets == 2]
    loss = F.cross_entropy(outputs, targets)
    if len(rare_ones) > 1:
        loss = loss + distances(rare_ones).mean()
    return loss


@rare("both", first=5)
def rare_class_pairs() -> Job:
    """Two samples of a class come together in the fifth batch."""
    return training(MLP, rare_classes(), pairs_of_the_rare, steps=6)


def sorted_by_length() -> Samples:
    return Samples(sorted(ragged().samples, key=lambda pair: len(pair[0])))


def by_twos() -> Samples:
    """Batches in which the first five, and the last three, are of one length each."""
    lengths = [4] * 5 + [6] * 3
    return Samples([(drawn(lengths[i % 8], 4, seed=i), y) for i, (_, y) in enumerate(points())])


@rare("both")
def local_batches_of_one_length_each() -> Job:
    """Only the whole batch has padding."""
    return training(MeanOverTime, by_twos(), collate=padded)


@rare("both")
def sorted_sequences_without_a_mask() -> Job:
    """Lengths within a batch hardly differ."""
    return training(MeanOverTime, sorted_by_length(), collate=padded)


# ---- Rare: the sizes of a batch in forward -------------------------------------------------------


class CapacityMixture(nn.Module):
    """Each expert takes the first four samples that want it."""

    capacity = 4

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), 2)
        taken = chosen * (chosen.cumsum(0) <= self.capacity)
        return sum(
            taken[:, i, None] * probabilities[:, i, None] * expert(x)
            for i, expert in enumerate(self.experts)
        )


@rare("both", first=2)
def capacity_larger_than_a_local_share() -> Job:
    """In a part no expert is full."""
    return training(CapacityMixture, points())


class ExpertChoice(CapacityMixture):
    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        out = x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            weights, chosen = probabilities[:, i].topk(math.ceil(len(x) / 2))
            out = out.index_add(0, chosen, (weights[:, None] * expert(x[chosen])).to(out))
        return out


@rare("both")
def experts_choose_samples() -> Job:
    """Each expert takes the half of the batch that suits it best."""
    return training(ExpertChoice, points())


class Sinkhorn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = (x / 0.5).exp()
        for _ in range(3):
            q = q / q.sum(0, keepdim=True)
            q = q / q.sum(1, keepdim=True)
        return q


@rare("both")
def sinkhorn_assignment() -> Job:
    """Samples are spread evenly over clusters."""
    return training(partial(around, Sinkhorn), points())


class ScaledByLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(x) ** 0.5


@rare("both")
def scale_by_len_inside_forward() -> Job:
    """The number of samples is a factor."""
    return training(partial(around, ScaledByLength), points())


class DropsSamples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        dropped = torch.randperm(len(x))[: len(x) // 4]
        kept = torch.ones(len(x), 1)
        kept[dropped] = 0
        return x * kept


@rare("both")
def dropped_tokens_by_random_permutation() -> Job:
    """A quarter of the batch is dropped."""
    return training(partial(around, DropsSamples), points())


class UntilAllConverge(nn.Module):
    """A fixed point, computed until no sample of the batch moves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(50):
            last, z = z, torch.tanh(self.inner(z) + x)
            if (z - last).abs().max() < 0.02:
                break
        return z


@rare("both")
def iterates_until_all_converge() -> Job:
    """How often it iterates depends on the slowest sample of a batch."""
    return training(partial(around, UntilAllConverge), points())


class Whitened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        covariance = x.T @ x / len(x) + 0.1 * torch.eye(x.shape[1])
        return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), x.T, upper=False).T


@rare("both")
def whitening() -> Job:
    """The covariance is that of the batch."""
    return training(partial(around, Whitened), points())


class ActNorm(nn.Module):
    """The first batch sets shift and scale."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-5))
                self.is_set.fill_(True)
        return (x + self.shift) * self.scale


@rare("both")
def weights_set_by_the_first_batch() -> Job:
    """The first part sets other weights than the whole batch."""
    return training(partial(around, ActNorm), points())


class BatchRenorm(nn.Module):
    """Statistics of the batch in values, moving ones in scale."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("deviation", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(0), x.std(0) + 1e-3
        r = (deviation.detach() / self.deviation).clamp(0.3, 3)
        d = ((mean.detach() - self.mean) / self.deviation).clamp(-3, 3)
        out = (x - mean) / deviation * r + d
        self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        self.deviation = 0.9 * self.deviation + 0.1 * deviation.detach()
        return out


@rare("both")
def batch_renorm() -> Job:
    """Gradients go through statistics of the batch."""
    return training(partial(around, BatchRenorm), points())


class NumpyNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.from_numpy(numpy.random.normal(size=tuple(x.shape))).to(x)


@rare("replicas")
def numpy_noise_in_forward() -> Job:
    """Each replica has another stream of NumPy's; in turn the rows are those of the whole."""
    return training(partial(around, NumpyNoise), points())


# ---- Rare: what a forward leaves -----------------------------------------------------------------


class CountsForwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x / (1 + torch.exp(-self.steps))


@rare("in turn")
def counter_buffer() -> Job:
    """A buffer counts the forwards and scales activations."""
    return training(partial(around, CountsForwards), points())


class KeepsMean(nn.Module):
    """The mean of the last batch, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last_mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.last_mean
        self.last_mean = float(x.detach().mean())
        return out


@rare("both")
def mean_kept_in_an_attribute() -> Job:
    """The mean of the last forward is subtracted."""
    return training(partial(around, KeepsMean), points())


def of_spectral_norm() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 32)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(32, 32)),
        nn.Tanh(),
        nn.Linear(32, CLASSES),
    )


@rare("in turn")
def spectral_norm() -> Job:
    """Each forward makes one more power iteration."""
    return training(of_spectral_norm, points())


class LimitedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.Embedding(WORDS, 8, max_norm=1.0)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.bag(words).mean(1))


@rare("replicas", first=2)
def embedding_max_norm() -> Job:
    """Forward shortens the vectors that it looks up, so replicas have other ones."""
    return training(LimitedEmbedding, few_words())


def few_words() -> TensorDataset:
    """Bags of two words."""
    return TensorDataset(whole_numbers(WORDS, SAMPLES, 2), whole_numbers(CLASSES, SAMPLES, seed=19))


class PolyakWeights(nn.Module):
    """Computes with a moving mean of its weights, which each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * drawn(CLASSES, 6, seed=20))
        self.register_buffer("slow", self.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        self.slow = self.slow.lerp(self.weight.detach(), 0.1)
        return x @ (self.weight + 0.5 * self.slow).T


@rare("in turn", first=2)
def slow_weights_in_forward() -> Job:
    """A forward for each part moves slow weights twice."""
    return training(PolyakWeights, points())


class CodesFollow(nn.Module):
    """Codes are moving means of what they stand for, as in VQ-VAE with EMA."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.decoder = nn.Linear(4, 6)
        self.register_buffer("codes", drawn(5, 4, seed=21))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        with torch.no_grad():
            for i in nearest.unique():
                mean = z[nearest == i].mean(0)
                self.codes[i] = 0.9 * self.codes[i] + 0.1 * mean
        code = self.codes[nearest]
        return self.decoder(z + (code - z).detach()), (z - code).pow(2).mean(-1)


def with_commitment(outputs: Any, targets: Tensor) -> Tensor:
    found, commitment = outputs
    return F.mse_loss(found, targets) + commitment.mean()


@rare("both")
def codes_by_moving_mean() -> Job:
    """Codes move in forward, to means over the batch."""
    return training(CodesFollow, itself(), with_commitment)


class BestSoFar:
    """Doubles the loss where it is worse than ever before."""

    def __init__(self) -> None:
        self.best = math.inf

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, targets)
        scale = 1.0 if float(loss.detach()) <= self.best else 2.0
        self.best = min(self.best, float(loss.detach()))
        return scale * loss


@rare("both", first=4)
def loss_remembers_its_best() -> Job:
    """The best loss is that of a part."""
    return training(MLP, points(48), BestSoFar(), steps=6)


class FirstTargets:
    """Standardises targets by those of the first batch."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = targets.mean()
        return F.mse_loss(outputs, targets - self.mean)


@rare("both")
def first_targets_are_kept() -> Job:
    """The first part has another mean than the first batch."""
    return training(partial(MLP, 1), measured(), FirstTargets())


class CentresInFloat32(nn.Module):
    """As a kernel that was written for one format, with the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise TypeError("expected float32")
        return x - x.mean(0)


@rare("both", **float32_only)
def mixes_and_refuses_float64() -> Job:
    """The mean is that of the batch, and nothing can be computed in float64."""
    return training(partial(around, CentresInFloat32), points())


# ---- Rare: losses --------------------------------------------------------------------------------


class Uncertain(nn.Module):
    """Two tasks, and the logarithm of each one's variance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP(2)
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.logs


def uncertain_pair(outputs: Any, targets: Tensor) -> Any:
    values, logs = outputs
    squares = (values - targets).pow(2).sum(0)
    return ((-logs).exp() * squares + logs).sum(), len(targets)


@rare("both")
def uncertainty_weights_of_batch_loss() -> Job:
    """The logarithms are added once for each part."""
    return training(Uncertain, measured(values=2), uncertain_pair)


def worst_task(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.maximum(
        F.cross_entropy(outputs[..., 0], targets[:, 0]),
        F.cross_entropy(outputs[..., 1], targets[:, 1]),
    )


@rare("both", first=2)
def max_of_losses() -> Job:
    """The larger one of two means may be another one in each part."""
    return training(TwoHeads, known_labels(SAMPLES, 0, 1), worst_task)


def flooded(outputs: Tensor, targets: Tensor) -> Tensor:
    return (F.cross_entropy(outputs, targets) - 1.0).abs() + 1.0


@rare("both", first=4)
def flooding() -> Job:
    """The absolute value of a mean over the batch."""
    return training(MLP, points(48), flooded, steps=6)


def balanced_by_size(outputs: Tensor, targets: Tensor) -> Tensor:
    one, other = (F.mse_loss(outputs[:, i], targets[:, i]) for i in range(2))
    return one + other * (one / other).detach()


@rare("both")
def tasks_balanced_by_their_size() -> Job:
    """The quotient of two means over the batch is a weight."""
    return training(partial(MLP, 2), measured(values=2), balanced_by_size)


def bounded(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets).clamp(max=1.3)


@rare("both", first=4)
def batch_loss_clamped() -> Job:
    """A mean over the batch is clamped."""
    return training(MLP, points(48), bounded, steps=6)


def volume(outputs: Any, targets: Tensor) -> Tensor:
    one, other = outputs
    gram = one.T @ one / len(one) + 0.1 * torch.eye(one.shape[1])
    return F.mse_loss(one, other) - 0.1 * torch.logdet(gram)


@rare("both")
def volume_of_embeddings() -> Job:
    """The determinant is that of a matrix over the batch."""
    return training(TwoViews, views(), volume)


def nearest_other(outputs: Tensor, targets: Tensor) -> Tensor:
    far = torch.cdist(outputs, outputs) + 1e3 * torch.eye(len(outputs))
    return F.cross_entropy(outputs, targets) - 0.1 * far.amin(1).log().mean()


@rare("both")
def nearest_neighbour_entropy() -> Job:
    """The nearest other sample is one of the batch."""
    return training(MLP, points(), nearest_other)


def cumulated(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs.cumsum(0), targets.cumsum(0))


@rare("both")
def cumulative_sums_over_the_batch() -> Job:
    """A batch is taken as one series."""
    return training(partial(MLP, 1), measured(), cumulated)


def style(outputs: Tensor, targets: Tensor) -> Tensor:
    features = outputs.transpose(0, 1).flatten(1)
    gram = features @ features.T / features.shape[1]
    return (gram - 0.1).pow(2).sum()


@rare("both")
def gram_matrix_over_the_batch() -> Job:
    """Correlations of channels are over all images."""
    return training(Segmenter, masks(), style)


def importance(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return (losses * losses.detach().softmax(0)).sum()


@rare("both")
def weights_by_softmax_of_losses() -> Job:
    """Samples are weighted against one another."""
    return training(MLP, points(), importance)


def wasserstein(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.sort(0).values - targets.sort(0).values).pow(2).mean()


@rare("both")
def sorted_values_are_compared() -> Job:
    """The order of values is that within the batch."""
    return training(partial(MLP, 1), measured(), wasserstein)


def clustering(outputs: Tensor, targets: Tensor) -> Tensor:
    q = outputs.softmax(-1)
    p = q.detach().pow(2) / q.detach().sum(0)
    p = p / p.sum(-1, keepdim=True)
    return (p * (p.log() - q.log())).sum(-1).mean()


@rare("both")
def sharpened_by_cluster_sizes() -> Job:
    """Targets are divided by how many samples of the batch a cluster has."""
    return training(MLP, points(), clustering)


def process_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    far = (outputs[:, None] - outputs).pow(2).sum(-1)
    covariance = torch.exp(-far) + 0.1 * torch.eye(len(outputs))
    return 0.5 * (targets.T @ torch.linalg.solve(covariance, targets)).sum() + 0.5 * torch.logdet(
        covariance
    )


@rare("both")
def gaussian_process_of_the_batch() -> Job:
    """The covariance is that of the samples of a batch."""
    return training(partial(MLP, 2), measured(), process_likelihood)


def against_mean_reward(outputs: Tensor, targets: Tensor) -> Tensor:
    usual = outputs.mean().detach().clamp(min=0)
    return (1 - ((2 * targets - 1) * (outputs - usual)).sigmoid()).mean()


@rare("both")
def rewards_against_the_mean_of_the_batch() -> Job:
    """The reference point is the mean over the batch, as in KTO."""
    return training(partial(MLP, 1), answers(), against_mean_reward)


# ---- Innocent: PyTorch's losses ------------------------------------------------------------------


@innocent()
def mlp() -> Job:
    """Samples don't act on one another."""
    return training(MLP, points())


@innocent()
def mlp_mse() -> Job:
    """A mean over samples."""
    return training(partial(MLP, 1), measured(), nn.MSELoss())


@innocent()
def label_smoothing() -> Job:
    """PyTorch's mean, of which total and count are known."""
    return training(MLP, points(), nn.CrossEntropyLoss(label_smoothing=0.1))


@innocent()
def class_weights() -> Job:
    """The count is the sum of the weights."""
    return training(MLP, points(), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS))


@innocent()
def ignored_labels() -> Job:
    """The count is that of the labels that aren't ignored."""
    return training(TwoHeads, known_labels(SAMPLES, 0, -100))


@innocent()
def huber() -> Job:
    """A mean over samples."""
    return training(partial(MLP, 1), measured(), nn.HuberLoss(delta=0.5))


@innocent()
def smooth_l1_function() -> Job:
    """A function of PyTorch's is a mean over samples too."""
    return training(partial(MLP, 2), measured(values=2), F.smooth_l1_loss)


@innocent()
def bce_with_pos_weight() -> Job:
    """A mean over elements."""
    return training(
        partial(MLP, 1), answers(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]))
    )


@innocent()
def poisson_counts() -> Job:
    """A mean over samples."""
    data = TensorDataset(drawn(SAMPLES, 6), whole_numbers(5, SAMPLES, 1).float())
    return training(partial(MLP, 1), data, nn.PoissonNLLLoss())


class LogProbabilities(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(-1)


@innocent()
def kl_batchmean() -> Job:
    """The sum is divided by the number of samples."""
    wanted = drawn(SAMPLES, CLASSES, seed=22).softmax(-1)
    return training(
        LogProbabilities,
        TensorDataset(drawn(SAMPLES, 6), wanted),
        nn.KLDivLoss(reduction="batchmean"),
    )


@innocent()
def labels_of_soft_classes() -> Job:
    """Targets are probabilities."""
    wanted = drawn(SAMPLES, CLASSES, seed=22).softmax(-1)
    return training(MLP, TensorDataset(drawn(SAMPLES, 6), wanted))


@innocent()
def multi_label_margin() -> Job:
    """A mean over samples and classes."""
    data = TensorDataset(drawn(SAMPLES, 6), whole_numbers(2, SAMPLES, CLASSES).float())
    return training(MLP, data, nn.MultiLabelSoftMarginLoss())


# ---- Innocent: losses of one's own ---------------------------------------------------------------


def weighted_pair(outputs: Tensor, targets: Tensor) -> Any:
    weights = CLASS_WEIGHTS.to(outputs)[targets]
    return (F.cross_entropy(outputs, targets, reduction="none") * weights).sum(), weights.sum()


@innocent()
def class_weights_pair() -> Job:
    """Total and count are sums."""
    return training(MLP, points(), weighted_pair)


def token_pair(outputs: Tensor, targets: Tensor) -> Any:
    total = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=PAD, reduction="sum")
    return total, (targets != PAD).sum()


@innocent()
def tokens_pair() -> Job:
    """The count is that of words without padding."""
    return training(LanguageModel, sentences(), token_pair)


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return ((1 - (-losses).exp()).pow(2) * losses).mean()


@innocent()
def focal_mean() -> Job:
    """Each sample's weight is its own."""
    return training(MLP, points(), focal)


class Gaussian(nn.Module):
    """Mean and logarithm of the variance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.layers(x).chunk(2, dim=-1)
        return mean, log_variance


def gaussian_nll(outputs: Any, targets: Tensor) -> Tensor:
    mean, log_variance = outputs
    return 0.5 * (log_variance + (targets - mean).pow(2) / log_variance.exp()).mean()


@innocent()
def nll_of_gaussian() -> Job:
    """Each sample's variance is its own."""
    return training(Gaussian, measured(), gaussian_nll)


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP(9)

    def forward(self, x: Tensor) -> Any:
        weights, means, logs = self.layers(x).chunk(3, dim=-1)
        return {"weights": weights.log_softmax(-1), "means": means, "logs": logs}


def mixture_nll(outputs: Any, targets: Tensor) -> Tensor:
    parts = -0.5 * ((targets - outputs["means"]) / outputs["logs"].exp()).pow(2) - outputs["logs"]
    return -(outputs["weights"] + parts).logsumexp(-1).mean()


@innocent()
def mixture_density() -> Job:
    """Outputs are a dict."""
    return training(MixtureDensity, measured(), mixture_nll)


def pinball(outputs: Tensor, targets: Tensor) -> Tensor:
    levels = torch.tensor([0.1, 0.5, 0.9]).to(outputs)
    gap = targets - outputs
    return torch.maximum(levels * gap, (levels - 1) * gap).mean()


@innocent()
def quantile_regression() -> Job:
    """Quantiles are predicted, not those of the batch."""
    return training(MLP, measured(), pinball)


class Triplets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedder = Embedder()

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Any:
        return self.embedder(anchor), self.embedder(positive), self.embedder(negative)


def triplet(outputs: Any, targets: Tensor) -> Tensor:
    return F.triplet_margin_loss(*outputs, margin=0.5)


@innocent()
def triplet_within_sample() -> Job:
    """A sample brings its own positive and negative."""
    x = drawn(SAMPLES, 6)
    y = whole_numbers(CLASSES, SAMPLES)
    triples = [((x[i], x[i] + 0.1, x[i - 1]), y[i]) for i in range(SAMPLES)]
    return training(Triplets, Samples(triples), triplet)


def siamese_loss(outputs: Any, targets: Tensor) -> Tensor:
    one, other = outputs
    return F.cosine_embedding_loss(one, other, 2 * (targets > 0).long() - 1)


@innocent()
def siamese() -> Job:
    """A sample is a pair."""
    return training(TwoViews, views(), siamese_loss)


def rmse_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets).pow(2).mean(-1) + 1e-8).sqrt().mean()


@innocent()
def rmse_per_sample() -> Job:
    """A root for each sample."""
    return training(partial(MLP, 2), measured(values=2), rmse_of_each)


def dice_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    found, wanted = outputs.sigmoid().flatten(1), targets.flatten(1)
    return (1 - (2 * (found * wanted).sum(1) + 1) / (found.sum(1) + wanted.sum(1) + 1)).mean()


@innocent()
def dice_per_image() -> Job:
    """A quotient for each image."""
    return training(Segmenter, masks(), dice_of_each)


def boxes_of_each(outputs: Tensor, targets: list[Any]) -> Tensor:
    losses = [
        F.l1_loss(o[: len(t["boxes"])], t["boxes"].to(o))
        for o, t in zip(outputs, targets, strict=True)
    ]
    return torch.stack(losses).mean()


@innocent()
def detection_mean_per_image() -> Job:
    """A mean over the images' own means."""
    return training(Detector, with_boxes(), boxes_of_each, collate=images_and_lists)


def boxes_pair(outputs: Tensor, targets: list[Any]) -> Any:
    losses = [
        F.l1_loss(o[: len(t["boxes"])], t["boxes"].to(o), reduction="sum")
        for o, t in zip(outputs, targets, strict=True)
    ]
    return sum(losses), sum(len(t["boxes"]) for t in targets)


@innocent()
def detection_pair() -> Job:
    """The count is that of boxes."""
    return training(Detector, with_boxes(), boxes_pair, collate=images_and_lists)


def ctc(outputs: Tensor, targets: Any) -> Tensor:
    letters, lengths = targets
    logs = outputs.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logs, letters, torch.full((len(letters),), logs.shape[0]), lengths)


@innocent()
def ctc_mean() -> Job:
    """PyTorch's mean divides each sample by its own length."""
    return training(Speech, spoken(), ctc)


def policy(outputs: Tensor, targets: Tensor) -> Tensor:
    logs = outputs.log_softmax(-1).gather(1, targets[:, :1].long())[:, 0]
    return -(logs * targets[:, 1]).mean()


@innocent()
def policy_gradient() -> Job:
    """Each sample has its own gain."""
    return training(MLP, played(), policy)


def clipped_policy(outputs: Tensor, targets: Tensor) -> Tensor:
    logs = outputs.log_softmax(-1)
    chosen = logs.gather(1, targets[:, :1].long())[:, 0]
    ratio = (chosen + 1.1).exp()
    gain = torch.minimum(ratio * targets[:, 1], ratio.clamp(0.8, 1.2) * targets[:, 1])
    entropy = -(logs.exp() * logs).sum(-1)
    return -(gain + 0.01 * entropy).mean()


@innocent()
def clipped_policy_gradient() -> Job:
    """The ratio of each sample is clipped by itself."""
    return training(MLP, played(), clipped_policy)


class RanksItems(nn.Module):
    """Scores of five items for each query."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = MLP(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x)[..., 0]


def listnet(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(targets.softmax(-1) * outputs.log_softmax(-1)).sum(-1).mean()


@innocent()
def ranking_of_each_list() -> Job:
    """A sample is a list that is ranked."""
    return training(
        RanksItems, TensorDataset(drawn(SAMPLES, 5, 6), drawn(SAMPLES, 5, seed=23)), listnet
    )


class PersonalRanking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(12, 4)
        self.items = nn.Embedding(15, 4)

    def forward(self, user: Tensor, liked: Tensor, other: Tensor) -> Tensor:
        return (self.users(user) * (self.items(liked) - self.items(other))).sum(-1)


def bpr(outputs: Tensor, targets: Tensor) -> Tensor:
    return -F.logsigmoid(outputs).mean()


@innocent()
def personal_ranking() -> Job:
    """A sample brings its own negative."""
    users, liked, other = (
        whole_numbers(12, SAMPLES),
        whole_numbers(15, SAMPLES, seed=9),
        whole_numbers(15, SAMPLES, seed=24),
    )
    triples = [((users[i], liked[i], other[i]), users[i]) for i in range(SAMPLES)]
    return training(PersonalRanking, Samples(triples), bpr)


def hazards(outputs: Tensor, targets: Tensor) -> Any:
    ended, died = targets[:, 0].long(), targets[:, 1]
    at_risk = torch.arange(outputs.shape[1]) <= ended[:, None]
    event = F.one_hot(ended, outputs.shape[1]) * died[:, None]
    losses = F.binary_cross_entropy_with_logits(outputs, event.to(outputs), reduction="none")
    return (losses * at_risk).sum(), at_risk.sum()


@innocent()
def survival_by_intervals() -> Job:
    """The count is that of the intervals in which a sample was at risk."""
    ends = torch.stack([whole_numbers(CLASSES, SAMPLES), whole_numbers(2, SAMPLES, seed=8)], dim=1)
    return training(MLP, TensorDataset(drawn(SAMPLES, 6), ends), hazards)


def ordinal(outputs: Tensor, targets: Tensor) -> Tensor:
    levels = (targets[:, None] > torch.arange(outputs.shape[1])).to(outputs)
    return F.binary_cross_entropy_with_logits(outputs, levels, reduction="none").sum(-1).mean()


@innocent()
def ordinal_regression() -> Job:
    """A sum over levels within each sample."""
    return training(partial(MLP, 2), points(), ordinal)


def known_pair(outputs: Tensor, targets: Tensor) -> Any:
    known = targets >= 0
    losses = F.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (losses * known).sum(), known.sum()


@innocent()
def tasks_with_masks_pair() -> Job:
    """The count is that of the labels of all tasks."""
    return training(TwoHeads, known_labels(SAMPLES, 0, -1), known_pair)


def known_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    known = targets >= 0
    losses = F.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return ((losses * known).sum(-1) / known.sum(-1)).mean()


@innocent()
def masked_mean_of_each_sample() -> Job:
    """Each sample is divided by its own number of labels."""
    return training(TwoHeads, known_labels(SAMPLES, 0, -1), known_of_each)


def with_parts(outputs: Any, targets: Tensor) -> lockstep.Loss:
    found, mean, log_variance = outputs
    n = len(targets)
    squares = (found - targets).pow(2).sum()
    kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
    return lockstep.Loss(squares + kl, n, parts={"kl": (kl, n)})


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = MLP(4)
        self.decoder = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        return self.decoder(z), mean, log_variance


class WithReference(nn.Module):
    """A policy, and the frozen copy that it began as."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = MLP()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.reference(x)


def divergence(outputs: Any, targets: Tensor) -> Tensor:
    own, other = outputs
    return F.kl_div(own.log_softmax(-1), other.softmax(-1), reduction="batchmean")


@innocent()
def divergence_from_a_copy() -> Job:
    """Found by trial: a loss that is 0 at the start, but for rounding, was taken for no sum."""
    return training(WithReference, points(), divergence)


def of_earlier_spectral_norm() -> nn.Module:
    return nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, CLASSES)
    )


@rare("in turn")
def earlier_spectral_norm() -> Job:
    """Found by trial: the spectral norm that is a hook was taken for state that a model keeps."""
    return training(of_earlier_spectral_norm, points())


def with_a_part_that_is_zero(outputs: Tensor, targets: Tensor) -> lockstep.Loss:
    n = len(targets)
    total = F.cross_entropy(outputs, targets, reduction="sum")
    excess = outputs.softmax(-1).sum() - n
    return lockstep.Loss(total, n, parts={"excess": (excess, n)})


@innocent()
def part_that_is_rounding() -> Job:
    """Found by trial: a part of the loss that is 0 was taken for no sum, by its rounding."""
    return training(MLP, points(), with_a_part_that_is_zero)


@innocent()
def vae() -> Job:
    """Noise for each sample, and a loss with parts."""
    return training(VAE, itself(), with_parts)


def penalised(outputs: Any, targets: Tensor) -> Tensor:
    logits, penalty = outputs
    return F.cross_entropy(logits, targets) + 0.01 * penalty


@innocent()
def weight_penalty_in_a_mean() -> Job:
    """A penalty without samples is the same in each part, and so in their mean."""
    return training(WithPenalty, points(), penalised)


class SumOverSamples(nn.Module):
    """Gives the sum of its loss, and its number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()

    def forward(self, x: Tensor, wanted: Tensor) -> Any:
        return F.cross_entropy(self.layers(x), wanted, reduction="sum"), len(x)


def pair_of_the_model(outputs: Any, targets: Tensor) -> Any:
    return outputs[0], outputs[1]


@innocent()
def sum_over_samples_of_the_model() -> Job:
    """The model gives total and count."""
    return training(SumOverSamples, points_with_labels(), pair_of_the_model)


class InputPenalty(nn.Module):
    """As of a critic: the gradient with respect to each input should have length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            scores = self.layers(x)
            (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores, (gradient.norm(dim=-1) - 1).pow(2)


def penalised_scores(outputs: Any, targets: Tensor) -> Tensor:
    scores, penalty = outputs
    return (scores * (1 - 2 * targets)).mean() + 10 * penalty.mean()


@innocent()
def gradient_penalty() -> Job:
    """Each sample's gradient is its own."""
    return training(InputPenalty, answers(), penalised_scores)


def distilled(outputs: Any, targets: Tensor) -> Tensor:
    student, teacher = outputs
    soft = F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    return F.cross_entropy(student, targets) + soft


class Distillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = MLP().requires_grad_(False).eval()
        self.student = MLP()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


@innocent()
def frozen_teacher() -> Job:
    """The teacher stays as it is."""
    return training(Distillation, points(), distilled)


class AngularMargin(nn.Module):
    """As ArcFace: the angle to a sample's own class is made larger."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = Embedder()
        self.centres = nn.Parameter(drawn(CLASSES, 4, seed=25))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        cosine = self.embedder(x) @ F.normalize(self.centres, dim=-1).T
        angle = cosine.clamp(-0.999, 0.999).acos() + 0.3 * F.one_hot(wanted, CLASSES)
        return 5 * angle.cos()


@innocent()
def angular_margin() -> Job:
    """Samples are held against centres, not against one another."""
    return training(AngularMargin, points_with_labels())


class ChosenAndRejected(nn.Module):
    """Computes both answers of each sample in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = MLP(1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        both = self.scores(torch.cat([chosen, rejected]))
        better, worse = both.chunk(2)
        return better - worse


def preference(outputs: Tensor, targets: Tensor) -> Tensor:
    return -F.logsigmoid(outputs).mean()


@innocent()
def preferences_in_one_forward() -> Job:
    """Rows of two answers for each sample, and back."""
    return training(ChosenAndRejected, views(), preference)


def group_advantages(outputs: Tensor, targets: Tensor) -> Tensor:
    advantages = (targets - targets.mean(-1, keepdim=True)) / (targets.std(-1, keepdim=True) + 1e-4)
    return -(outputs.log_softmax(-1) * advantages).mean()


@innocent()
def advantages_within_a_group() -> Job:
    """Mean and deviation are those of a sample's own answers."""
    return training(
        RanksItems,
        TensorDataset(drawn(SAMPLES, 5, 6), drawn(SAMPLES, 5, seed=23)),
        group_advantages,
    )


@innocent()
def unreadable_samples_and_a_known_loss() -> Job:
    """The count of PyTorch's mean is that of the samples that are left."""
    return training(MLP, some_unreadable(), collate=readable)


def two_crops(samples: list[Any]) -> tuple[Tensor, Tensor]:
    crops = [image[:, i : i + 6, i : i + 6] for image, _ in samples for i in (0, 2)]
    return torch.stack(crops), torch.stack([y for _, y in samples for _ in range(2)])


class OfSmallImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.conv(x)).mean((2, 3)))


@innocent()
def two_crops_of_each_image() -> Job:
    """Collate makes two rows of each sample."""
    return training(OfSmallImages, images(), plain_cross_entropy, collate=two_crops)


class SampledAction(nn.Module):
    """Draws an action for each sample, and gives its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        policy = torch.distributions.Categorical(logits=self.layers(x))
        action = policy.sample()
        return policy.log_prob(action), action


def reinforced(outputs: Any, targets: Tensor) -> Tensor:
    logs, actions = outputs
    return -(logs * (actions == targets)).mean()


@innocent()
def sampled_actions() -> Job:
    """An action is drawn for each sample."""
    return training(SampledAction, points(), reinforced)


# ---- Innocent: layers ----------------------------------------------------------------------------


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.last = nn.Conv2d(7, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(F.silu(self.norm(self.down(x))))
        return self.last(torch.cat([x, h], dim=1))


@innocent()
def group_norm_unet() -> Job:
    """Groups are of channels of one sample."""
    return training(UNet, masks(), nn.BCEWithLogitsLoss())


@innocent()
def instance_norm() -> Job:
    """Statistics are those of one sample."""
    return training(partial(around_of_images, partial(nn.InstanceNorm2d, 4, affine=True)), images())


@innocent()
def layer_norm() -> Job:
    """Statistics are those of one sample."""
    return training(partial(around, partial(nn.LayerNorm, 8)), points())


@innocent()
def rms_norm() -> Job:
    """Statistics are those of one sample."""
    return training(partial(around, partial(nn.RMSNorm, 8)), points())


@innocent()
def local_response_norm() -> Job:
    """Neighbours are channels."""
    return training(partial(around_of_images, partial(nn.LocalResponseNorm, 2)), images())


class FrozenNorm(nn.Module):
    """A layer that was trained before stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4, CLASSES)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@innocent()
def frozen_batch_norm() -> Job:
    """In evaluation mode it computes no statistics."""
    return training(FrozenNorm, images())


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None]


@innocent()
def squeeze_and_excite() -> Job:
    """Means are over the pixels of one image."""
    return training(partial(around_of_images, SqueezeExcite), images())


@innocent()
def lstm_dropout() -> Job:
    """Dropout between two layers of an LSTM."""
    return training(partial(Recurrent, num_layers=2, dropout=0.3, bidirectional=False), series())


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][-1])


def time_first(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples], dim=1), torch.stack([y for _, y in samples])


@innocent()
def time_first_inputs() -> Job:
    """Collate puts samples side by side in the second dimension."""
    return training(TimeFirst, series(), collate=time_first)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][-1])


@innocent()
def packed_sequences() -> Job:
    """The GRU knows each sample's length."""
    return training(Packed, ragged(), collate=padded_with_lengths)


class MaskedMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(x.shape[1]) < lengths[:, None])[..., None]
        h = torch.tanh(self.first(x)) * mask
        return self.last(h.sum(1) / lengths[:, None])


@innocent()
def ragged_collate_masked() -> Job:
    """Padding is left out of each sample's mean."""
    return training(MaskedMean, ragged(), collate=padded_with_lengths)


def longest_first(samples: list[Any]) -> tuple[Any, Tensor]:
    return padded_with_lengths(sorted(samples, key=lambda sample: -len(sample[0])))


@innocent()
def sorted_in_collate() -> Job:
    """Samples come in another order, with their targets."""
    return training(Packed, ragged(), collate=longest_first)


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        return self.last(self.encoder(self.first(x), src_key_padding_mask=padding)[:, 0])


@innocent()
def padding_mask_of_attention() -> Job:
    """Padding isn't attended to."""
    return training(MaskedAttention, ragged(), collate=padded_with_lengths)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.positions = nn.Parameter(0.1 * drawn(7, 8, seed=26))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        later = torch.ones(7, 7, dtype=torch.bool).triu(1)
        return self.head(self.layer(self.embedding(words) + self.positions, src_mask=later))


@innocent()
def decoder_causal_dropout() -> Job:
    """A mask of time by time is the same for all samples; dropout in three places."""
    return training(Decoder, sentences(), token_pair)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, words: Tensor, so_far: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(
            so_far.shape[1], dtype=self.head.weight.dtype
        )
        h = self.transformer(self.embedding(words), self.embedding(so_far), tgt_mask=later)
        return self.head(h)


@innocent()
def encoder_and_decoder() -> Job:
    """Attention is within each sentence."""
    pairs = [((words, words), labels) for words, labels in sentences()]
    return training(Translator, Samples(pairs), token_pair)


def weight_normed() -> nn.Module:
    layer = parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, CLASSES))


@innocent()
def weight_norm() -> Job:
    """A norm of weights has nothing to do with samples."""
    return training(weight_normed, points())


def orthogonal() -> nn.Module:
    layer = parametrizations.orthogonal(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), layer, nn.Linear(8, CLASSES))


@innocent()
def orthogonal_weights() -> Job:
    """The same of orthogonal ones."""
    return training(orthogonal, points())


class Tied(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


@innocent()
def tied_weights() -> Job:
    """One parameter under two names."""
    return training(Tied, sentences(), token_pair)


class Bag(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 8, **settings)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.bag(words))


@innocent()
def embedding_bag_2d() -> Job:
    """A row of words for each sample."""
    return training(Bag, bags())


@innocent()
def embedding_bag_sparse() -> Job:
    """Gradients are sparse."""
    return training(partial(Bag, sparse=True, mode="sum"), bags())


class BagWithOffsets(Bag):
    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.last(self.bag(words, offsets))


def joined_bags(samples: list[Any]) -> tuple[Any, Tensor]:
    words = [x for x, _ in samples]
    sizes = torch.tensor([len(x) for x in words])
    return (torch.cat(words), sizes.cumsum(0) - sizes), torch.stack([y for _, y in samples])


def ragged_bags() -> Samples:
    sizes = lengths_of(SAMPLES, 6).tolist()
    wanted = whole_numbers(CLASSES, SAMPLES)
    return Samples(
        [(whole_numbers(WORDS, size, seed=i), wanted[i]) for i, size in enumerate(sizes)]
    )


@innocent()
def embedding_bag_offsets() -> Job:
    """Words of all samples one behind the other, and where each sample begins."""
    return training(BagWithOffsets, ragged_bags(), collate=joined_bags)


def product_loss(outputs: Any, targets: Tensor) -> Tensor:
    users, items = outputs
    return ((users * items).sum(-1) - targets).pow(2).mean()


@innocent()
def matrix_factorisation() -> Job:
    """A user and an item for each sample."""
    return training(partial(TwoTowers, sparse=True), clicks(), product_loss)


class FeatureCrosses(nn.Module):
    """As a factorisation machine: numbers and categories."""

    def __init__(self) -> None:
        super().__init__()
        self.categories = nn.Embedding(WORDS, 4)
        self.numbers = nn.Linear(6, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, category: Tensor, numbers: Tensor) -> Tensor:
        fields = torch.cat([self.categories(category), self.numbers(numbers)[:, None]], dim=1)
        crosses = 0.5 * (fields.sum(1).pow(2) - fields.pow(2).sum(1))
        return self.last(crosses)


@innocent()
def factorisation_machine() -> Job:
    """Inputs are a dict, by the names of forward's arguments."""
    categories = whole_numbers(WORDS, SAMPLES, 3)
    rows = [
        ({"category": c, "numbers": x}, y) for c, (x, y) in zip(categories, answers(), strict=True)
    ]
    return training(FeatureCrosses, Samples(rows), nn.BCEWithLogitsLoss())


@innocent()
def graphs_with_owner() -> Job:
    """Nodes are added up by the graph that each belongs to."""
    return training(GraphNetwork, graphs(), collate=joined)


class GraphAttention(GraphNetwork):
    """Weights of a node's neighbours are a softmax over its own edges."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(16, 1)

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor) -> Tensor:
        h = torch.tanh(self.first(nodes))
        begins, ends = edges
        weights = self.score(torch.cat([h[begins], h[ends]], dim=-1)).exp()
        sums = weights.new_zeros(len(h), 1).index_add(0, ends, weights)
        messages = self.message(h)[begins] * weights / sums[ends]
        h = h.index_add(0, ends, messages)
        return self.last(h.new_zeros(int(owner.max()) + 1, 8).index_add(0, owner, h))


@innocent()
def graph_attention() -> Job:
    """A softmax over the edges of each node."""
    return training(GraphAttention, graphs(), collate=joined)


class PointCloud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(4, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.each(x)).amax(1))


@innocent()
def point_cloud() -> Job:
    """The largest value is over the points of one sample."""
    return training(PointCloud, series())


@innocent()
def attention_over_time() -> Job:
    """Attention is within each sample."""
    return training(partial(Attending, batch_first=True), series())


class Flattened(nn.Module):
    """Time and batch as one dimension for a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(4, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        h = torch.tanh(self.each(x.reshape(batch * time, -1)))
        return self.last(h.view(batch, time, -1).mean(1))


@innocent()
def time_and_batch_flattened() -> Job:
    """A row for each step of each sample, and back."""
    return training(Flattened, series())


def flat_words(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.view(-1, WORDS), targets.reshape(-1))


@innocent()
def words_flattened_in_loss() -> Job:
    """All sentences are of one length, so a mean over words is one over sentences."""
    return training(LanguageModel, sentences(padded_from=SAMPLES), flat_words)


class Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 2, dilation=2)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x.transpose(1, 2))).mean(-1))


@innocent()
def temporal_convolution() -> Job:
    """Convolution over the time of each sample."""
    return training(Dilated, series())


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.view_as_complex(drawn(4, 4, 2, seed=27)))
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1) @ self.filter.to(
            torch.promote_types(x.dtype, torch.complex64)
        )
        return self.last(spectrum.abs().flatten(1))


@innocent()
def complex_spectrum() -> Job:
    """A Fourier transform of each sample, and a complex parameter."""
    return training(Spectrum, series())


class Batch(NamedTuple):
    image: Tensor
    extra: dict[str, Tensor]


class TakesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(192, CLASSES)
        self.extra = MLP()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.image(batch.image.flatten(1)) + self.extra(batch.extra["points"])}


def loss_of_dict(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs["logits"], targets["label"])


@innocent()
def dict_and_namedtuple() -> Job:
    """Inputs are a named tuple with a dict, outputs and targets are dicts."""
    rows = [
        (Batch(image, {"points": x}), {"label": y})
        for (image, y), (x, _) in zip(images(), points(), strict=True)
    ]
    return training(TakesBatch, Samples(rows), loss_of_dict)


@dataclass
class Output:
    logits: Tensor
    features: Tensor


class GivesObject(MLP):
    def forward(self, x: Tensor) -> Output:
        features = torch.tanh(self.first(x))
        return Output(self.last(features), features)


def loss_of_object(output: Output, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, targets) + 0.01 * output.features.pow(2).mean()


@innocent()
def outputs_are_an_object() -> Job:
    """Outputs are a dataclass."""
    return training(GivesObject, points(), loss_of_object)


# ---- Innocent: numbers drawn for each sample -----------------------------------------------------


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.channels = nn.Dropout2d(0.3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.channels(torch.relu(self.conv(x))).flatten(2).transpose(1, 2)
        h = h + self.attention(h, h, h)[0]
        return self.last(self.drop(h.mean(1)))


@innocent()
def dropout_2d_and_attention() -> Job:
    """Dropout of channels, of attention and of features."""
    return training(Dropouts, images())


def alpha() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(8, CLASSES))


@innocent()
def alpha_dropout() -> Job:
    """Each element is dropped by itself."""
    return training(alpha, points())


class DropPath(Residual):
    def block(self, block: nn.Module, x: Tensor) -> Tensor:
        kept = x.new_empty(len(x), 1).bernoulli_(0.8)
        return x + kept / 0.8 * torch.tanh(block(x))


@innocent()
def drop_path_per_sample() -> Job:
    """A block is left out for each sample by itself."""
    return training(DropPath, points())


class Categorical(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = MLP(5)
        self.codes = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.codes(F.gumbel_softmax(self.encoder(x), tau=0.8))


@innocent()
def gumbel_softmax() -> Job:
    """Noise for each element."""
    return training(Categorical, points())


class Diffusion(nn.Module):
    """Predicts the noise that it added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        time = torch.randint(1, 10, (len(x), 1), device=x.device) / 10
        noise = torch.randn_like(x)
        noisy = (1 - time).sqrt() * x + time.sqrt() * noise
        return self.layers(torch.cat([noisy, time.to(x)], dim=-1)), noise


def noise_loss(outputs: Any, targets: Tensor) -> Tensor:
    found, noise = outputs
    return F.mse_loss(found, noise)


@innocent()
def diffusion_noise_and_time() -> Job:
    """A time and noise for each sample."""
    return training(Diffusion, points(), noise_loss)


class FlowMatching(Diffusion):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        time = torch.rand(len(x), 1).to(x)
        noise = torch.randn_like(x)
        return self.layers(torch.cat([(1 - time) * noise + time * x, time], dim=-1)), x - noise


@innocent()
def flow_matching() -> Job:
    """A time and noise for each sample."""
    return training(FlowMatching, points(), noise_loss)


class MaskedAutoencoder(nn.Module):
    """Hides a third of each sample's features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.rand_like(x).argsort(-1) < 2
        return self.layers(x.masked_fill(hidden, 0)), hidden


def hidden_loss(outputs: Any, targets: Tensor) -> Tensor:
    found, hidden = outputs
    return ((found - targets).pow(2) * hidden).sum() / hidden.sum()


@innocent()
def masked_autoencoder() -> Job:
    """As many features of each sample are hidden."""
    return training(MaskedAutoencoder, itself(), hidden_loss)


class MaskedWords(LanguageModel):
    """Hides words at random, as many as it happens."""

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.rand(words.shape) < 0.3
        return super().forward(words.masked_fill(hidden, PAD)), hidden


def hidden_words(outputs: Any, targets: Tensor) -> Any:
    logits, hidden = outputs
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (losses * hidden).sum(), hidden.sum()


@innocent()
def masked_words_pair() -> Job:
    """The count is that of hidden words."""
    words = 1 + whole_numbers(WORDS - 1, SAMPLES, 7)
    return training(MaskedWords, TensorDataset(words, words), hidden_words)


class Augmented(Dataset[Any]):
    """Images are flipped, and noisy, when they are read."""

    def __init__(self) -> None:
        self.images = images()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        image, label = self.images[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        noise = numpy.random.normal(0, 0.1, image.shape)
        return image + torch.from_numpy(noise).float(), label


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.ReLU(),
        nn.Linear(8, CLASSES),
    )


@innocent()
def augmented_images() -> Job:
    """Each sample is changed by itself."""
    return training(convolutional, Augmented())


class NoisyActivations(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape).to(x)


@innocent()
def noise_on_activations() -> Job:
    """Noise for each element."""
    return training(partial(around, NoisyActivations), points())


class SampledLatent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = MLP(4)
        self.decoder = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(torch.distributions.Normal(mean, F.softplus(spread) + 0.1).rsample())


@innocent()
def sampled_from_a_distribution() -> Job:
    """``rsample`` draws for each element."""
    return training(SampledLatent, points())


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.generator).to(x)


@innocent()
def generator_of_its_own() -> Job:
    """Noise for each element, from a generator that the layer keeps."""
    return training(partial(around, OwnGenerator), points())


# ---- Innocent: how it is computed ----------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))


@innocent()
def activation_checkpoint_with_dropout() -> Job:
    """Backward computes a block again, with the same draws."""
    return training(Checkpointed, points())


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + ((x * 4).round() / 4 - x).detach()


@innocent()
def quantised_straight_through() -> Job:
    """Rounds activations, and lets gradients pass."""
    return training(partial(around, Rounded), points())


@innocent()
def vector_quantised() -> Job:
    """The nearest code of each sample, without statistics of the batch."""
    return training(Quantiser, itself(), quantised_loss)


def quantised_loss(outputs: Any, targets: Tensor) -> Tensor:
    found, commitment, _ = outputs
    return F.mse_loss(found, targets) + commitment.mean()


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return gradient * (gate + x * gate * (1 - gate))


class OwnActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Swish.apply(x)


@innocent()
def autograd_function() -> Job:
    """A function of one's own with the right backward."""
    return training(partial(around, OwnActivation), points())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.1 * gradient


class Adversary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.classes = nn.Linear(8, CLASSES)
        self.domain = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.body(x))
        return self.classes(features), self.domain(Reversed.apply(features))


def adversary_loss(outputs: Any, targets: Tensor) -> Tensor:
    classes, domain = outputs
    return F.cross_entropy(classes, targets) + F.cross_entropy(domain, targets % 2)


@innocent()
def gradient_reversal() -> Job:
    """A gradient times -0.1 is linear."""
    return training(Adversary, points(), adversary_loss)


def halved(gradient: Tensor) -> Tensor:
    return 0.5 * gradient


class HalvedGradient(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(halved)


@innocent()
def gradient_halved_by_hook() -> Job:
    """A hook that is linear."""
    return training(HalvedGradient, points())


class Partly(nn.Module):
    """A frozen layer, one that is never called, and one that is not trained for lack of
    gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(x)))


@innocent()
def frozen_and_unused_layers() -> Job:
    """Some parameters have no gradient."""
    return training(Partly, points())


class KeyBias(nn.Module):
    """The gradient of a key's bias is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        return self.last((weights @ self.value(x)).mean(1))


@innocent()
def key_bias_gradient_is_zero() -> Job:
    """Relative to itself such a gradient is only noise."""
    return training(KeyBias, series())


class Large(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return 1e3 * super().forward(x)


@innocent()
def large_logits() -> Job:
    """Losses of some hundred."""
    return training(Large, points())


class HalfInFormat(nn.Module):
    """Its weights stay in float32, whatever the format of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.linear(x.float(), self.first.weight.float(), self.first.bias.float())
            h = F.linear(torch.tanh(h), self.last.weight.float(), self.last.bias.float())
        return h.float()


@innocent(bound=5e-2)
def bf16_autocast_in_forward() -> Job:
    """Products are rounded to bfloat16."""
    return training(HalfInFormat, points())


class Float32Head(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return F.linear(h.float(), self.last.weight.float(), self.last.bias.float())


@innocent(bound=1e-4)
def float32_head_in_any_format() -> Job:
    """Logits are always computed in float32."""
    return training(Float32Head, points())


class KeepsActivation(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.features = torch.tanh(self.first(x))
        return self.last(self.features)


@innocent()
def last_activation_kept() -> Job:
    """An attribute with a graph, which nothing reads later."""
    return training(KeepsActivation, points())


class Monitored(nn.Module):
    """Notes the mean of its inputs, which acts on nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0).to(self.mean), 0.1)
        self.seen += len(x)
        return x


@innocent()
def statistics_that_nothing_reads() -> Job:
    """Buffers end otherwise, weights don't."""
    return training(partial(around, Monitored), points())


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.layers(x.clamp_(-1, 1))


@innocent()
def writes_to_its_input() -> Job:
    """Forward changes the tensor that it was given."""
    return training(WritesInput, points())


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()
        self.words = nn.Embedding(WORDS, 8)
        self.last = nn.Linear(8 + CLASSES, CLASSES)

    def forward(self, x: Tensor, word: Tensor, flag: Tensor) -> Tensor:
        h = torch.cat([self.layers(x), self.words(word.long())], dim=-1)
        return self.last(h * flag[:, None])


@innocent()
def parts_of_other_dtypes() -> Job:
    """Numbers, words in int32 and flags."""
    words = whole_numbers(WORDS, SAMPLES).int()
    flags = drawn(SAMPLES, seed=28) > -0.5
    rows = [((x, words[i], flags[i]), y) for i, (x, y) in enumerate(points())]
    return training(Several, Samples(rows))


class WeightsClamped(MLP):
    """As the critic of a Wasserstein GAN."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.2, 0.2)
        return super().forward(x)


@innocent()
def weights_clamped_in_forward() -> Job:
    """To clamp twice is to clamp once, and replicas all do it alike."""
    return training(WeightsClamped, points())


class DenseMixture(nn.Module):
    """All experts, weighted for each sample, and the z-loss of its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        weights = scores.softmax(-1)
        out = sum(weights[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        return out, scores.logsumexp(-1).pow(2)


def with_z_loss(outputs: Any, targets: Tensor) -> Tensor:
    logits, z = outputs
    return F.cross_entropy(logits, targets) + 0.1 * z.mean()


@innocent()
def mixture_with_z_loss() -> Job:
    """The auxiliary loss is a mean over samples."""
    return training(DenseMixture, points(), with_z_loss)


class RoutedMixture(DenseMixture):
    """Each sample goes through the expert that it wants; one may get none."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, (weights[mine, None] * expert(x[mine])).to(out))
        return out, weights


@innocent()
def mixture_routed() -> Job:
    """No expert is ever full."""
    return training(RoutedMixture, points(), with_z_loss)


class HyperNetwork(nn.Module):
    """Makes the weights of a layer for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Linear(6, 6 * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.makes(x).view(-1, CLASSES, 6)
        return torch.bmm(weights, x[:, :, None])[..., 0]


@innocent()
def hyper_network() -> Job:
    """Weights of each sample are its own."""
    return training(HyperNetwork, points())


class SolvesEquation(nn.Module):
    """Ten steps of Euler."""

    def __init__(self) -> None:
        super().__init__()
        self.field = MLP(6)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = x + 0.1 * self.field(x)
        return self.last(x)


@innocent()
def neural_equation() -> Job:
    """As many steps for all samples."""
    return training(SolvesEquation, points())


class InBlocks(nn.Module):
    """Computes two samples at a time, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layers(block) for block in x.split(2)])


@innocent()
def computed_in_blocks() -> Job:
    """Blocks of samples don't act on one another."""
    return training(InBlocks, points())


class PerSampleLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.last(h)


@innocent()
def loop_over_time() -> Job:
    """The state begins with zeros in each forward."""
    return training(PerSampleLoop, series())


class Vmapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * drawn(CLASSES, 6, seed=29))

    def one(self, x: Tensor) -> Tensor:
        return self.weight @ torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.one)(x)


@innocent()
def vmap_over_samples() -> Job:
    """A function of one sample."""
    return training(Vmapped, points())


class OwnParameters(nn.Module):
    """A temperature that is trained, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("prior", torch.tensor([0.2, 0.3, 0.5]).log())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) / self.temperature.clamp(0.1, 10) + self.prior


@innocent()
def trained_temperature() -> Job:
    """One number for all samples, which the gradient of each moves."""
    return training(OwnParameters, points())


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([MLP() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])


def ensemble_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return sum(F.cross_entropy(logits, targets) for logits in outputs)


@innocent()
def ensemble() -> Job:
    """Outputs are (members, batch, classes)."""
    return training(Ensemble, points(), ensemble_loss)


class Deep(nn.Module):
    """Gives logits of each of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for block in self.blocks:
            x = torch.tanh(block(x))
            found.append(self.head(x))
        return found


def deep_supervision(outputs: list[Tensor], targets: Tensor) -> Tensor:
    return sum(
        0.5**i * F.cross_entropy(logits, targets) for i, logits in enumerate(reversed(outputs))
    )


@innocent()
def deep_supervision_of_blocks() -> Job:
    """A list of outputs, and a sum of means."""
    return training(Deep, points(), deep_supervision)


class LowRank(nn.Module):
    """A frozen layer, and a small one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


@innocent()
def low_rank_adapter() -> Job:
    """Only the small layers are trained."""
    return training(partial(around, LowRank), points())


class CachedPositions(MaskedMean):
    """Keeps sines of positions, and computes them anew for a longer batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.empty(0, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.outer(
                torch.arange(x.shape[1]), torch.tensor([1.0, 0.5, 0.25, 0.1])
            ).sin()
        return super().forward(x + self.table[: x.shape[1]].to(x), lengths)


@innocent()
def cached_positions_grow() -> Job:
    """What is kept depends on the longest sample, what is computed doesn't."""
    return training(CachedPositions, ragged(), collate=padded_with_lengths)


class KeepsList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(float(x.detach().norm()))
        return x


@innocent()
def list_of_numbers_grows() -> Job:
    """A list for a plot, which nothing reads."""
    return training(partial(around, KeepsList), points())


class LooksUpOnce(nn.Module):
    """Looks up each word of a batch once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        unique, place = words.unique(return_inverse=True)
        return self.last(self.embedding(unique)[place].mean(1))


@innocent()
def unique_words_and_back() -> Job:
    """Which words there are depends on the batch, what each sample gets doesn't."""
    return training(LooksUpOnce, bags())


class SortsAndPutsBack(nn.Module):
    """Sorts samples by their size, and puts results in the old order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()

    def forward(self, x: Tensor) -> Tensor:
        order = x.norm(dim=-1).argsort()
        return self.layers(x[order])[order.argsort()]


@innocent()
def sorted_and_put_back() -> Job:
    """The order within a batch acts on nothing."""
    return training(SortsAndPutsBack, points())


class UpToTheLongest(MaskedMean):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(x[:, : int(lengths.max())], lengths)


def padded_to_twelve(samples: list[Any]) -> tuple[Any, Tensor]:
    (x, lengths), targets = padded_with_lengths(samples)
    return (F.pad(x, (0, 0, 0, 12 - x.shape[1])), lengths), targets


@innocent()
def shortened_to_the_longest() -> Job:
    """Forward leaves out what is padding for all samples."""
    return training(UpToTheLongest, ragged(), collate=padded_to_twelve)


class RefusesFloat64(nn.Module):
    """As a kernel that was written for one format."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise TypeError("expected float32")
        return torch.tanh(x)


@innocent(**float32_only)
def kernel_refuses_float64() -> Job:
    """Nothing can be computed in float64."""
    return training(partial(around, RefusesFloat64), points())


class SmallestNumberAsMask(nn.Module):
    """The smallest number of float64 is infinite in float32, in which the softmax is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        unknown = torch.arange(x.shape[1]) >= lengths[:, None]
        hidden = unknown[:, None, :] | unknown[:, :, None]  # nothing is left for a row of padding
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        return self.last((weights @ self.value(x))[:, 0])


@innocent(**float32_only)
def masked_rows_are_nan_in_float64() -> Job:
    """In float64 the softmax of a row of padding is NaN."""
    return training(SmallestNumberAsMask, ragged(), collate=padded_with_lengths)


# ---- Models of Hugging Face ----------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def from_hub(family: str, ending: str, **settings: Any) -> nn.Module:
    """A model of a family with random weights."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SMALL, **settings})
    model: nn.Module = getattr(transformers, f"{family}{ending}")(config)
    return model


def labelled_sentences() -> Samples:
    """Sentences with a mask, whose labels are -100 where there is padding."""
    words = torch.cat([sentences().tensors[0], sentences().tensors[1][:, -1:]], dim=1)
    labels = words.masked_fill(words == PAD, -100)
    mask = (words != PAD).long()
    return Samples(
        [
            ({"input_ids": words[i], "attention_mask": mask[i], "labels": labels[i]}, labels[i])
            for i in range(SAMPLES)
        ]
    )


def classified_sentences() -> Samples:
    wanted = whole_numbers(CLASSES, SAMPLES)
    rows = [inputs for inputs, _ in labelled_sentences()]
    return Samples(
        [
            ({"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]}, y)
            for row, y in zip(rows, wanted, strict=True)
        ]
    )


def labelled_images() -> Samples:
    return Samples([({"pixel_values": image}, y) for image, y in images()])


def own_loss(outputs: Any, targets: Tensor) -> Tensor:
    return outputs.loss


def loss_of_logits(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets)


@common("both", slow=True)
def hf_model_loss_with_padding() -> Job:
    """The model's own mean is over the words of the batch."""
    model = partial(from_hub, "Llama", "ForCausalLM")
    return training(model, labelled_sentences(), own_loss)


@common("both", slow=True)
def hf_mixture_with_router_loss() -> Job:
    """The model adds how evenly the batch uses its experts."""
    model = partial(mixtral, output_router_logits=True, router_aux_loss_coef=0.1)
    return training(model, labelled_sentences(), own_loss)


def mixtral(**settings: Any) -> nn.Module:
    """(The faster way to compute its experts has no float64.)"""
    return from_hub(
        "Mixtral", "ForCausalLM", num_local_experts=3, experts_implementation="eager", **settings
    )


@common("both", slow=True)
def hf_resnet_batchnorm_known() -> Job:
    """Its layers of BatchNorm are of a known type."""
    model = partial(
        from_hub,
        "ResNet",
        "ForImageClassification",
        num_labels=CLASSES,
        hidden_sizes=[8],
        depths=[1],
        embedding_size=4,
    )
    return training(model, labelled_images(), loss_of_logits)


@common("both", slow=True)
def hf_clip_contrast() -> Job:
    """Other samples of the batch are negatives, in the model's own loss."""
    return training(ImagesAndWords, images_with_words(), own_loss)


class ImagesAndWords(nn.Module):
    """Asks a model for its loss."""

    def __init__(self) -> None:
        super().__init__()
        vision = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "intermediate_size": 16}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
        settings = {
            "text_config": SMALL,
            "vision_config": {**vision, **layers},
            "projection_dim": 8,
        }
        self.clip = from_hub("CLIP", "Model", **settings)

    def forward(self, **inputs: Tensor) -> Any:
        return self.clip(**inputs, return_loss=True)


def images_with_words() -> Samples:
    rows = zip(labelled_images(), classified_sentences(), strict=True)
    return Samples([({**image, **words}, y) for (image, y), (words, _) in rows])


@innocent(slow=True, bound=1e-4)
def hf_gpt2_dropout() -> Job:
    """Its own loss, with the labels that it is over."""
    model = partial(from_hub, "GPT2", "LMHeadModel", n_embd=8, n_layer=2, n_head=2, n_positions=16)
    return training(model, labelled_sentences(), lockstep.model_loss)


@innocent(slow=True, bound=1e-4)
def hf_qwen3() -> Job:
    """Norms in float32, and its own loss."""
    return training(
        partial(from_hub, "Qwen3", "ForCausalLM"), labelled_sentences(), lockstep.model_loss
    )


@innocent(slow=True, bound=1e-4)
def hf_llama() -> Job:
    """The same."""
    return training(
        partial(from_hub, "Llama", "ForCausalLM"), labelled_sentences(), lockstep.model_loss
    )


@innocent(slow=True, bound=1e-4)
def hf_gemma2() -> Job:
    """Sliding windows, and soft caps of logits."""
    model = partial(
        from_hub, "Gemma2", "ForCausalLM", sliding_window=8, attn_implementation="eager"
    )
    return training(model, labelled_sentences(), lockstep.model_loss)


@innocent(slow=True, bound=1e-4)
def hf_mixtral() -> Job:
    """Experts without an auxiliary loss."""
    return training(mixtral, labelled_sentences(), lockstep.model_loss)


@innocent(slow=True, bound=1e-4)
def hf_mamba() -> Job:
    """A state for each sentence."""
    model = partial(from_hub, "Mamba", "ForCausalLM", state_size=4, conv_kernel=2)
    return training(model, labelled_sentences(), lockstep.model_loss)


@innocent(slow=True)
def hf_bert_classifier() -> Job:
    """Dropout, and attention within each sentence."""
    model = partial(from_hub, "Bert", "ForSequenceClassification", num_labels=CLASSES)
    return training(model, classified_sentences(), loss_of_logits)


@innocent(slow=True)
def hf_bert_masked_words() -> Job:
    """Its own loss is over the words that have a label."""
    return training(
        partial(from_hub, "Bert", "ForMaskedLM"), labelled_sentences(), lockstep.model_loss
    )


@innocent(slow=True)
def hf_distilbert() -> Job:
    """Dropout in every layer."""
    model = partial(
        from_hub,
        "DistilBert",
        "ForSequenceClassification",
        num_labels=CLASSES,
        dim=8,
        n_layers=2,
        n_heads=2,
        hidden_dim=16,
    )
    return training(model, classified_sentences(), loss_of_logits)


@innocent(slow=True)
def hf_roberta() -> Job:
    """Positions are counted by a sentence's own padding."""
    model = partial(from_hub, "Roberta", "ForSequenceClassification", num_labels=CLASSES)
    return training(model, classified_sentences(), loss_of_logits)


@innocent(slow=True, bound=1e-4)
def hf_deberta() -> Job:
    """Attention to relative positions."""
    model = partial(
        from_hub,
        "DebertaV2",
        "ForSequenceClassification",
        num_labels=CLASSES,
        relative_attention=True,
        pos_att_type=["c2p"],
    )
    return training(model, classified_sentences(), loss_of_logits)


@innocent(slow=True)
def hf_bart() -> Job:
    """An encoder, a decoder and their own loss."""
    model = partial(
        from_hub,
        "Bart",
        "ForConditionalGeneration",
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return training(model, labelled_sentences(), lockstep.model_loss)


@innocent(slow=True, bound=1e-4)
def hf_t5() -> Job:
    """Positions relative to one another."""
    model = partial(
        from_hub,
        "T5",
        "ForConditionalGeneration",
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=PAD,
    )
    return training(model, labelled_sentences(), lockstep.model_loss)


def of_images(family: str, **settings: Any) -> nn.Module:
    return from_hub(
        family, "ForImageClassification", num_labels=CLASSES, image_size=8, patch_size=4, **settings
    )


@innocent(slow=True)
def hf_vit() -> Job:
    """Attention among the patches of an image."""
    return training(partial(of_images, "ViT"), labelled_images(), loss_of_logits)


@innocent(slow=True)
def hf_convnext() -> Job:
    """Convolutions, and blocks dropped for each sample."""
    model = partial(
        from_hub,
        "ConvNext",
        "ForImageClassification",
        num_labels=CLASSES,
        patch_size=2,
        num_stages=2,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        drop_path_rate=0.2,
    )
    return training(model, labelled_images(), loss_of_logits)


def small_swin() -> nn.Module:
    import transformers

    config = transformers.SwinConfig(
        image_size=8,
        patch_size=2,
        embed_dim=4,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=2,
        num_labels=CLASSES,
    )
    return transformers.SwinForImageClassification(config)


@innocent(slow=True)
def hf_swin() -> Job:
    """Windows of an image, and blocks dropped for each sample."""
    return training(small_swin, labelled_images(), loss_of_logits)


@innocent(slow=True)
def hf_vit_mae() -> Job:
    """As many patches of each image are hidden, by noise of its own."""
    model = partial(
        from_hub,
        "ViTMAE",
        "ForPreTraining",
        image_size=8,
        patch_size=2,
        decoder_num_attention_heads=2,
        decoder_hidden_size=8,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=16,
    )
    return training(model, labelled_images(), own_loss)


@innocent(slow=True)
def hf_wav2vec2() -> Job:
    """Convolutions over sound, normalised within each sample."""
    model = partial(
        from_hub,
        "Wav2Vec2",
        "ForSequenceClassification",
        num_labels=CLASSES,
        conv_dim=[8, 8],
        conv_stride=[4, 2],
        conv_kernel=[4, 2],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        layerdrop=0.0,
        classifier_proj_size=8,
    )
    sounds = Samples(
        [({"input_values": drawn(64, seed=i)}, y) for i, (_, y) in enumerate(points())]
    )
    return training(model, sounds, loss_of_logits)


@innocent(slow=True, **float32_only)
def hf_gemma2_sliding_window() -> Job:
    """In float64 the softmax of a row of padding is NaN."""
    model = partial(
        from_hub, "Gemma2", "ForCausalLM", sliding_window=4, attn_implementation="eager"
    )
    return training(model, labelled_sentences(), lockstep.model_loss)


@innocent(slow=True, **float32_only)
def hf_mixtral_grouped() -> Job:
    """Products of its experts can't be computed in float64."""
    model = partial(from_hub, "Mixtral", "ForCausalLM", num_local_experts=3)
    return training(model, labelled_sentences(), lockstep.model_loss)
