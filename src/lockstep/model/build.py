"""Building a job's model in this process, the same on every rank.

The order matters: all tensors get their dtype first, then the model its initial weights. Only then
can ranks be compared.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.initial_weights import begin_with
from lockstep.checkpoint.weights import take_weights
from lockstep.errors import JobError, LockstepError, error_line
from lockstep.launch.world import World
from lockstep.model.activation_checkpointing import checkpoint_blocks
from lockstep.model.precision import convert_model
from lockstep.recipe import Recipe
from lockstep.run.events import Line
from lockstep.tensors.common_memory import refuse_common_memory, tensors_of
from lockstep.tensors.digest import digest
from lockstep.tensors.placing import place_module
from lockstep.tensors.pytree import is_lazy
from lockstep.tensors.seeding import seeded


def build_model(job: Recipe, world: World, *, place: bool = True) -> nn.Module:
    """Build the job's model under its seed, on this process's first device, and check that all
    ranks have the same.

    It begins with the weights of the job's ``init``, where there is one.

    Args:
        job: describes the model.
        world: the ranks.
        place: False leaves the model on the CPU, where it is built: it may be too large for one
            device.

    Raises:
        JobError: the model can't be built, isn't a module, has nothing to train, or differs between
            two ranks (the first name that differs is given).
    """
    model = _made(job)
    _refuse_wrapped(model)
    _refuse_placed(model, world)
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError(
            "model: it has no parameter that requires a gradient, so there is nothing to train"
        )
    _refuse_lazy(model)
    _expand_buffers(model)
    refuse_common_memory(model)
    convert_model(model, job.precision)  # before the weights of init, which may be float64 too
    if job.init is not None:
        _take_initial_weights(model, job, world)
    _begin_training(model)
    same_on_every_rank(model, world)
    if job.activation_checkpointing is not None:
        _checkpoint(model, job, world)
    if job.channels_last:
        _lay_out(model)
    if place and not world.device.is_slot:
        place_module(model, world.device.torch)
    return model


def _made(job: Recipe) -> nn.Module:
    """Call the job's ``model`` under its seed.

    Raises:
        JobError: it raises, or gives no module.
    """
    with seeded(job.seed):
        try:
            model = as_module(job.model())
        except LockstepError:
            raise
        except Exception as error:
            fix = ""
            if "process group has not been initialized" in str(error):
                fix = "Lockstep distributes the model: leave DistributedDataParallel out"
            raise JobError(f"model: building it raised {error_line(error)}", fix=fix) from error
    if not isinstance(model, nn.Module):
        raise JobError(f"model: it gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def as_module(model: Any) -> Any:
    """Give what a job's ``model`` gave, a dict of modules by name as an ``nn.ModuleDict``."""
    if isinstance(model, dict) and all(isinstance(part, nn.Module) for part in model.values()):
        return nn.ModuleDict(model)
    return model


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model, or a part of it, that something else distributes already."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            what = f'"{name}"' if name else "it"
            raise JobError(
                f"model: {what} is wrapped in {type(module).__name__} already: give its .module, "
                "since Lockstep distributes the model"
            )


def _refuse_placed(model: nn.Module, world: World) -> None:
    """Refuse a model that was put on a device of another type than it is to train on."""
    for name, tensor in tensors_of(model):
        if tensor.device.type not in ("cpu", "meta", world.device.type):
            raise JobError(
                f'model: "{name}" was put on {tensor.device}, and it is to train on '
                f"{world.device}: build it on the CPU, without .cuda() and .to(...); Lockstep "
                "moves it"
            )


def _take_initial_weights(model: nn.Module, job: Recipe, world: World) -> None:
    """Give the model the weights of the job's ``init``, and log what was taken."""
    assert job.init is not None
    first, *others = begin_with(model, job.init, strict=job.init_strict)
    if world.is_first:
        world.emit(Line(first, "plain"))
        for line in others:
            world.emit(Line(line, "plan"))


def _begin_training(model: nn.Module) -> None:
    """Put the model in training mode, as a loop written by hand would.

    A ``train`` of a module's own is called. A part that was put in evaluation mode by itself stays
    there.
    """
    if not model.training:  # as pretrained models come
        model.train()
        return
    for module in list(model.modules()):
        # It may keep a part of itself in evaluation mode.
        if module.training and type(module).train is not nn.Module.train:
            module.train()


def _expand_buffers(model: nn.Module) -> None:
    """Give each buffer that was expanded (``torch.ones(1, 1).expand(4, 4)``) memory of its own, so
    that it can be written to.
    """
    for module, name in buffers_of(model):
        buffer = getattr(module, name)
        if buffer.layout == torch.strided and 0 in buffer.stride():
            module._buffers[name] = buffer.contiguous()


def _lay_out(model: nn.Module) -> None:
    """Put the weights of convolutions over images in channels-last memory.

    Those over volumes stay: ``Module.to`` would raise on them.
    """
    for _, tensor in tensors_of(model):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def trained_model(job: Recipe, weights: Path) -> nn.Module:
    """Build the job's model with the weights of a run, in the job's number format, on the CPU.

    Raises:
        FolderError: the weights aren't there, or are another model's.
    """
    with seeded(job.seed):
        model: nn.Module = as_module(job.model())
    # The function may give the same module, or parts of it, each time.
    with contextlib.suppress(Exception):  # it holds what can't be copied
        model = copy.deepcopy(model)
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
    storages = []
    for name, p in model.named_parameters():
        if type(p) is not nn.Parameter or p.layout != torch.strided or not p.requires_grad:
            continue
        storage = p.untyped_storage()
        if id(storage) in _trained:
            raise JobError(
                f'model: the function gave the same "{name}" twice: build it in the function, as '
                "lambda: Net(), or clone the tensor that it is made of"
            )
        storages.append(storage)
    # Parameters of this model may share memory.
    _trained.update((id(storage), storage) for storage in storages)


def _refuse_lazy(model: nn.Module) -> None:
    """Refuse a model that has a lazy layer without a shape yet."""
    for name, tensor in tensors_of(model):
        if is_lazy(tensor):
            raise JobError(
                f'model: "{name}" is lazy and has no shape yet: call the model once where it is '
                "built, with inputs of the right shape"
            )


def _checkpoint(model: nn.Module, job: Recipe, world: World) -> None:
    """Checkpoint the activations of blocks.

    Raises:
        JobError: there are no such blocks, or they hold batch norms that replicas would synchronise
            in backward again.
    """
    assert job.activation_checkpointing is not None
    names = checkpoint_blocks(model, job.activation_checkpointing, compiled=bool(job.compile))
    if not job.sync_batchnorm or world.size * len(world.devices) == 1:
        return
    for name in names:
        block = model.get_submodule(name)
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in block.modules()):
            raise JobError(
                f'activation_checkpointing: "{name}" has batch norms, which under sync_batchnorm '
                "would have to synchronize again in backward: choose blocks without batch "
                "norms, or one of the two settings"
            )


def same_on_every_rank(model: nn.Module, world: World) -> None:
    """Compare names, shapes and values of parameters and buffers over the ranks.

    Raises:
        JobError: with the first one that differs.
    """
    if world.size == 1:
        return
    named = {f'"{name}" {tuple(t.shape)} {t.dtype}': t for name, t in tensors_of(model)}
    different = differing_tensors(named.items(), world, all_names=True)
    if different is not None:
        raise JobError(
            f"model: {different} differs between the ranks",
            kind="unseeded model",
            fix="draw initial values from torch, random or numpy's global generator, which are "
            "seeded",
        )


def differing_tensors(
    named: Iterable[tuple[str, torch.Tensor]], world: World, *, all_names: bool = False
) -> str | None:
    """Find the first name whose values differ between ranks, the same answer on every rank; None
    where all agree.

    Args:
        named: this rank's tensors, by name.
        world: every rank of it calls this.
        all_names: whether a name that a rank doesn't have differs, too.
    """
    mine = {name: digest(tensor) for name, tensor in named}
    own = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(world.gather_objects(own))) == 1:
        return None
    every = world.gather_objects(mine)
    for name in dict.fromkeys(itertools.chain(*every)):
        values = {of_rank.get(name, ()) for of_rank in every}
        if not all_names:
            values.discard(())
        if len(values) > 1:
            return str(name)
    return None


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Find where each buffer of the model is kept: its module, and its name there."""
    found = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found.append((module, name))
    return found
