"""A process group for simulated cards, over gloo: a collective holds the host only where its
work is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, _create_work_from_future


class CardGroup(dist.ProcessGroup):
    """Tensors of cards are sent as copies on the CPU; what arrives is written when a collective
    is done.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "cards"

    def setGroupName(self, name: str) -> None:
        self.name = name

    def getGroupName(self) -> str:
        return self.name

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return _over_cpu(
            tensors, lambda here: self.gloo.allreduce(here, options or dist.AllreduceOptions())
        )

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        return _over_cpu(
            tensors, lambda here: self.gloo.broadcast(here, options or dist.BroadcastOptions())
        )

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        count = len(outputs[0])
        options = options or AllgatherOptions()
        return _over_cpu(
            [*outputs[0], *inputs],
            lambda here: self.gloo.allgather([here[:count]], here[count:], options),
        )

    def _allgather_base(self, output: Any, source: Any, options: Any = None) -> Any:
        options = options or AllgatherOptions()
        return _over_cpu([output, source], lambda here: self.gloo._allgather_base(*here, options))

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def _reduce_scatter_base(self, output: Any, source: Any, options: Any = None) -> Any:
        """(Gloo's has no future.)"""
        assert options is None or options.reduceOp == dist.ReduceOp.SUM
        whole = source.clone()

        def write(_: Any) -> list[torch.Tensor]:
            memory, mine = (torch.ops.simulated_card.memory_of(t) for t in (output, whole))
            memory.copy_(mine.chunk(self.size())[self.rank()].view_as(memory))
            return [output]

        return _create_work_from_future(self.allreduce([whole]).get_future().then(write))

    reduce_scatter_single = _reduce_scatter_base

    def send(self, tensors: Any, *to: Any) -> Any:
        return _over_cpu(tensors, lambda here: self.gloo.send(here, *to))

    def recv(self, tensors: Any, *source: Any) -> Any:
        return _over_cpu(tensors, lambda here: self.gloo.recv(here, *source))

    def barrier(self, options: Any = None) -> Any:
        return self.gloo.barrier(options or dist.BarrierOptions())


def _over_cpu(tensors: list[torch.Tensor], collective: Callable[[list[torch.Tensor]], Any]) -> Any:
    if not any(tensor.device.type == "card" for tensor in tensors):
        return collective(tensors)
    memory = [
        torch.ops.simulated_card.memory_of(t) if t.device.type == "card" else t for t in tensors
    ]
    sent = [each.clone() for each in memory]
    work = collective(sent)

    def write(_: Any) -> list[torch.Tensor]:
        for each, received in zip(memory, sent, strict=True):
            each.copy_(received)
        return tensors

    return _create_work_from_future(work.get_future().then(write))


def _all_gather(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """That of DTensors, which PyTorch doesn't ask a group written in Python for."""
    group = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
    found = tensor.new_empty([size * len(tensor), *tensor.shape[1:]])
    group._allgather_base(found, tensor.contiguous(), AllgatherOptions()).wait()
    return found


def register() -> None:
    """Make it the process group of cards."""
    dist.Backend.register_backend("cards", CardGroup, devices=["card", "cpu"])
    _library.impl("all_gather_into_tensor", _all_gather, "PrivateUse1")


_library = torch.library.Library("_c10d_functional", "IMPL")
