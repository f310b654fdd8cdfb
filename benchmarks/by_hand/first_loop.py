"""The loop that a person writes first for the experiment: all cores, fp32, the default layout,
DataLoader.
"""

import time

import torch
from torch.utils.data import DataLoader

from benchmarks.models import experiment_job

STEPS = 4

job = experiment_job()
torch.manual_seed(0)
model = job.model()
loss_of = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
loader = DataLoader(job.train_data(), batch_size=256, shuffle=True)
model.train()
batches = iter(loader)
for step in range(1 + STEPS):
    if step == 1:  # the first one warms up
        start = time.perf_counter()
    inputs, targets = next(batches)
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    loss.item()
print(STEPS * 256 / (time.perf_counter() - start))
