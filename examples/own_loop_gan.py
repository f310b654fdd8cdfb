"""Your own loop with two networks and two optimizers: a GAN (Goodfellow et al. 2014) that draws
handwritten digits.

python examples/own_loop_gan.py

Each network has a step of its own. The noise that a picture is drawn from comes with a sample, and
what a dataset draws for a sample is the same on any number of devices; so both networks learn the
same too.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep

NOISE = 16
"""Random numbers that a picture is drawn from."""


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The 1,797 digits that come with scikit-learn, each with noise that is new in every epoch:
    (64,), (16,).
    """

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        self.images = torch.tensor(load_digits().data, dtype=torch.get_default_dtype()) / 8 - 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[i], torch.randn(NOISE)


def train(world: lockstep.World, epochs: int) -> tuple[nn.Module, nn.Module]:
    """Runs on every rank; gives the generator and the discriminator."""
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(NOISE, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 64),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Linear(64, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 1),
    )

    def unconvincing(drawn: torch.Tensor, _: None) -> tuple[torch.Tensor, int]:
        """The generator's loss: how sure the discriminator is that pictures were drawn, as
        (total, count).
        """
        scores = discriminator(drawn)
        return F.softplus(-scores).sum(), len(scores)

    def adam(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=5e-4, betas=(0.5, 0.999))

    improve_generator = lockstep.parallelize(generator, unconvincing, adam)
    improve_discriminator = lockstep.parallelize(discriminator, nn.BCEWithLogitsLoss(), adam)
    batches = lockstep.batches(Digits(), batch_size=100)
    for epoch in range(epochs):
        for real, noise in batches:
            with torch.no_grad():
                drawn = generator(noise)
            is_real = torch.cat([torch.ones(len(real), 1), torch.zeros(len(drawn), 1)])
            judged = improve_discriminator(torch.cat([real, drawn]), is_real)
            fooled = improve_generator(noise)
        if world.rank == 0 and (epoch + 1) % 20 == 0:
            print(
                f"epoch {epoch + 1}  discriminator {judged.loss:.3f}  generator {fooled.loss:.3f}"
            )
    return generator, discriminator


if __name__ == "__main__":
    generator, _ = lockstep.launch(train, devices=2, args=(200,))[0]
    with torch.no_grad():
        pictures = generator(torch.randn(6, NOISE)).view(6, 8, 8)
    for rows in pictures.clamp(-1, 0.99).add(1).mul(5).int().transpose(0, 1).tolist():
        print("   ".join("".join(" .:-=+*#%@"[shade] * 2 for shade in row) for row in rows))
