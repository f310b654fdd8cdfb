"""Shards: which parameters of a model ``fully_shard`` cuts, and the part of each that this rank
keeps.

Each parameter is cut along its first dimension. The model holds DTensors, which are gathered block
by block while forward and backward need them. The optimizer is given the local parts as ordinary
parameters: what it does to each element is the same, and costs no dispatch of DTensors.

::

    block 0   gathered | forward | freed | ... | gathered | backward | gradients summed, cut, freed
    the rest  gathered | forward of the whole model ... backward      | gradients summed, cut, freed
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.errors import InputError, StrategyError
from lockstep.model.activation_checkpointing import found_blocks, named_blocks
from lockstep.model.hooks import hooks_of_shards, is_hooked
from lockstep.model.optimizer import REPLACED, sparse_parameters
from lockstep.tensors.placing import place_tensor
from lockstep.tensors.pytree import tensors
from lockstep.tensors.row_shard import RowShard

Place = tuple[nn.Module, str]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
"""The attributes of a module in which sharding registers hooks."""


@dataclass(frozen=True)
class Before:
    """What a module had before it was sharded: the names of its attributes, and the numbers of
    its hooks.
    """

    names: set[str]
    hooks: set[int]


class Shards:
    """A model whose parameters were cut, in place.

    Args:
        model: the same on every rank; it may be on the CPU still.
        mesh: the ranks.
        blocks: modules that are gathered on their own, by name; all else is gathered for the whole
            of forward.
        place: this rank's device, which has one block's whole parameters at a time while the model
            is cut.

    Attributes:
        blocks: likewise.
        whole: names of parameters that every rank keeps whole, with why.
        cut: by name, the parameters that were cut, as the model holds them.
        local: by name, this rank's part of each.
        before: by module, what it had before.
        first_names: by each name of a parameter that was cut, the one that it has in ``cut``.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        blocks: Mapping[str, nn.Module],
        place: torch.device,
    ) -> None:
        self.before = {module: _before(module) for module in model.modules()}
        before = dict(model.named_parameters())
        self._mesh, self.blocks = mesh, dict(blocks)
        self.whole = _kept_whole(model)
        self.places = places_of(model)
        ignored = {before[name] for name in self.whole}
        for block in (*self.blocks.values(), model):
            whole = [
                p for p in block.parameters() if not isinstance(p, DTensor) and p not in ignored
            ]
            for tensor in (*block.parameters(), *block.buffers()):
                if tensor.device != place:
                    place_tensor(tensor, place)
            fully_shard(block, mesh=mesh, ignored_params=ignored)
            for p in whole:  # which the optimizer still has, until it is given the local ones
                p.data = torch.empty(0, dtype=p.dtype, device=place)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(
                    1.0
                )  # a sum: the mean over ranks isn't that over samples
                module.set_force_sum_reduction_for_comms(True)
                _send_zeros(module)
                vars(module)["__deepcopy__"] = _refuse_copy
        self._sharded = [
            (module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)
        ]
        self._give_classes_back()
        self._before = {
            name: weakref.ref(p) for name, p in before.items() if name not in self.whole
        }
        now = dict(model.named_parameters())
        self.cut = {name: p for name, p in now.items() if isinstance(p, DTensor)}
        self._storages = {name: p.untyped_storage()._cdata for name, p in self.cut.items()}
        names = {id(p): name for name, p in self.cut.items()}
        every = model.named_parameters(remove_duplicate=False)
        self.first_names = {name: names[id(p)] for name, p in every if id(p) in names}
        self.local = {
            name: nn.Parameter(_local(p), requires_grad=p.requires_grad)
            for name, p in self.cut.items()
        }
        self._of_whole = {id(before[name]): self.local[name] for name in self.cut}
        self._names = {id(p): name for name, p in self.local.items()}
        self._shown: dict[str, tuple[torch.Tensor | None, int, torch.Tensor | None]] = {}

    def give_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer of the whole parameters the local ones instead, with its state of
        them.
        """
        for group in optimizer.param_groups:
            old, group["params"] = (
                group["params"],
                [self._of_whole.get(id(p), p) for p in group["params"]],
            )
            for p, local in zip(old, group["params"], strict=True):
                if p is not local and (state := optimizer.state.pop(p, None)) is not None:
                    optimizer.state[local] = self.cut_state(self._names[id(local)], state)
        self._of_whole.clear()  # the whole ones are needed no more

    def refuse_others(self) -> None:
        """Refuse a model whose whole parameters something has kept, now that the optimizer has its
        own.

        Raises:
            StrategyError: it would go on with what they were.
        """
        gc.collect()
        for name, kept in self._before.items():
            if kept() is not None:
                raise StrategyError(
                    f'fsdp: something beside its module holds parameter "{name}" (a list, a '
                    "closure, a variable of "
                    "yours, or the graph of a copy), and would go on with what it was before it "
                    "was cut: reach it by "
                    "its module, and make copies by p.detach().clone(); or take ddp"
                )

    def cut_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of an optimizer's state of a whole parameter."""
        shape, kinds = self.cut[name].shape, (torch.Tensor, RowShard)
        return {
            key: self.part(name, value)
            if isinstance(value, kinds) and value.shape == shape
            else value
            for key, value in state.items()
        }

    def joined_state(self, name: str, state: Mapping[str, Any], whole: bool) -> dict[str, Any]:
        """The state of the whole parameter, or this rank's rows of it; every rank calls this."""
        shape = self.local[name].shape
        given = self.gathered if whole else self.rows
        return {
            key: given(self.as_rows(name, value))
            if isinstance(value, torch.Tensor) and value.shape == shape
            else value
            for key, value in state.items()
        }

    def part(self, name: str, whole: torch.Tensor | RowShard) -> torch.Tensor:
        """This rank's part of a tensor of the shape of a parameter, which is all that its device
        is given of it.
        """
        if isinstance(whole, RowShard):
            rows = whole.local
        else:
            sizes, number = self.rows_of(whole)
            rows = whole.detach().narrow(0, sum(sizes[:number]), sizes[number])
        return torch.empty(rows.shape, dtype=rows.dtype, device=self.cut[name].device).copy_(rows)

    def as_cut(self, name: str, whole: torch.Tensor | RowShard) -> DTensor:
        """A tensor of the shape of a parameter, cut as that is."""
        return self.as_rows(name, self.part(name, whole))

    def as_rows(self, name: str, local: torch.Tensor) -> DTensor:
        """The tensor, of the shape of a parameter, of which this rank has these rows."""
        p = self.cut[name]
        return DTensor.from_local(
            local.detach(),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )

    def refuse_assigned(self) -> None:
        """Refuse what was assigned to ``parameter.data``, and hooks, which a shard doesn't take,
        and PyTorch loses.

        Raises:
            StrategyError: something was, or a parameter has a hook.
        """
        for name, p in self.cut.items():
            if is_hooked(p):
                raise StrategyError(
                    f'fsdp: parameter "{name}" has a hook, which its shards lose: take ddp'
                )
            if p.untyped_storage()._cdata != self._storages[name]:
                raise StrategyError(
                    f'fsdp: something was assigned to the data of "{name}", of which each rank '
                    "has a shard: write it "
                    "in place, under torch.no_grad(): parameter.copy_(value)"
                )

    def drop_hooks(self) -> None:
        """Drop the hooks of earlier forwards, which a parameter among the outputs keeps."""
        for name in self.whole:
            module, key = self.places[name][0]
            p: Any = module._parameters[key]
            for number in hooks_of_shards(p):
                del p._backward_hooks[number]

    def refuse_replaced(self, state: Mapping[str, Any]) -> None:
        """Refuse a model, of this state, that has another parameter in the place of one that was
        cut.

        Raises:
            InputError: it has.
        """
        if any(not isinstance(state.get(name, p), DTensor) for name, p in self.cut.items()):
            raise InputError(REPLACED)

    def show_gradients(self) -> None:
        """Give the parameters that were cut the gradients of the local parts."""
        for name, p in self.cut.items():
            grad = self.local[name].grad
            p.grad = None if grad is None else self.as_rows(name, grad)
            self._shown[name] = p.grad, -1 if p.grad is None else p.grad._version, grad

    def take_gradients(self) -> None:
        """Give the local parts the gradients of the parameters that a person has written since they
        were shown.

        Unless the optimizer's were replaced (``optimizer.zero_grad()``): then give the parameters
        these.
        """
        for name, p in self.cut.items():
            (shown, version, local), grad = self._shown[name], p.grad
            is_written = grad is not shown or (grad is not None and grad._version != version)
            if is_written and self.local[name].grad is local:
                if isinstance(grad, DTensor):
                    grad = grad.redistribute(p.device_mesh, p.placements).to_local().detach()
                self.local[name].grad = grad  # another tensor in any case, so that it is seen
        self.show_gradients()

    def joined(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which the ranks have these parts; every rank calls this."""
        return self.gathered(self.as_rows(name, local))

    @staticmethod
    def gathered(tensor: DTensor) -> torch.Tensor:
        """All of a tensor; every rank calls this."""
        whole: torch.Tensor = tensor.full_tensor()
        return whole

    def rows(self, tensor: DTensor) -> RowShard:
        """This rank's rows of a tensor; where several replicas have the same, those of the first
        count.
        """
        sizes, _ = self.rows_of(tensor)
        others = self._mesh.size() - len(sizes)
        return RowShard(tensor.to_local(), (*sizes, *[0] * others), self._mesh.get_rank())

    def rows_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
        """How many rows of a tensor each rank of a replica has, and the number of this rank
        among them.
        """
        *_, number = self._mesh.get_coordinate() or [0]
        ranks = self._mesh.size(self._mesh.ndim - 1)
        sizes = [len(piece) for piece in torch.empty(len(tensor), 0).chunk(ranks)]
        return (*sizes, *[0] * (ranks - len(sizes))), number

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's parts are those that count, where several replicas have the same."""
        *others, _ = self._mesh.get_coordinate() or [0]
        return not any(others)

    @property
    def bytes_here(self) -> int:
        """Of the parameters that this rank keeps, all together."""
        return sum(p.nbytes for p in self.local.values())

    @contextmanager
    def fsdp_module(self) -> Iterator[FSDPModule]:
        """The model, which has the methods of ``FSDPModule`` in this context, as its blocks have.

        ``fully_shard`` changes their classes. Afterwards they have their own again: a person's code
        may ask whether ``type(layer) is Block``.
        """
        for module, kind in self._sharded:
            module.__class__ = kind
        try:
            yield self._sharded[0][0]
        finally:
            self._give_classes_back()

    def _give_classes_back(self) -> None:
        for module, kind in self._sharded:
            module.__class__ = kind.__mro__[2]  # (after its own class and FSDPModule)

    def reshard(self) -> None:
        """Free what is gathered beside the blocks."""
        with self.fsdp_module() as model:
            model.reshard()


def _before(module: nn.Module) -> Before:
    held = vars(module)
    return Before(set(held), {number for kind in HOOKS for number in held[kind]})


def _refuse_copy(memo: dict[int, Any]) -> NoReturn:
    raise StrategyError(
        "fsdp: a sharded model can't be copied (copy.deepcopy, AveragedModel)",
        fix="copy it within `with step.whole_parameters():`, or let lockstep.callbacks.EMA or SWA "
        "average it",
    )


def _send_zeros(module: nn.Module) -> None:
    """A gradient that this rank has none of is sent as zeros: which ones ranks have may differ."""
    assert isinstance(module, FSDPModule)
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
    elif (group := module._get_fsdp_state()._fsdp_param_group) is not None:  # torch 2.11 and 2.12

        def begin_with_zeros(grad: torch.Tensor) -> None:
            del grad
            for p in group.fsdp_params:
                whole = getattr(p, "_unsharded_param", None)
                if whole is not None and whole.requires_grad and whole.grad is None:
                    whole.grad = torch.zeros_like(whole)

        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            del module, args
            for tensor in tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(begin_with_zeros)  # type: ignore[no-untyped-call]

        nn.Module.register_forward_hook(module, hook)


def _local(p: torch.Tensor) -> torch.Tensor:
    """This rank's part, in the memory that it has."""
    held = p.detach()
    assert isinstance(held, DTensor)
    return held.to_local()


class NamedParameters(nn.Module):
    """Stands for a model whose parameters have these names, where only names are asked for."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self._named = list(named)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """As they were given."""
        del args, kwargs
        return iter(self._named)


def blocks_of(model: nn.Module, wanted: str) -> dict[str, nn.Module]:
    """The modules that are to be gathered on their own.

    Args:
        model: the whole model.
        wanted: ``"auto"`` takes repeated layers; names, with commas between, of modules or lists of
            them; ``""`` none.

    Raises:
        StrategyError: there is no such module (the nearest is offered), or one is within another or
            tied to another.
    """
    if wanted == "auto":
        found = found_blocks(model)
        return {name: block for name, block in found.items() if not _tied(model, block)}
    named = named_blocks(model, wanted, "blocks", StrategyError)
    for name, block in named.items():
        if tied := _tied(model, block):
            raise StrategyError(
                f'blocks: "{name}" has "{tied}", which the model uses elsewhere too: leave it out'
            )
        if inner := next((n for n in named if n.startswith(f"{name}.")), None):
            raise StrategyError(f'blocks: "{inner}" is within "{name}": name one of them')
    return named


def _tied(model: nn.Module, block: nn.Module) -> str | None:
    """The name of a parameter of a block that is elsewhere in the model too."""
    outside, reached = set[nn.Module](), [model]
    while reached:
        module = reached.pop()
        if module is not block and module not in outside:
            outside.add(module)
            reached += module.children()
    elsewhere = {id(p) for module in outside for p in module._parameters.values()}
    return next((name for name, p in block.named_parameters() if id(p) in elsewhere), None)


def places_of(model: nn.Module) -> dict[str, list[Place]]:
    """By the name of each parameter, the modules that hold it, and its names there: several
    where it is tied.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, list[Place]] = defaultdict(list)
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None:
                found[names[id(p)]].append((module, key))
    return found


def _kept_whole(model: nn.Module) -> dict[str, str]:
    """Parameters that ``fully_shard`` can't cut, with why."""
    sparse = sparse_parameters(model)
    trained = [p for p in model.parameters() if p.is_floating_point()]
    common: Counter[torch.dtype] = Counter()
    for p in trained:
        common[p.dtype] += p.numel()
    most = common.most_common(1)[0][0] if common else None
    found = {}
    for name, p in model.named_parameters():
        if p.dim() == 0:
            found[name] = "it is a single number"
        elif not p.numel():
            found[name] = "it is empty"
        elif id(p) in sparse:
            found[name] = "its gradients are sparse"
        elif p.dtype is not most:
            found[name] = f"it is {str(p.dtype).removeprefix('torch.')}, unlike most of the model"
        elif not p.is_contiguous():
            found[name] = "its memory isn't contiguous"
    return found
