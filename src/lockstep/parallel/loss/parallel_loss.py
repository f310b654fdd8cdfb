"""Parallel loss: the output layer and the loss on every device, a chunk of the sequence at a time.

A model with a large vocabulary has most of its memory in one tensor: 32 x 64 tokens of 32,000 words
are 262 MB of logits, and the loss makes three such tensors. ``torch.nn.DataParallel`` gathers all on
the first device, and computes the loss there. Here each device has a replica of the output layer
(the *generator*) and a share of the hidden states::

    trunk ──▶ hidden (batch, time, width)
                │ share 0 ──▶ cpu:0   chunk by chunk: logits, loss, backward ──┐   total, count,
                │ share 1 ──▶ cpu:1   chunk by chunk: logits, loss, backward ──┴▶  gradients summed

The loss is one node of the caller's graph: from there its gradient goes on into the trunk, and into
the generator's own parameters. Gradients of weights are added up as soon as they are there, so that
one set of them is kept until backward.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import InputError, LossError
from lockstep.launch.devices import Devices, parse
from lockstep.model.losses.torch_losses import Count
from lockstep.model.modes import normalizes_by_batch
from lockstep.parallel import target_devices
from lockstep.parallel.data_parallel import Balanced
from lockstep.parallel.loss.inplace_gradient import add_in_place
from lockstep.parallel.loss.loss_chunks import Share
from lockstep.parallel.loss.token_loss import Criterion
from lockstep.parallel.parallel_apply import in_streams
from lockstep.parallel.replicate import replicate
from lockstep.parallel.scatter import refuse_uncuttable, scatter
from lockstep.tensors import pytree
from lockstep.tensors.rows import batch_size_of, share_sizes
from lockstep.threads import recompute
from lockstep.threads.thread_pool import run

TOKENS = 256
"""How many tokens a chunk has, about, where a person doesn't say: enough to keep a matrix
product busy.
"""


class Summed(NamedTuple):
    """What a parallel loss gives: ``total, count = parallel_loss(hidden, targets)``, or its
    ``loss``.

    Attributes:
        total: the sum over all tokens, a scalar in the caller's graph; detached where nothing wants
            gradients.
        count: how many tokens that are (or the sum of their weights), a number or a scalar tensor.
    """

    total: Tensor
    count: Count  # type: ignore[assignment]  # as the count of a tuple is a method

    @property
    def loss(self) -> Tensor:
        """``total / count``: call ``.backward()`` on this.

        Raises:
            LossError: the count is 0. One on an accelerator isn't waited for; the loss is NaN then.
        """
        is_here = not isinstance(self.count, Tensor) or self.count.is_cpu
        if is_here and self.count == 0:
            raise LossError("the count is 0: every token is ignored; leave such a batch out")
        return self.total / self.count


class ParallelLoss:
    """The generator and the criterion on all devices; call it in the place of both.

    ::

        loss_of = ParallelLoss(generator, nn.CrossEntropyLoss(ignore_index=0), devices="2xcpu", chunk_size=8)
        for source, target in batches:
            result = loss_of(trunk(source, target[:, :-1]), target[:, 1:])
            result.loss.backward()  # trunk's and generator's gradients are those of the plain loss
            optimizer.step()

    Where nothing wants gradients (in ``no_grad``, say) it only evaluates. A weight of the generator
    may be the trunk's too (a shared embedding); a frozen one, or a trunk that is, costs nothing.
    Gradients are computed while the loss is, so they can't be differentiated again, and in fp16
    they are those of the sum over tokens. In a generator with half-precision weights the chunks are
    added in that precision.

    Args:
        generator: hidden states (batch, steps, width) to (batch, steps, vocabulary): a linear
            layer, or one with ``LogSoftmax`` after it; it is not copied before the first call, and
            not changed. What it draws (dropout) comes on each CPU device from a stream of its
            own. None: the outputs are the criterion's as they are.
        criterion: ``criterion(outputs, targets)`` over rows of tokens, (batch x steps, vocabulary)
            and (batch x steps, ...), with a sum as result: see the table in
            ``lockstep.parallel.loss.token_loss``.
        devices: as ``lockstep.launch.devices.parse`` reads them, or a list; outputs left on their
            devices stay there.
        chunk_size: time steps that are computed at once. None takes as many as make 256 tokens;
            without a generator outputs aren't cut then.

    Raises:
        LossError: a criterion that can't be called, or has parameters that learn.
        DeviceError: devices that don't exist.
    """

    def __init__(
        self,
        generator: nn.Module | None,
        criterion: Callable[..., Any],
        devices: Devices = None,
        chunk_size: int | None = None,
    ) -> None:
        self.generator = generator
        self.criterion = criterion
        self.devices = parse(devices)
        self.chunk_size = chunk_size
        self._criterion = Criterion(criterion)
        recompute.install()

    def __call__(
        self,
        hidden: Tensor | Balanced | Any,
        targets: Any,
        *,
        count: Count | None = None,
    ) -> Summed:
        """Compute the loss of a batch.

        Args:
            hidden: what the trunk gave, (batch, time, width), or (batch, width) which isn't cut in
                chunks; or that of each replica of a ``DataParallel`` with ``balanced=True``.
                Without a generator, any nesting of outputs.
            targets: of the whole batch: a nest of tensors (batch, time, ...).
            count: divides the total in the place of the criterion's own count.

        Raises:
            InputError: shapes that don't go together, an empty batch, a generator that can't be
                replicated or that normalises over its batch, tensors that want gradients and aren't
                the generator's.
            LossError: the criterion can't take the rows, or doesn't give what it may.
        """
        if self.generator is not None:
            _refuse_batch_norm(self.generator)
        if not isinstance(hidden, Balanced):
            refuse_uncuttable(hidden)
            sizes = share_sizes(batch_size_of(hidden), len(self.devices))
            parts = scatter(hidden, self.devices, sizes=sizes)
            hidden = Balanced(list(parts), list(self.devices))
        sizes = [batch_size_of(part) for part in hidden]
        if not any(sizes):
            raise InputError("a batch of 0 has no loss: skip it")
        steps = self._steps(hidden, sizes)
        _check_targets(targets, sum(sizes), hidden[0].shape[1] if steps else None)
        with torch.no_grad():
            mine = scatter(targets, hidden.devices, sizes=sizes)
        shares = []
        for i, device in enumerate(hidden.devices):
            if sizes[i]:
                share = Share(device, hidden[i], mine[i], self._criterion, steps, count)
                shares.append(share)
        total, found = _total_of(shares, self.generator)
        return Summed(total, found if count is None else count)

    def _steps(self, hidden: Balanced, sizes: list[int]) -> int | None:
        """Count the time steps of a chunk; None where nothing is cut in chunks."""
        if self.generator is None and self.chunk_size is None:
            return None
        if hidden[0].dim() == 2:
            return None
        return self.chunk_size or -(-TOKENS // max(sizes))


def _check_targets(wanted: Any, batch: int, time: int | None) -> None:
    """Refuse targets of another batch than the hidden states, or of other times where time is cut."""
    expected: tuple[int, ...] = (batch,)
    outputs = f"outputs of {batch} samples"
    if time is not None:
        expected = batch, time
        outputs += f" and {time} time steps"

    for tensor in pytree.tensors(wanted):
        if tensor.requires_grad:
            raise InputError(
                "the targets want gradients, which a parallel loss doesn't give them: detach them"
            )
        if tensor.dim() and tensor.shape[: len(expected)] != expected:
            raise InputError(
                f"targets {tuple(tensor.shape)} beside {outputs}: both must have the same"
            )


def _refuse_batch_norm(generator: nn.Module) -> None:
    for name, module in generator.named_modules():
        if normalizes_by_batch(module):
            raise InputError(
                f"{name or 'the generator'} is a {type(module).__name__}, which would normalize "
                "each chunk of tokens by itself: move it to the model in front of the generator, "
                "or call its eval()"
            )


def _total_of(shares: list[Share], generator: nn.Module | None) -> tuple[Tensor, Count]:
    """Return total and count of all shares, the total with gradient where something wants one.

    Args:
        shares: none of them is empty.
        generator: the original; None without one.
    """
    weights = [] if generator is None else _trained(generator)
    inputs: list[Tensor] = []
    for share in shares:
        inputs += pytree.tensors(share.outputs)
    inputs += weights
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    home = inputs[0].device
    with torch.no_grad():
        replicas = _give_replicas(shares, generator)
        calls: list[Callable[[], Any]] = [functools.partial(one.work, learns) for one in shares]
        if shares[0].device.is_slot:
            calls = in_streams(calls)
        found_by_device = run([share.device for share in shares], calls)
        results = [result for result in found_by_device if result is not None]

        # In the order of the shares: the same bits each time.
        total = torch.zeros((), device=home)
        counts: list[Count] = []
        grads: list[Tensor | None] = []
        totals = []
        for found, count, those in results:
            if found is not None:
                totals.append(target_devices.move(found, home))
            if isinstance(count, Tensor):
                count = target_devices.move(count, home)
            counts.append(count)
            grads += those
        if totals:
            total = functools.reduce(torch.add, totals)

        columns = zip(*map(_trained, replicas), strict=True)
        for column, weight in zip(columns, weights, strict=True):
            grads.append(_sum_of(column, weight.device))

    if learns:
        total = _Total.apply([total, *grads], *inputs)  # type: ignore[no-untyped-call]
    return total, functools.reduce(operator.add, counts)


def _trained(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _give_replicas(shares: list[Share], generator: nn.Module | None) -> list[nn.Module]:
    """Give each share a replica of the generator, whose parameters are leaves."""
    if generator is None:
        return []
    replicas = replicate(generator, [share.device for share in shares], detach=True)
    for share, replica in zip(shares, replicas, strict=True):
        share.generator = replica
        for mine, original in zip(replica.parameters(), generator.parameters(), strict=True):
            mine.requires_grad_(original.requires_grad)
        add_in_place(replica)
    return replicas


def _sum_of(replicas: Iterable[Tensor], home: torch.device) -> Tensor | None:
    """Return the sum of the gradients that replicas of a weight have, and take them away."""
    total: Tensor | None = None
    for mine in replicas:
        if mine.grad is None:
            continue
        grad = target_devices.move(mine.grad, home)
        mine.grad = None
        total = grad if total is None else total.add_(grad)
    return total


class _Total(torch.autograd.Function):
    """``([total, its gradient for each tensor], *tensors) -> total``."""

    @staticmethod
    def forward(ctx: Any, found: list[Tensor | None], *tensors: Tensor) -> Tensor | None:
        total, *grads = found
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                "a parallel loss can't be differentiated twice (create_graph=True): its gradients "
                "were computed with it; take the plain loss for that"
            )
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        scaled: list[Tensor | None] = []
        for found in ctx.saved_tensors:
            if found is None:
                scaled.append(None)
                continue
            scale = target_devices.move(grad, found.device)
            # Without a copy where nobody comes back for them.
            scaled.append(found * scale if is_kept else found.mul_(scale))
        return None, *scaled
