"""Step: what every strategy builds, and the part of an update that is the same for all.

An update is: forward and backward of each micro-batch, the sum of gradients over the devices, the weighting by count,
clipping, the optimizer. A strategy writes the first two (``gradients``); the rest is here, once.

The weighting, with n the samples of the global batch and (total, count) the loss of a share::

    backward runs on  total / n       every rank knows n before it starts
    gradients are     summed          over micro-batches, replicas and ranks; total and count beside them
    and multiplied by n / count       so that they are those of  sum(totals) / sum(counts)
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lockstep.data import Batch, Part, mixed
from lockstep.data.shares import batch_of, own_stream
from lockstep.errors import InputError, LossError, NonFiniteLoss, OutOfMemory, RunError, StrategyError
from lockstep.job import Job
from lockstep.launch.events import Caveat, Line
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.observer import observed, phase
from lockstep.launch.world import World
from lockstep.model.additivity import Piece
from lockstep.model.build import hooked_parameters
from lockstep.model.checkpoint import load_state, save_state
from lockstep.model.compile import compile_models, not_compilable
from lockstep.model.device_checks import DeviceChecks
from lockstep.model.inspection import (
    OutsideVariables,
    Seen,
    attribute_prints,
    changed_attributes,
    drops,
    look,
    refuse_written_buffers,
    set_attributes,
)
from lockstep.model.layer_error import is_of_one_sample
from lockstep.model.loss import Number
from lockstep.model.nonfinite import why_not_finite
from lockstep.model.optimizer import begin_momentum, clip_gradients, load_named_optimizer_state, named_optimizer_state
from lockstep.strategies.evaluator import Evaluator, is_power_of_two
from lockstep.tensors.seeding import kept_states

_STATE = "state.pt"

_NOT_FINITE, _NO_ITEMS, _NOT_ADDITIVE = "not finite", "no items", "not additive"


class Result:
    """What an update did.

    Attributes:
        total: the sum of the loss over the items of the global batch.
        count: their number (samples, tokens, weights).
        size: the samples of the global batch.
    """

    __slots__ = ("count", "size", "total")

    def __init__(self, total: Number, count: Number, size: int) -> None:
        self.total = total
        self.count = count
        self.size = size

    @property
    def loss(self) -> float:
        """The loss of the global batch; NaN where nothing was counted. On an accelerator, asking waits for it."""
        count = float(self.count)
        return float(self.total) / count if count else math.nan

    def __repr__(self) -> str:
        return f"Result(loss={self.loss:.6g}, count={float(self.count):g}, size={self.size})"


class Step(Evaluator, ABC):
    """One model in training under one strategy.

    ``step(inputs, targets)`` is one update; its arguments are this process's share of the global batch (all of it where
    one process drives all devices).

    Attributes:
        model: the model under its one-device names.
        optimizer: the one optimizer of this process.
        world: this process's place among the ranks.
        observers: of this step, those of its world.
        stopping: whether the ranks have agreed, in the last update, that the training is to be saved and stopped.
        last_look: the last update in which it is looked at what the model does in forward, by some more forwards; that
            is done in updates 1, 2, 4, 8 and so on, and in the last one of all.
        last_step: that update's step, where it is known.
        seen: what was seen.
    """

    reduces = False
    """Whether PyTorch's reducer sums gradients over the ranks while the next backward runs."""

    own_loop = False
    """Whether a person's own loop calls it, perhaps on some of the ranks only."""

    timed: Literal["rank", "replica", "device"] = "rank"
    """What a profile has times of: the process, its replicas on threads, or the devices of its stages."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, world: World) -> None:
        super().__init__(model, job, world)
        self.observers = world.observers
        self.optimizer = optimizer
        self._clip_norm = job.clip_norm
        self._scaler = self._precision.scaler
        self._compile = job.compile
        self._synchronises = job.sync_batchnorm
        self._optimized = self._in_optimizer()
        held = set(self._optimized)
        self._held = {name: p for name, p in model.named_parameters() if id(p) in held}
        self._find_trained()
        self._seed = job.seed
        self._updates = 0
        self._weighs = False
        self.stopping = False
        self._asked: Number = 0
        self.last_look: float = 1 if job.compile else math.inf
        self.last_step: int | None = None
        self.seen = Seen()
        self._attributes = attribute_prints(model)
        self._outside = OutsideVariables.of_model(model)
        self._outside_prints, self._loss_state = self._outside.prints(), self.loss.state()
        self._noted: set[Caveat | str] = set()
        self._on_devices = DeviceChecks()
        self._factors: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}

    @property
    def together(self) -> bool:
        """Whether the ranks meet in each update."""
        return self.world.layout.together

    def _find_trained(self) -> None:
        """The parameters that are trained now: those of the optimizer that aren't frozen."""
        self._flags = [p.requires_grad for p in self._held.values()]
        self._names = [name for name, p in self._held.items() if p.requires_grad]
        self._parameters = [p for p in self._held.values() if p.requires_grad]

    def _in_optimizer(self) -> list[int]:
        return [id(p) for group in self.optimizer.param_groups for p in group["params"]]

    def _look_at_flags(self) -> None:
        """Look for parameters that were frozen or trained anew.

        Raises:
            StrategyError: the optimizer was given others.
        """
        if self._in_optimizer() != self._optimized:
            if self.own_loop:
                how = "call lockstep.parallelize again, with the model as it is now"
            else:
                how = "give it all from the beginning, and freeze and train them with requires_grad_()"
            raise StrategyError(f"the optimizer has other parameters than when the step was made: {how}")
        flags = [p.requires_grad for p in self._held.values()]
        if flags != self._flags:
            changed = zip(self._held, flags, self._flags, strict=True)
            self._follow_flags(next(name for name, now, before in changed if now != before))

    def _follow_flags(self, name: str) -> None:
        """A person has frozen parameters of the optimizer, or trains frozen ones from now on; ``name`` is the first."""
        del name
        for p in self._parameters:
            p.grad = None
        self._find_trained()
        begin_momentum(self.optimizer)

    def after_events(self) -> None:
        """Look for what a person's functions, which run on rank 0 only, may have changed."""

    # ---- one update -------------------------------------------------------------------------------------------------

    def __call__(self, inputs: Any, targets: Any = None) -> Result:
        """One update on this process's share of a global batch.

        Args:
            inputs: what the model takes (a tuple as ``model(*inputs)``, a dict as ``model(**inputs)``), or a ``Batch``
                of ``lockstep.batches``, which also knows the size of the global batch.
            targets: what the loss takes beside the outputs.
        """
        self._look_at_flags()
        self.world.announce(self.world.step + 1)
        given = isinstance(inputs, Batch)
        batch = inputs if given else batch_of(inputs, targets, self._accumulate, self.world, self._refuse_gaps)
        with own_stream(self.world, self._seed), self._own_streams_of_parts(len(batch.parts)):
            return self.update(batch)

    @contextmanager
    def _own_streams_of_parts(self, parts: int) -> Iterator[None]:
        """Give the micro-batches of a step random streams of their own, where nobody has called ``seed``.

        They come from one number of the caller's stream, so that they are the same in whichever order, or how far
        overlapped, a strategy computes them.
        """
        if self.world.size > 1 or parts == 1 or self._stream is not None:
            yield
            return
        key = int(torch.randint(2**62, ()))
        with kept_states(self._accelerators):
            self._stream = (key,)
            self._seed_all(mixed(key))
            try:
                yield
            finally:
                self._stream = None

    def _refuse_gaps(self, here: list[bool]) -> None:
        """Called where a rank has no sample and a later one has; a strategy that can't do that refuses."""
        del here

    def update(self, batch: Batch) -> Result:
        """One update on a batch of the loader.

        Raises:
            RunError: the batch's loss counts no item.
            StrategyError: the model does in forward what can't be kept.
            NonFiniteLoss: the loss is NaN or infinite (on accelerators found some steps later, to save waiting).
            OutOfMemory: with the share that was too large.
        """
        self._look_at_flags()
        self.world.step += 1
        self._updates += 1
        if self.looks_again and self._updates <= self.last_look:
            self._look(batch)
        if self._updates == 1:
            if self._compile and (first := self.first_share(batch)).size:
                refuse_written_buffers(self.model, first.inputs)
            self._compile_models()
        began = self._time() if self.loss_check.is_timed(self._updates) else None
        try:
            total, count = self.gradients(batch)
            if self.looks_again:
                self._say_what_the_loss_reads()
            self._move_parameters(batch.size, count)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                if self._compile and (why := not_compilable(error)) is not None:
                    raise why from None
                raise
            share = max(part.size for part in batch.parts)
            raise OutOfMemory(
                f"out of memory on {self.world.device} at step {self.world.step} with a share of {share} samples: "
                f"use a smaller batch_size, or accumulate={2 * self._accumulate}"
            ) from error
        except ValueError as error:
            if is_of_one_sample(error):
                raise RunError(self._one_sample(batch)) from error
            raise
        if began is not None:
            line = self.loss_check.timed(self._updates, self._time() - began, len(self.models()))
            if line is not None:
                self.loss_check.notes.append(line)
        if self.loss_check.notes:
            self.tell_once(dict.fromkeys(self.loss_check.notes) if self.world.is_first else ())
            self.loss_check.notes.clear()
        if self.world.size == 1:
            self.stopping = self.world.asked_to_stop()
        if self._on_accelerator:
            self._watch(total, count)
        return Result(total, count, batch.size)

    def _one_sample(self, batch: Batch) -> str:
        """What to do where BatchNorm was given one value for each channel, which has no variance."""
        said = f"step {self.world.step}: BatchNorm was given one sample only, of a batch of {batch.size}"
        whole = max(part.of for part in batch.parts)
        if self.replicas > 1 and whole > 1 and self.together and not self._synchronises:
            return f"{said}: sync_batchnorm=True lets it see those of all replicas; or choose another batch_size"
        of = "fewer micro-batches, or " if len(batch.parts) > 1 else ""
        return f"{said}: choose {of}a batch_size that leaves no batch of one sample"

    def _look(self, batch: Batch) -> None:
        """See what the model does in forward that a share can't keep, and say it.

        Raises:
            StrategyError: it writes its parameters, or scales gradients by frequencies in the batch.
        """
        parts = sum(1 for part in batch.parts if part.size)
        if self.replicas * parts <= 1 or not self.world.is_first:
            return
        part = self.first_share(batch)

        def total(outputs: Any, targets: Any, size: int) -> torch.Tensor:
            return self.loss.copied()(outputs, targets, size)[0]

        again = self._updates > 1
        with self.loss.outside.kept():
            self.seen = seen = look(self.model, part.inputs, part.size, targets=part.targets, total=total, again=again)
        if seen.writes is not None or seen.uncopied is not None:
            self.last_look = 1
        self.loss_check.of_batch = seen.of_batch
        with_dropout = any(map(drops, self.model.modules()))
        if self.replicas == 1:
            self.tell_once(seen.of_microbatches(with_dropout=with_dropout))
            return
        if seen.writes is not None:
            raise StrategyError(
                f'the model writes its parameter "{seen.writes}" in forward, differently on each replica',
                kind="state",
                fix="take single",
            )
        if seen.passes_on is not None and len(self.world.devices) > 1:
            raise StrategyError(
                f'forward writes tensors to "{seen.passes_on}", which is outside of the model, so that all replicas of '
                "this process would write to one",
                kind="state",
                fix="return them from forward, or use ddp, which has a process for each replica",
            )
        if seen.counts_words:
            raise StrategyError(
                "the model calls embedding with scale_grad_by_freq=True, which divides gradients by how often a word "
                "is in the batch, and each replica sees its local batch only",
                kind="mixing",
                fix="use single or mp, or scale_grad_by_freq=False",
            )
        self.tell_once(seen.of_replicas(with_dropout=with_dropout))

    def tell_once(self, notes: Iterable[Caveat | str]) -> None:
        """Say what hasn't been said."""
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                self.world.tell(Line.note(note))

    @property
    def looks_again(self) -> bool:
        """Whether what may change is looked at again in this update: the 1st, 2nd, 4th, 8th, ..., and the last."""
        return is_power_of_two(self._updates) or self.world.step == self.last_step

    def _compile_models(self) -> None:
        """In place, so that the modules keep their names."""
        if self._compile:
            compile_models(self.models(), self._compile)

    def first_share(self, batch: Batch) -> Part:
        """The first replica's share of the first micro-batch, on its device."""
        return self.placed(batch.parts[0])

    @abstractmethod
    def gradients(self, batch: Batch) -> tuple[Number, Number]:
        """Leave in every ``parameter.grad`` the gradient of total / batch.size over the global batch.

        A gradient that no device computed is None. Gives the total and the count of the global batch.
        """

    def _move_parameters(self, size: int, count: Number) -> None:
        """With gradients of total / size, where the loss counted so many items."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        self._weight(size, count)
        for observer in self.observers:
            observer.gradients_ready()
        self.clip()
        self._optimize()

    @phase("computing", "optimizer")
    def _optimize(self) -> None:
        if self._scaler is None:
            self.optimizer.step()
        else:  # a step whose gradients overflowed is left out, on every rank, and the scale halved
            self._scaler.step(self.optimizer)
            self._scaler.update()

    @phase("computing", "weight")
    def _weight(self, size: int, count: Number) -> None:
        """Make the gradients of total / size those of total / count."""
        if isinstance(count, torch.Tensor) and not self._on_accelerator:
            count = float(count)
        if isinstance(count, torch.Tensor):
            # A count of 0 is an error that `check` raises; until then it must not spoil the parameters.
            factor: Number = torch.where(count == 0, 0.0, size / count)
        elif count == 0:
            raise RunError(_no_items(self.world.step))
        elif count == size:
            return
        else:
            factor = size / count
        if not self._weighs:
            self._weighs = True
            if hooked_parameters(self.model) and self.replicas * self._accumulate == 1:
                self.tell_once(
                    ["hooks on parameters see gradients of total / samples, before they become those of the loss"]
                )
        grads = [p.grad for p in self._parameters if p.grad is not None]
        if not grads:
            return
        if all(grad.layout == torch.strided for grad in grads):
            torch._foreach_mul_(grads, factor)
        else:
            for grad in grads:
                grad.mul_(factor)

    @phase("computing", "clip")
    def clip(self) -> None:
        """Hold the norm of all gradients together under ``clip_norm``."""
        if self._clip_norm is not None:
            clip_gradients(self._parameters, self._clip_norm)

    @phase("computing", "forward and loss")
    def forward_loss(self, model: nn.Module, part: Part, where: str = "") -> tuple[torch.Tensor, Number]:
        """Total and count of one micro-batch's share under ``model``; the loss is probed where that is needed."""
        with self._precision.autocast():
            outputs = self.forward(model, part)
            total, count = self.loss_of(outputs, part, looks=self.looks_again)
        for observer in self.observers:
            observer.forwarded(where, part, outputs)
        if self.loss_check.wants(self._updates):
            self._check_loss(outputs, part, total, count)
        if self._waits:
            self._finite(model, part, outputs, total, where)
        if not total.requires_grad and self._parameters and not (isinstance(count, int) and count == 0):
            raise LossError(
                "the loss doesn't depend on any parameter: is the model's output detached, or this inside of no_grad?"
            )
        return total, count

    @phase("computing", "backward")
    def backward(self, total: torch.Tensor, factor: float) -> None:
        """Add the gradient of ``factor * total`` to every ``parameter.grad``."""
        # Autograd begins with the factor, which saves a small step two operators and a node of the graph.
        key = (factor, total.dtype, total.device)
        if key not in self._factors:
            self._factors[key] = torch.full((), factor, dtype=total.dtype, device=total.device)
        if total.requires_grad:
            if self._scaler is not None:
                total = self._scaler.scale(total)
            self._run_backward(total, self._factors[key])

    @observed(lambda observer, step, total, factor: observer.backward(total, sums=step.reduces))
    def _run_backward(self, total: torch.Tensor, factor: torch.Tensor) -> None:
        torch.autograd.backward(total, factor)

    @property
    def _waits(self) -> bool:
        """Whether values of this update may be waited for: those of an accelerator in the first one only."""
        return not self._on_accelerator or self._updates == 1

    def _check_loss(self, outputs: Any, part: Part, total: torch.Tensor, count: Number) -> None:
        """Hold the loss of a local batch to being additive; several threads may."""
        began = self._time() if self.loss_check.is_timed(self._updates) else None
        whole = Piece(total.detach(), count, part.size)
        wrong = self.loss_check(outputs, part.targets, whole, step=self.world.step, waits=self._waits)
        if wrong is not None:
            self._on_devices.note(_NOT_ADDITIVE, wrong, self.world.step)
        if began is not None:
            self.loss_check.spent(self._time() - began)

    def _time(self) -> float:
        """Seconds on a clock, when the accelerators have done what they were given."""
        for device in self._accelerators:
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    @property
    def _accelerators(self) -> tuple[torch.device, ...]:
        return tuple(d.torch for d in self.world.devices if d.type not in ("cpu", "meta"))

    def _say_what_the_loss_reads(self) -> None:
        """Say which outputs of the model, computed over a whole local batch, act in the loss."""
        for name in self.loss_check.reads if self.cuts_batch and self.world.is_first else ():
            if (caveat := self.seen.of_output(name)) is not None:
                self.tell_once([caveat])

    def _finite(self, model: nn.Module, part: Part, outputs: Any, total: torch.Tensor, where: str) -> None:
        value = total.item()
        if not math.isfinite(value):
            place = where or f"rank {self.world.rank} ({self.world.device})"
            why = why_not_finite(model, part, outputs, first=self._updates == 1)
            raise NonFiniteLoss(f"the loss became {value} at step {self.world.step} on {place}: {why}")

    def _watch(self, total: Number, count: Number) -> None:
        """On an accelerator, remember the first bad step there, and ask only now and then."""
        for what, value in ((_NOT_FINITE, total), (_NO_ITEMS, count)):
            if isinstance(value, torch.Tensor):
                wrong = value == 0 if what == _NO_ITEMS else ~torch.isfinite(value.detach())
                self._on_devices.note(what, wrong, self.world.step)
        if self.world.step % 50 == 0:
            self.check()
            self.stopping = self.stopping or bool(self._asked)

    def agree_to_stop(self, asked: Number) -> None:
        """Take note of how many ranks were asked to stop, by a number that is the same on all of them."""
        if isinstance(asked, torch.Tensor):  # on an accelerator, which is asked now and then
            self._asked = self._asked + asked
        else:
            self.stopping = asked > 0

    def check(self) -> None:
        """Raise for a step in which an accelerator found something wrong, where it has not been asked yet.

        Raises:
            NonFiniteLoss: the loss was not finite.
            RunError: it counted no item.
            LossError: it is not additive over samples.
        """
        what, step = self._on_devices.first() or ("", 0)
        if what == _NOT_FINITE:
            raise NonFiniteLoss(
                f"the loss became NaN or infinite at step {step} on rank {self.world.rank} ({self.world.device}): "
                "look at that batch, try a smaller learning rate, or clip_norm"
            )
        if what == _NO_ITEMS:
            raise RunError(_no_items(step))
        if what == _NOT_ADDITIVE:
            self.loss_check.refuse_late(step)

    def bytes_communicated(self) -> int | None:
        """Bytes that a device gives to the others in an update; None where that isn't known."""
        return None

    def over_ranks(self, total: Number, count: Number) -> tuple[Number, Number]:
        """The sums over all ranks of what this one's results of an epoch came to."""
        return total, count

    @observed(lambda observer, step, number: observer.microbatch(number))
    def begin_part(self, number: int) -> None:
        """Give micro-batch ``number`` a random stream of its own, so that it draws the same whenever it is computed."""
        if number and self._stream is not None:
            self._seed_all(mixed(*self._stream, number))

    # ---- state, under one-device names; all of these are called on every rank ----------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """As every evaluator's."""
        self.meet("step.evaluate(...)")
        with super().evaluating():
            yield

    def meet(self, what: str) -> None:
        """In a loop of a person's own, make sure that every rank calls ``what``.

        Raises:
            InputError: one doesn't.
        """
        if self.own_loop:
            self.world.meet(what, together=self.together)

    def save(self, folder: str | Path) -> None:
        """Write all that a loop needs to go on: weights and the optimizer's state, under one-device names.

        ``load`` takes it up under any strategy and number of devices. A crash leaves what was there before.

        Raises:
            SaveError: it can't be written.
            InputError: this isn't called on every rank.
        """
        self.meet("step.save(...)")
        state = self.state_dict()
        if self.world.is_first:
            Path(folder).mkdir(parents=True, exist_ok=True)
            save_state(Path(folder) / _STATE, {**state, "step": self.world.step})
        self.world.barrier()

    def load(self, folder: str | Path) -> None:
        """Take over what ``save`` wrote.

        Raises:
            FolderError: it isn't there, or can't be read.
            InputError: it is of another model, or this isn't called on every rank.
        """
        self.meet("step.load(...)")
        state = load_state(Path(folder) / _STATE)
        self.load_state_dict(state)
        self.world.step = state["step"]

    def state_dict(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ...}`` under the names of the one-device model.

        The optimizer's state is by parameter name too, so it does not depend on the order of its groups.

        Raises:
            InputError: this isn't called on every rank.
        """
        self.meet("step.state_dict()")
        self.share_buffers()
        scaler = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        optimizer = named_optimizer_state(self.optimizer, self.model)
        kept = self.model.state_dict()
        others = {name: b for name, b in self.model.named_buffers() if name not in kept}  # those not persistent
        attributes, lost = changed_attributes(self.model, self._attributes)
        self._say_what_is_lost(lost)
        beside = {"buffers": others, "attributes": attributes}
        return {"model": kept, "optimizer": optimizer, **scaler, **{name: of for name, of in beside.items() if of}}

    def _say_what_is_lost(self, attributes: Iterable[str]) -> None:
        """Say what the training has changed, and a resumed one would begin with anew."""
        now = self._outside.prints()
        lost = [f'the model\'s attribute "{name}"' for name in attributes]
        lost += (f'"{n}", which is outside of the model,' for n, was in self._outside_prints.items() if now[n] != was)
        lost += ["what the loss remembers"] if self.loss.state() != self._loss_state else []
        why = "changes in training, and no checkpoint keeps it: a resumed run begins anew with it"
        self.tell_once(Caveat("state", f"{what} {why}", "make it a buffer of the model") for what in lost)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, under any strategy and number of devices.

        Raises:
            InputError: the names or shapes are another model's.
        """
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise InputError(f"the saved model is another one: {str(error).splitlines()[-1].strip()}") from error
        self._load_buffers(state.get("buffers", {}))
        set_attributes(self.model, state.get("attributes", {}))
        load_named_optimizer_state(self.optimizer, self.model, state["optimizer"])
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])

    def _load_buffers(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over buffers that aren't persistent, which a model's own state leaves out."""
        for name, value in saved.items():
            around, _, own = name.rpartition(".")
            module = self.model.get_submodule(around)
            now = module._buffers.get(own)
            module._buffers[own] = value.to(value.device if now is None else now.device)


def _no_items(step: int) -> str:
    return f"step {step}: the loss counted 0 items in the batch: are all targets ignored?"
