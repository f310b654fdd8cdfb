"""From a job to a model and an optimizer in this process, the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint import take_weights
from lockstep.errors import JobError, LockstepError, told
from lockstep.job import Job
from lockstep.seeding import seeded
from lockstep.world import World


def build_model(job: Job, world: World) -> nn.Module:
    """Build the job's model under its seed, on this process's first device, and make sure that all ranks have the same.

    Raises:
        JobError: it can't be built, isn't a module, has nothing to train, or differs between two ranks (the first
            differing name is given).
    """
    with seeded(job.seed):
        try:
            model = job.model()
        except LockstepError:
            raise
        except Exception as error:
            raise JobError(f"model: building it raised {told(error)}") from error
    if not isinstance(model, nn.Module):
        raise JobError(f"model: it gave a {type(model).__name__}, not a torch.nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError("model: it has no parameter that requires a gradient, so there is nothing to train")
    if not model.training:  # as pretrained models come; a part that was put in eval mode by itself stays there
        model.train()
    same_on_every_rank(model, world)
    if job.precision == "fp64":
        model.double()
    if job.channels_last:
        # The stubs of Module.to leave this form out.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if not world.device.is_slot:
        model.to(world.device.torch)
    return model


def trained_model(job: Job, weights: Path) -> nn.Module:
    """The job's model with the weights of a run, in the job's number format, on the CPU.

    Raises:
        FolderError: the weights aren't there, or another model's.
    """
    with seeded(job.seed):
        model = job.model()
    if job.precision == "fp64":  # before the weights, which are in that format
        model.double()
    take_weights(model, weights)
    return model


def same_on_every_rank(model: nn.Module, world: World) -> None:
    """Compare names, shapes and values over the ranks.

    Raises:
        JobError: with the first name that differs, and how.
    """
    if world.size == 1:
        return
    mine = [(name, tuple(t.shape), str(t.dtype), digest(t)) for name, t in _all_tensors(model)]
    whole = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(world.gather_objects(whole))) == 1:
        return
    every = world.gather_objects(mine)
    for rank, theirs in enumerate(every[1:], start=1):
        for ours, other in zip(every[0], theirs, strict=False):
            if ours[0] != other[0]:
                raise JobError(f'model: it builds differently: "{ours[0]}" on rank 0 is "{other[0]}" on rank {rank}')
            if ours[1:3] != other[1:3]:
                raise JobError(
                    f'model: it builds differently: "{ours[0]}" is {ours[1]} on rank 0, {other[1]} on rank {rank}'
                )
            if ours != other:
                raise JobError(
                    f'model: "{ours[0]}" has other values on rank 0 than on rank {rank}: '
                    "draw initial values from torch, random or numpy's global generator, which are seeded"
                )
        if len(every[0]) != len(theirs):
            extra = max(every[0], theirs, key=len)[min(len(every[0]), len(theirs))][0]
            raise JobError(f'model: it builds differently: "{extra}" is on only one of rank 0 and rank {rank}')


def differing_tensors(named: Iterable[tuple[str, torch.Tensor]], world: World) -> str | None:
    """The first name whose values differ between ranks, the same answer on every rank; None where all agree."""
    mine = [(name, digest(tensor)) for name, tensor in named]
    if len(set(world.gather_objects(hashlib.sha256(repr(mine).encode()).hexdigest()))) == 1:
        return None
    every = world.gather_objects(mine)
    names: Iterator[str] = (mine[0] for mine, *others in zip(*every, strict=True) if any(o != mine for o in others))
    return next(names)


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where each buffer of the model is kept: its module and its name there."""
    return [(module, name) for module in model.modules() for name, b in module._buffers.items() if b is not None]


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def digest(tensor: torch.Tensor | None) -> tuple[float, float] | None:
    """Two sums that tell different values apart: plain, and weighted by place."""
    if tensor is None or tensor.is_meta or tensor.is_sparse or not tensor.numel():
        return None
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    flat = flat.reshape(-1).double()
    places = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device).remainder_(1009.0)
    return float(flat.sum()), float(flat @ places)
