r"""DataParallel: a module whose batch is worked on by all devices at the same time.

With the shares :math:`x = [x_1, \dots, x_n]` of a batch, and replicas of one module with the
weights :math:`w`,

.. math:: y = [f(x_1, w), \dots, f(x_n, w)] \qquad
          \frac{\partial l}{\partial w} = \sum_i \frac{\partial l}{\partial y_i} \frac{\partial
          f(x_i, w)}{\partial w}

``torch.nn.DataParallel`` does that on GPUs. Here it works on slots of a CPU as well, forward and
backward (`lockstep.parallel.backward_threads`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.launch.devices import Device, Devices, parse
from lockstep.parallel import backward_threads, target_devices, trace_shapes
from lockstep.parallel.gather import gather
from lockstep.parallel.parallel_apply import in_streams, parallel_apply
from lockstep.parallel.replicate import replicas_of, replicate, tensors_of
from lockstep.parallel.scatter import is_plain, scatter_kwargs
from lockstep.tensors import pytree
from lockstep.tensors.common_memory import tensors_of as named_tensors_of
from lockstep.tensors.placing import place_module
from lockstep.threads import recompute
from lockstep.threads.thread_pool import run

M = TypeVar("M", bound=nn.Module)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_CALL = 6
"""Up the stack from a method that forward calls to the line that called the DataParallel."""


@dataclass(frozen=True)
class Balanced:
    """What ``DataParallel(..., balanced=True)`` gives: an output per replica that ran, in the order
    of the batch.

    Nothing was gathered, so no device holds more than its share. It has a length, can be indexed
    and gone through.

    Attributes:
        outputs: what each replica gave, with its gradient history; of any nesting.
        devices: for each output the device where it was computed, and where it lies.
    """

    outputs: list[Any]
    devices: list[Device]

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.outputs)

    def __getitem__(self, index: int) -> Any:
        return self.outputs[index]


class DataParallel(nn.Module, Generic[M]):
    """``module``, computed by a replica on each device, each with a share of the batch.

    In the place of ``torch.nn.DataParallel``: the sizes of the shares are those of ``torch.chunk``;
    whatever isn't a tensor is shared by all replicas; hooks run in each replica; what a replica
    sets on itself is lost, but what the first one writes into a buffer stays; a 0-dimensional
    output becomes a vector with an entry for each replica. Gradients are summed on ``module``. With
    one device, ``module`` itself is called.

    On CPU devices each replica's forward and backward run in a thread of its own, on the device's
    cores. There, beyond what PyTorch's does: replicas draw random numbers (dropout) from streams of
    their own, which follow from the caller's seed; a parameter that was not used has no gradient
    instead of zeros; replicas that write a parameter are refused (written by its ``.data``, it is
    written by every replica: that isn't seen).

    A tensor that wants gradients and is neither parameter, buffer nor argument (closed over, say)
    has them after ``backward()``; on CPU devices ``torch.autograd.grad`` doesn't find it.

    Args:
        module: has its parameters and buffers on the first device.
        device_ids: numbers of accelerators, or whatever ``lockstep.launch.devices.parse`` reads:
            ``"2xcpu"``, ``"cuda:0,1"``, a list of devices. One accelerator may occur several times.
            None means all accelerators, or one CPU device.
        output_device: where outputs are gathered; the first device by default.
        dim: the dimension of the batch.
        balanced: gather nothing: the result is a ``Balanced``, with each replica's outputs on its
            device.

    Attributes:
        module: the original.
        devices: those that compute.
        device_ids: their numbers.
        sizes: the share of each replica in the last forward; empty where nothing was cut.

    Raises:
        InputError: no module, or both ``output_device`` and ``balanced``; in forward, a batch of 0,
            tensors that can't be cut together, a module that can't be replicated, outputs that
            don't go together.
        DeviceError: devices that don't exist.

    Example::

        net = lockstep.parallel.DataParallel(model, "2xcpu")
        loss_fn(net(inputs), labels).backward()

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
    """

    module: M

    def __init__(
        self,
        module: M,
        device_ids: Devices = None,
        output_device: Device | torch.device | str | int | None = None,
        dim: int = 0,
        *,
        balanced: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise InputError(
                f"DataParallel takes a module, not {type(module).__name__}: wrap a function in one"
            )
        if balanced and output_device is not None:
            raise InputError(
                "balanced=True leaves outputs on their devices, so output_device has no meaning: "
                "give one of the two"
            )
        self.module = module
        self.devices = parse(device_ids)
        self.device_ids = [device.index for device in self.devices]
        self.output_device = (
            self.devices[0].torch if output_device is None else target_devices.one(output_device)
        )
        self.dim = dim
        self.balanced = balanced
        self.sizes: tuple[int, ...] = ()
        self._warned_of_sizes = False
        recompute.install()
        if len(self.devices) == 1:
            place_module(module, self.devices[0].torch)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Compute what ``module`` gives for the whole batch."""
        before = _compile_with(None) if len(self.devices) > 1 else None
        try:
            with torch.autograd.profiler.record_function("DataParallel.forward"):
                return self._forward(inputs, kwargs)
        finally:
            if len(self.devices) > 1:
                _compile_with(before)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, named = self.scatter(inputs, kwargs, self.devices)
        shares = list(zip(args, named, strict=True)) or [((), {})]  # without arguments: once
        sizes = _sizes(shares, self.dim)  # another thread's forward may write its own there
        self.sizes = sizes
        devices = self.devices[: len(shares)]

        if len(self.devices) == 1:
            ((given, keywords),) = shares
            outputs = [self.module(*given, **keywords)]
        else:
            outputs = self._outputs(shares, devices)

        whole: Any
        if self.balanced:
            whole = Balanced(outputs, list(devices))
        elif len(self.devices) == 1:
            whole = outputs[0]
        else:
            self._warn_of_means(outputs, sizes)
            whole = self.gather(outputs, self.output_device)
        trace_shapes.note((inputs, kwargs), shares, outputs, whole, devices, sizes)
        return whole

    def _outputs(self, shares: Sequence[Arguments], devices: Sequence[Device]) -> list[Any]:
        """Call a replica for each share."""
        followed, own = tensors_of(self.module)
        _refuse_elsewhere(self.module, (*followed, *own), self.devices[0].torch)
        kind = type(self)
        is_own = (
            kind.replicate is DataParallel.replicate
            and kind.parallel_apply is DataParallel.parallel_apply
        )
        if is_own and all(device.is_slot for device in self.devices):
            return _on_slots(self.module, followed, own, shares, devices)

        replicas = self.replicate(self.module, devices)
        args, named = zip(*shares, strict=True)
        return self.parallel_apply(replicas, args, named)

    def replicate(self, module: nn.Module, device_ids: Sequence[Device]) -> list[Any]:
        """Make replicas. To be called or overridden; on CPU devices forward makes its own
        where it isn't.
        """
        return replicate(module, device_ids, detach=not torch.is_grad_enabled())

    def parallel_apply(
        self,
        replicas: Sequence[Any],
        inputs: Sequence[Any],
        kwargs: Sequence[Any] | None,
    ) -> list[Any]:
        """Call replicas at the same time. To be called or overridden, as ``replicate``."""
        return parallel_apply(replicas, inputs, kwargs, self.devices[: len(replicas)])

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device_ids: Sequence[Device],
    ) -> tuple[Sequence[tuple[Any, ...]], Sequence[dict[str, Any]]]:
        """Cut the arguments in shares. To be overridden where they are to be cut in another way."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Sequence[Any], output_device: torch.device) -> Any:
        """Put the outputs together. To be overridden where they are to be put together in
        another way.
        """
        return gather(outputs, output_device, self.dim)

    def _warn_of_means(self, outputs: Sequence[Any], sizes: Sequence[int]) -> None:
        """Warn once of a scalar from each of unequal shares."""
        if self._warned_of_sizes or len(set(sizes)) < 2:
            return
        if not _has_scalars(outputs[0]):
            return
        self._warned_of_sizes = True
        shares = ", ".join(map(str, sizes))
        warnings.warn(
            f"each replica gave a scalar, of shares of {shares}: if they are means, their mean() "
            "is not that of the batch. Write (losses * losses.new_tensor(net.sizes)).sum() / "
            "sum(net.sizes) with this DataParallel as net, or return a value for each sample",
            stacklevel=_CALL,
        )


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Devices = None,
    output_device: Device | torch.device | str | int | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call ``module`` once, as a ``DataParallel`` would.

    Args:
        module: has its parameters and buffers on the first device.
        inputs: a tuple of positional arguments, or the only one; None for none.
        device_ids: as for ``DataParallel``.
        output_device: where outputs are gathered; -1 is the memory of the CPU.
        dim: the dimension of the batch.
        module_kwargs: keyword arguments.

    Raises:
        InputError: as ``DataParallel``; also if ``module`` isn't on the only device.
        DeviceError: devices that don't exist.
    """
    devices = parse(device_ids)
    _refuse_elsewhere(module, (*module.parameters(), *module.buffers()), devices[0].torch)
    if inputs is None:
        given: tuple[Any, ...] = ()
    else:
        given = inputs if isinstance(inputs, tuple) else (inputs,)
    net = DataParallel(module, devices, output_device, dim)
    output = net(*given, **(module_kwargs or {}))
    if len(devices) == 1 and output_device is not None:
        return pytree.to_device(output, net.output_device)
    return output


def _has_scalars(nest: Any) -> bool:
    return any(tensor.dim() == 0 for tensor in pytree.tensors(nest))


def _sizes(shares: Sequence[Arguments], dim: int) -> tuple[int, ...]:
    """Find what each share has along ``dim``, by its first tensor that is cut."""
    sizes = []
    for share in shares:
        for tensor in pytree.tensors(share):
            if tensor.dim() and is_plain(tensor):
                sizes.append(tensor.shape[dim])
                break
    return tuple(sizes)


def _refuse_elsewhere(module: nn.Module, tensors: Sequence[Tensor], place: torch.device) -> None:
    for tensor in tensors:
        if tensor.device != place:
            raise InputError(
                f"module must have its parameters and buffers on device {place} (device_ids[0]) "
                f'but "{_name_of(tensor, module)}" is on {tensor.device}: call .to("{place}") first'
            )


def _name_of(tensor: Tensor, module: nn.Module) -> str:
    return next(name for name, found in named_tensors_of(module) if found is tensor)


def _on_slots(
    module: nn.Module,
    followed: list[Tensor],
    own: list[Tensor],
    shares: Sequence[Arguments],
    devices: Sequence[Device],
) -> list[Any]:
    """Call each replica in a thread of its slot, with a graph of its own that is joined to the
    caller's.

    Args:
        module: the original.
        followed, own: its tensors, as ``tensors_of`` gives them.
        shares: of the batch.
        devices: as many slots.
    """
    learns = torch.is_grad_enabled()
    shared = [tensor for tensor in followed if tensor.requires_grad and learns]
    leaves: list[dict[int, Tensor]] = []
    copies = []
    for _ in devices:
        stand_ins = {id(tensor): backward_threads.stand_in(tensor) for tensor in shared}
        leaves.append(dict(enumerate(stand_ins.values())))
        copies.append([stand_ins.get(id(tensor), tensor) for tensor in followed])

    replicas = replicas_of(module, [device.torch for device in devices], followed, copies, own)
    calls: list[Callable[[], Any]] = []
    for replica, share, mine in zip(replicas, shares, leaves, strict=True):
        if learns:
            share = pytree.each(functools.partial(_of_its_own, shared, mine), share)
        args, kwargs = share
        calls.append(functools.partial(replica, *args, **kwargs))

    before = {tensor: tensor._version for tensor in followed if not tensor.is_inference()}
    outputs = run(devices, in_streams(calls))
    for tensor, version in before.items():
        if tensor._version != version:
            raise InputError(
                f'parameter "{_name_of(tensor, module)}" was changed in forward, by every replica, '
                "and they share its memory: make it a buffer (the first replica's is kept), or "
                "change it outside of forward"
            )
    return backward_threads.joined(outputs, devices, shared, leaves)


def _of_its_own(shared: list[Tensor], leaves: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """Return a share that a replica may differentiate by, and change in place.

    Args:
        shared: the tensors that gradients go to; this one is added.
        leaves: of the replica, by the number in ``shared``; the stand-in is added.
        tensor: the share.
    """
    if not tensor.requires_grad:
        return tensor
    leaf = backward_threads.stand_in(tensor)
    leaves[len(shared)] = leaf
    shared.append(tensor)
    return leaf.clone()  # no leaf itself: the replica may write to it


def _compile_with(callback: Any) -> Any:
    """Let ``torch.compile`` compile nothing more in this thread (None), or what it did before;
    gives what it did.

    Of a ``DataParallel`` in a compiled function it would compile pieces of what is here, and
    gradients of inputs come out wrong, without a word (torch 2.13). What a replica calls may be
    compiled: each thread has its own compiler.
    """
    return torch._C._dynamo.eval_frame.set_eval_frame(callback)


# As of torch.compiler.disable, which would import the compiler, for 0.8 s: it calls this function
# as it is.
vars(_compile_with)["_torchdynamo_disable"] = True
