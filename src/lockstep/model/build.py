"""From a job to a model and an optimizer in this process, the same on every rank."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.initial_weights import begin_with
from lockstep.checkpoint.weights import take_weights
from lockstep.data import batches, resolve
from lockstep.errors import JobError, LockstepError, told
from lockstep.job import Job
from lockstep.launch.events import Caveat, Line
from lockstep.launch.world import World
from lockstep.model.activation_checkpointing import checkpoint_blocks
from lockstep.model.inspection import attribute_tensors
from lockstep.model.modes import in_evaluation_mode
from lockstep.model.precision import convert_model
from lockstep.tensors.common_memory import common_memory_kept, in_common_memory, tensors_of
from lockstep.tensors.digest import digest
from lockstep.tensors.placing import place_module
from lockstep.tensors.pytree import call, is_lazy, to_device
from lockstep.tensors.seeding import seeded


def build_model(job: Job, world: World, *, place: bool = True) -> nn.Module:
    """Build the job's model under its seed, on this process's first device, and make sure that all
    ranks have the same.

    It begins with the job's ``init``, where it has one.

    Args:
        job: whose model it is.
        world: the ranks.
        place: False leaves it on the CPU, where it is built: it may be too large for one device.

    Raises:
        JobError: it can't be built, isn't a module, has nothing to train, or differs between two
            ranks (the first differing name is given).
    """
    with seeded(job.seed):
        try:
            model = job.model()
        except LockstepError:
            raise
        except Exception as error:
            needs_group = "process group has not been initialized" in str(error)
            fix = (
                "Lockstep distributes the model: leave DistributedDataParallel out"
                if needs_group
                else ""
            )
            raise JobError(f"model: building it raised {told(error)}", fix=fix) from error
    model = as_module(model)
    if not isinstance(model, nn.Module):
        raise JobError(f"model: it gave a {type(model).__name__}, not a torch.nn.Module")
    _refuse_wrapped(model)
    elsewhere = next(
        ((n, t) for n, t in tensors_of(model) if t.device.type not in ("cpu", world.device.type)),
        None,
    )
    if elsewhere is not None and not elsewhere[1].is_meta:
        raise JobError(
            f'model: "{elsewhere[0]}" was put on {elsewhere[1].device}, and it is to train on '
            f"{world.device}: build it "
            "on the CPU, without .cuda() and .to(...); Lockstep moves it"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError(
            "model: it has no parameter that requires a gradient, so there is nothing to train"
        )
    _make_lazy_parameters(model, job, world)
    _expand_buffers(model)
    convert_model(model, job.precision)  # before the weights of init, which may be float64 too
    if job.init is not None:
        said = begin_with(model, job.init, strict=job.init_strict)
        for line in said if world.is_first else ():
            world.tell(Line(line, "plan" if line != said[0] else "plain"))
    _begin_training(model)
    same_on_every_rank(model, world)
    _say_what_differs(model, world)
    if job.activation_checkpointing is not None:
        _checkpoint(model, job, job.sync_batchnorm and world.size * len(world.devices) > 1)
    if job.channels_last:
        with common_memory_kept(model):
            _lay_out(model)
    if place and not world.device.is_slot:
        place_module(model, world.device.torch)
    return model


def as_module(model: Any) -> Any:
    """What a job's ``model`` gave; a dict of modules by name as an ``nn.ModuleDict``."""
    is_dict = isinstance(model, dict) and all(
        isinstance(part, nn.Module) for part in model.values()
    )
    return nn.ModuleDict(model) if is_dict else model


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model, or a part of it, that something else distributes already."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            what = f'"{name}"' if name else "it"
            raise JobError(
                f"model: {what} is wrapped in {type(module).__name__} already: give its .module, "
                "since "
                "Lockstep distributes the model"
            )


def _begin_training(model: nn.Module) -> None:
    """Put the model in training mode, as a loop written by hand would: a ``train`` of its own is
    called.

    A part that was put in eval mode by itself stays there.
    """
    if not model.training:  # as pretrained models come
        model.train()
        return
    for module in list(model.modules()):
        if (
            module.training and type(module).train is not nn.Module.train
        ):  # it keeps a part of itself in eval mode
            module.train()


def _expand_buffers(model: nn.Module) -> None:
    """Give a buffer that was expanded (``torch.ones(1, 1).expand(4, 4)``) memory of its own, to
    be written to.
    """
    dense: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.layout != torch.strided or is_lazy(buffer):
                continue
            if any(
                size > 1 and not stride
                for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
            ):
                module._buffers[name] = dense.setdefault(id(buffer), buffer.contiguous())


def _lay_out(model: nn.Module) -> None:
    """Give the weights of convolutions over images the layout; those over volumes stay, on which
    Module.to raises.
    """
    for _, tensor in tensors_of(model):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def trained_model(job: Job, weights: Path) -> nn.Module:
    """The job's model with the weights of a run, in the job's number format, on the CPU.

    Raises:
        FolderError: the weights aren't there, or another model's.
    """
    with seeded(job.seed):
        model: nn.Module = as_module(job.model())
    if not in_common_memory(
        tensors_of(model)
    ):  # (copies of such parameters would have memory of their own)
        with contextlib.suppress(Exception):  # it holds what can't be copied
            model = copy.deepcopy(
                model
            )  # the function may give the same module, or parts of it, each time
    convert_model(model, job.precision)  # before the weights, which are in that format
    take_weights(model, weights)
    return model


_trained: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
"""The memory of parameters that this process has trained, by the ids of storages."""


def refuse_given_twice(model: nn.Module) -> None:
    """Refuse a model that has parameters of an earlier one of this process: it would begin with
    their trained values.

    Raises:
        JobError: there is such a parameter.
    """
    trained = {
        name: p.untyped_storage()
        for name, p in model.named_parameters()
        if type(p) is nn.Parameter and p.layout == torch.strided and p.requires_grad
    }
    if twice := [name for name, storage in trained.items() if id(storage) in _trained]:
        raise JobError(
            f'model: the function gave the same "{twice[0]}" twice: build it in the function, as '
            "lambda: Net(), or "
            "clone the tensor that it is made of"
        )
    _trained.update((id(storage), storage) for storage in trained.values())


def _make_lazy_parameters(model: nn.Module, job: Job, world: World) -> None:
    """Give lazy layers their shapes, by the job's first two samples, under the job's seed.

    Raises:
        JobError: the model can't take them, or has a lazy layer that it doesn't use.
    """
    lazy = [name for name, p in tensors_of(model) if is_lazy(p)]
    if not lazy:
        return
    data = resolve(job.train_data, world)
    loader = batches(
        data,
        batch_size=2,
        shuffle=False,
        collate=job.collate,
        seed=job.seed,
        rank=0,
        world_size=1,
        workers=0,
    )
    inputs, _ = next(loader.epoch(0))
    inputs = to_device(inputs, torch.device("cpu"), torch.get_default_dtype())
    try:
        with in_evaluation_mode(model), seeded(job.seed + 1), torch.no_grad():
            call(model, inputs)
    except Exception as error:
        raise JobError(
            f"model: it has lazy layers, and with the first samples it raised {told(error)}"
        ) from error
    left = [name for name, p in tensors_of(model) if is_lazy(p)]
    if left:
        raise JobError(
            f'model: "{left[0]}" is lazy, and forward doesn\'t use it: give it its shape'
        )


def _checkpoint(model: nn.Module, job: Job, synchronised: bool) -> None:
    """Checkpoint the activations of blocks.

    Raises:
        JobError: there are no such blocks, or they hold batch norms that replicas would synchronise
            in backward again.
    """
    assert job.activation_checkpointing is not None
    modules = dict(model.named_modules())
    for name in checkpoint_blocks(model, job.activation_checkpointing, compiled=bool(job.compile)):
        if synchronised and any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules[name].modules()
        ):
            raise JobError(
                f'activation_checkpointing: "{name}" has batch norms, and under sync_batchnorm '
                "the replicas would "
                "have to meet in them again, each in its backward: choose blocks without, or one "
                "of the two settings"
            )


def same_on_every_rank(model: nn.Module, world: World) -> None:
    """Compare names, shapes and values over the ranks.

    Raises:
        JobError: with the first name that differs, and how.
    """
    if world.size == 1:
        return
    mine = [(name, tuple(t.shape), str(t.dtype), digest(t)) for name, t in tensors_of(model)]
    whole = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(world.gather_objects(whole))) == 1:
        return
    every = world.gather_objects(mine)
    for rank, theirs in enumerate(every[1:], start=1):
        for ours, other in zip(every[0], theirs, strict=False):
            if ours[0] != other[0]:
                raise JobError(
                    f'model: it builds differently: "{ours[0]}" on rank 0 is "{other[0]}" on rank '
                    f"{rank}",
                    kind="unseeded model",
                )
            if ours[1:3] != other[1:3]:
                raise JobError(
                    f'model: it builds differently: "{ours[0]}" is {ours[1]} on rank 0, '
                    f"{other[1]} on rank {rank}",
                    kind="unseeded model",
                )
            if ours != other:
                raise JobError(
                    f'model: "{ours[0]}" has other values on rank 0 than on rank {rank}',
                    kind="unseeded model",
                    fix="draw initial values from torch, random or numpy's global generator, "
                    "which are seeded",
                )
        if len(every[0]) != len(theirs):
            extra = max(every[0], theirs, key=len)[min(len(every[0]), len(theirs))][0]
            raise JobError(
                f'model: it builds differently: "{extra}" is on only one of rank 0 and rank {rank}',
                kind="unseeded model",
            )


def _say_what_differs(model: nn.Module, world: World) -> None:
    """Say which attribute that is a tensor, or an array, has other values on some rank. (It may
    be a workspace.)
    """
    name = differing_tensors(attribute_tensors(model.named_modules()), world)
    if name is not None and world.is_first:
        text = (
            f'attribute "{name}" of the model has other values on another rank, and so has '
            "what forward makes of it"
        )
        fix = (
            "draw it from torch, random or numpy's global generator, which are seeded, or make "
            "it a buffer"
        )
        world.tell(Line.note(Caveat("state", text, fix)))


def differing_tensors(named: Iterable[tuple[str, torch.Tensor]], world: World) -> str | None:
    """The first name whose values differ between ranks, the same answer on every rank; None where
    all agree.

    One that a rank doesn't have is left out.
    """
    mine = {name: digest(tensor) for name, tensor in named}
    if len(set(world.gather_objects(hashlib.sha256(repr(mine).encode()).hexdigest()))) == 1:
        return None
    first, *others = world.gather_objects(mine)
    return next(
        (name for name, its in first.items() if any(of.get(name, its) != its for of in others)),
        None,
    )


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where each buffer of the model is kept: its module and its name there."""
    return [
        (module, name)
        for module in model.modules()
        for name, b in module._buffers.items()
        if b is not None
    ]
