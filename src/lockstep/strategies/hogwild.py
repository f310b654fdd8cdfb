"""``hogwild``: ranks as processes on one set of weights in shared memory, none of which ever waits
for another.

Each rank makes an update of its own from its share of each global batch::

    rank 0    share of batch 0 ──> update    share of batch 1 ──> update    share of batch 2 ──> update ...
                                     │ ▲                            │ ▲
    weights  ════════════════════════▼═│════════════════════════════▼═│═══════════════════════════════════
                                   ▲   │                          ▲   │
    rank 1    share of batch 0 ────┴───┘   share of batch 1 ──────┴───┘   (as fast as it can)

An update takes the mean gradient over the share, and the share's part of the learning rate. So the
N updates of a global batch together are the one that a single device makes, but for this: each rank
computes at the weights as it finds them, and where two write one weight at the same time, one of
the writes may be lost. That is rare and small where gradients are sparse (Niu et al., 2011,
https://arxiv.org/abs/1106.5730), and there is no sum to wait for.

**The weights are shared; the optimizer's state is not**: each rank has its own, as in PyTorch's own
example. A step counter or a moment that several ranks read, decay and write would be torn, and
would decay N times as often as on one device. A rank's own counts global batches, at the pace of
one device's: Adam's counter and its moments mean what they mean there, and momentum that no other
rank moves adds nothing to what waiting for nobody adds by itself (Mitliagkas et al., 2016,
https://arxiv.org/abs/1605.09774). The price: N states in memory, as under ``ddp``, each of them an
estimate from 1 / N of the samples. What is saved is their mean, weighted by samples.

Ranks meet at the end of an epoch only, for evaluating and saving weights that nobody writes
meanwhile. (A stream, and a loop of one's own that gives a step inputs rather than batches of
``lockstep.batches``, make them meet at each step.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lockstep.data import Batch
from lockstep.errors import RunError, StrategyError
from lockstep.job import Job
from lockstep.launch.events import Caveat
from lockstep.launch.layout import Layout
from lockstep.launch.world import World
from lockstep.model.build import buffers_of, build_model
from lockstep.model.losses.loss import Loss
from lockstep.model.modes import has_own_train
from lockstep.model.optimizer import build_optimizer, has_own_state, with_modes
from lockstep.recipe import Recipe
from lockstep.strategies.rank_tensors import take_first
from lockstep.strategies.shared_weights import SharedWeights
from lockstep.strategies.single import SingleStep
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result, added
from lockstep.strategies.strategy import Strategy
from lockstep.tensors.common_memory import refuse_common_memory, tensors_of


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Shared weights, no synchronisation."""

    name: ClassVar[str] = "hogwild"
    runs_functions: ClassVar[str] = (
        "ranks don't wait for one another, so each would see the other parts half moved"
    )
    summary: ClassVar[str] = (
        "a process per CPU device, all updating the same weights in shared memory without waiting"
    )
    good_for: ClassVar[str] = (
        "large embeddings with sparse gradients, on CPU; results differ from single-device training"
    )
    exact: ClassVar[Literal[True] | str] = (
        "hogwild is not exact: ranks write the same weights without waiting for one another, so "
        "that no two runs end "
        "with the same results; ddp keeps those of one device"
    )

    def layout(self, devices: int) -> Layout:
        """A local batch and a process for each device; nobody waits."""
        return Layout({"data": devices}, together=False)

    def build(self, job: Recipe, world: World) -> Step:
        """Build the same model on every rank, and move its weights to shared memory.

        Raises:
            StrategyError: the weights can't be shared, or a setting would make the ranks wait for
                one another.
        """
        self.refuse_other_processes(world)
        if not world.device.is_slot:
            raise StrategyError(
                f"hogwild shares weights in the memory of the CPU, and this is {world.device}: "
                "take ddp, or 2xcpu"
            )
        if world.nodes > 1:
            raise StrategyError(
                f"hogwild shares the memory of one machine, and these are {world.nodes}: take ddp"
            )
        if job.sync_batchnorm and world.size > 1:
            raise StrategyError(
                "sync_batchnorm makes ranks wait for one another, hogwild doesn't: choose one of "
                "them"
            )
        if job.precision == "fp16":
            raise StrategyError("hogwild: fp16 scales the loss, on each rank otherwise: take bf16")
        model = build_model(job, world)
        self.refuse(model, world.size)
        if world.size > 1:
            refuse_common_memory(tensors_of(model), self.name)
        shared = SharedWeights(model, world) if world.size > 1 else None
        optimizer = build_optimizer(job, model)
        if world.size > 1:
            _refuse_unscaled(optimizer)
        return HogwildStep(model, optimizer, job, world, shared)

    def caveats(self, job: Recipe, model: nn.Module, replicas: int) -> list[Caveat]:
        """As any strategy's, and what else follows the local batch."""
        found = [
            dataclasses.replace(one, fix="") if one.kind == "batchnorm" else one
            for one in super().caveats(job, model, replicas)
        ]
        if replicas > 1 and job.clip_norm is not None:
            text = (
                "clip_norm clips the gradient of each rank's local batch, not that of the "
                "global batch"
            )
            found.append(Caveat("clipping", text))
        scheduler = (
            job.lr_scheduler if isinstance(job, Job) and job.lr_scheduler_every == "step" else None
        )
        if replicas > 1 and scheduler is not None:
            text = (
                "a scheduler that reads the loss of a step (ReduceLROnPlateau) sees that of "
                "each rank's local batch"
            )
            found.append(Caveat("scheduler", text))
        if replicas > 1 and (own := [m for m in model.modules() if has_own_train(m)]):
            text = (
                f"{type(own[0]).__name__} has a train() of its own, which each rank calls: it "
                "mustn't write weights"
            )
            found.append(Caveat("state", text, "take ddp"))
        return found


def _refuse_unscaled(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose steps a smaller learning rate doesn't make smaller, or that ranks
    can't share.

    Raises:
        StrategyError: it is one of PyTorch's that do so, has ``train()`` and ``eval()``, or a state
            of its own.
    """
    why = {
        torch.optim.Rprop: "only begins at it",
        torch.optim.Adafactor: "takes 1 / sqrt(step) where that is smaller",
    }
    for kind, reason in why.items():
        if isinstance(optimizer, kind):
            raise StrategyError(
                f"hogwild gives each rank its part of the learning rate, and {kind.__name__} "
                f"{reason}, so that each "
                "rank would make a whole step: take another optimizer, or ddp"
            )
    if with_modes(optimizer):
        raise StrategyError(
            f"hogwild: {type(optimizer).__name__} has train() and eval(), by which each rank "
            "would write the weights "
            "that all ranks share: use ddp"
        )
    if has_own_state(optimizer):
        raise StrategyError(
            "hogwild saves the mean of the ranks' optimizer states, which "
            f"{type(optimizer).__name__} has in a "
            "state_dict() of its own: use ddp"
        )


class HogwildStep(SingleStep):
    """One rank: its own model object and optimizer, on weights that are everybody's."""

    alike = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        shared: SharedWeights | None,
    ) -> None:
        super().__init__(model, optimizer, job, world)
        self._shared = shared
        self._samples = 0

    def _follow_flags(self, name: str) -> None:
        super()._follow_flags(name)
        if self._shared is not None and (own := [n for n in self._names if n not in self._shared]):
            raise RunError(
                f'parameter "{own[0]}" was frozen when weights were shared: hogwild can\'t train '
                "it from now on"
            )

    def bytes_communicated(self) -> None:
        """That depends on which core has a weight in its cache."""

    def backward(self, inputs: Any, targets: Any = None) -> Result:
        """Refused.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            "hogwild: a rank takes its part of the learning rate by the size of the global batch, "
            "which isn't known "
            "before step.update(): call step(inputs, targets), with accumulate= of "
            "lockstep.parallelize, or take ddp"
        )

    def update(self, batch: Batch | None = None) -> Result:
        """One update from this rank's share; total and count are those of the share."""
        if batch is None:
            return super().update()
        self.stopping = self.world.asked_to_stop()  # the others needn't have heard of it yet
        share = sum(part.size for part in batch.parts)
        self._samples += share
        if not share:
            self.world.step += 1
            return Result(0.0, 0, batch.size)  # nothing of it is this rank's
        with self._part_of_rate(share / batch.size):
            result = super().update(dataclasses.replace(batch, size=share))
        result.size = batch.size
        return result

    @contextmanager
    def _part_of_rate(self, part: float) -> Iterator[None]:
        """The learning rates times ``part`` for a while.

        Not the gradients: Adam would take no notice of that, and weight decay would come N times.
        """
        groups = self.optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        if part != 1.0 and None in rates:
            name = type(self.optimizer).__name__
            raise StrategyError(
                f"hogwild gives each rank its part of the learning rate, and {name} has none: "
                "take ddp"
            )
        try:
            for group, rate in zip(groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate * part
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate

    def over_ranks(self, loss: Loss) -> Loss:
        """The sums over all ranks, each of which has come to the end of its epoch then."""
        return added(self.world.gather_objects(loss))

    # ---- where all ranks meet --------------------------------------------------------------------

    def share_buffers(self) -> None:
        """Wait until nobody updates any more, and give every rank rank 0's buffers.

        Raises:
            RunError: a weight is no longer shared.
        """
        if self._shared is not None:
            self._shared.check()
            every = self.world.gather_objects(self._names)  # which waits for all
            for rank, names in enumerate(every):
                if changed := sorted(set(names) ^ set(every[0])):
                    raise RunError(
                        f'parameter "{changed[0]}" is frozen on one of rank 0 and rank {rank} '
                        "only: change the model "
                        "on every rank alike (on_event runs on rank 0 only, callbacks on all)"
                    )
            take_first(self.world, buffers_of(self.model))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """As any step's, on weights that nobody writes before all have done."""
        with super().evaluating():
            yield
        self.world.barrier()

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """As any step's, with copies of the weights, and the mean of the ranks' optimizer
        states.
        """
        state = super().state_dict(whole=whole)
        if self._shared is not None:
            state["optimizer"] = {
                **state["optimizer"],
                "state": self._mean_state(state["optimizer"]["state"]),
            }
            copies: dict[str, Any] = {}
            for name, value in state["model"].items() if self.world.is_first else ():
                copies[name] = value.clone() if isinstance(value, torch.Tensor) else value
            state["model"] = copies if self.world.is_first else state["model"]
            self.world.barrier()  # only now may others go on
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As any step's: all ranks write the same weights, and begin with the same optimizer
        state.
        """
        super().load_state_dict(state)
        self._samples = 0
        self.world.barrier()

    def _mean_state(self, mine: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The ranks' optimizer states as one: floats are averaged, by the samples that each has
        seen.
        """
        forms = self.world.gather_objects(
            {
                name: {key: _form(value) for key, value in values.items()}
                for name, values in mine.items()
            }
        )
        seen = self.world.gather_objects(self._samples)
        parts = [n / sum(seen) if sum(seen) else 1 / len(seen) for n in seen]
        found: dict[str, dict[str, Any]] = {}
        for name in self._names:  # in an order that all ranks know
            keys = {key: form for of in forms for key, form in of.get(name, {}).items()}
            for key in sorted(keys):
                own = mine.get(name, {}).get(key)
                found.setdefault(name, {})[key] = self._mean(key, own, keys[key], parts)
        return found

    def _mean(self, key: str, own: Any, form: Any, parts: list[float]) -> Any:
        if (
            form is None or key == "step"
        ):  # of what isn't a tensor of floats, that of the rank that is furthest
            every = [value for value in self.world.gather_objects(own) if value is not None]
            return max(every, key=float) if key == "step" else every[0]
        shape, dtype = form
        value = (
            torch.zeros(shape, dtype=dtype)
            if own is None
            else (own.to_dense() if own.is_sparse else own)
        )
        return self.world.all_reduce(value * parts[self.world.rank])


def _form(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and format of a tensor of floats; None for anything else."""
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return tuple(value.shape), value.dtype
    return None
