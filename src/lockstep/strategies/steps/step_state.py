"""StepState: a model and its optimizer, which of its parameters are trained, and what is saved of
both.

What is saved has the names and the shapes of the single-device model under every strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.reading import load_earlier, load_newest
from lockstep.checkpoint.weights import is_extra_state, save_weights, sum_in_place_of, with_own
from lockstep.checkpoint.writer import Writer
from lockstep.errors import InputError, LossError, RunError, SaveError, StrategyError, counted
from lockstep.launch.events import Caveat, Line
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss
from lockstep.model.module_state import (
    are_alike,
    extra_state_of,
    note_on_attributes,
    plain_attributes_of,
    set_extra_state,
    set_flags,
)
from lockstep.model.optimizer import load_named_optimizer_state, named_optimizer_state, with_modes
from lockstep.recipe import Recipe
from lockstep.strategies.steps.evaluator import Evaluator
from lockstep.tensors.digest import digest
from lockstep.tensors.row_shard import RowShard

_NOT_OPTIMIZED = (
    "the optimizer wasn't given it: build it trainable, and freeze it later "
    "(on_start of a callback)"
)


class StepState(Evaluator):
    """A model and its optimizer under one strategy, on this process's devices.

    Attributes:
        model: the model under its one-device names.
        optimizer: the one optimizer of this process.
        world: this process's place among the ranks.
        left_out: names of parameters that no state has, with what it has in their place.
    """

    alike = True
    """Whether ``state_dict`` is the same on every rank; else it is rank 0's."""

    keeps_shards = False
    """Whether this rank has only some rows of parameters, which it writes to a checkpoint itself
    where it can.
    """

    own_loop = False
    """Whether a person's own loop calls it, perhaps on some of the ranks only."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, job: Recipe, world: World
    ) -> None:
        super().__init__(model, job, world)
        self.optimizer = optimizer
        self._with_modes = with_modes(optimizer)
        self._evaluates_weights = False
        self._scaler = self._precision.scaler
        self._optimized = self._in_optimizer()
        held = set(self._optimized)
        self._held = {name: p for name, p in model.named_parameters() if id(p) in held}
        self._frozen = {
            name: p
            for name, p in model.named_parameters()
            if not (p.requires_grad or id(p) in held)
        }
        self._trains_frozen = (
            job.step is not None
        )  # a step function may train them within an update
        self._find_trained()
        self._built_attributes: dict[str, str] | None = None
        self._saved_attributes: Mapping[str, str] = {}
        self._begins_anew: Caveat | None = None
        self._noted: set[Caveat | str] = set()
        self._part_names: tuple[str, ...] | None = None
        self.left_out, self._digests = dict[str, str](), dict[str, Any]()

    @property
    def together(self) -> bool:
        """Whether the ranks meet in each update."""
        return self.world.layout.together

    def _names_of_parts(self, loss: Loss) -> tuple[str, ...]:
        """The names of the parts of an update's loss: those that any rank had in the first update.

        Raises:
            LossError: it has another one, which the other ranks don't know of.
        """
        if not self.together:
            return tuple(loss.parts)
        if self._part_names is None:  # (one of PyTorch's has none, on any rank)
            every = (
                [list(loss.parts)]
                if self.loss.is_known
                else self.world.gather_objects(list(loss.parts))
            )
            self._part_names = tuple(dict.fromkeys(itertools.chain(*every)))
        if new := [name for name in loss.parts if name not in self._part_names]:
            raise LossError(
                f'{self.loss.name}: part "{new[0]}" is new in step {self.world.step}, and no '
                "batch had it before",
                fix="give each part from the first update on, as (0.0, 0) where a batch has "
                "nothing of it",
            )
        return self._part_names

    def _find_trained(self) -> None:
        """The parameters that are trained in an update: those of the optimizer that aren't
        frozen.
        """
        self._flags = [p.requires_grad for p in self._held.values()]
        self._names = [
            name for name, p in self._held.items() if p.requires_grad or self._trains_frozen
        ]
        self._parameters = [self._held[name] for name in self._names]

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
                how = (
                    "give it all from the beginning, and freeze and train them with "
                    "requires_grad_()"
                )
            raise StrategyError(
                f"the optimizer has other parameters than when the step was made: {how}"
            )
        flags = [p.requires_grad for p in self._held.values()]
        if flags != self._flags:
            changed = zip(self._held, flags, self._flags, strict=True)
            self._follow_flags(next(name for name, now, before in changed if now != before))
        thawed = next((name for name, p in self._frozen.items() if p.requires_grad), None)
        if thawed is not None and self.world.is_first:
            self.tell_once(
                [f'"{thawed}" requires gradients now and isn\'t trained, since {_NOT_OPTIMIZED}']
            )

    def _follow_flags(self, name: str) -> None:
        """A person has frozen parameters of the optimizer, or trains frozen ones from now on;
        ``name`` is the first.
        """
        for p in self._parameters:
            p.grad = None
        self._find_trained()

    def tell_once(self, notes: Iterable[Caveat | str]) -> None:
        """Say what hasn't been said."""
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                self.world.tell(Line.note(note))

    def tell_of_loss(self) -> None:
        """Log what was noted of the loss on this rank."""
        if self.world.is_first:
            self.tell_once(dict.fromkeys(self.loss_check.notes))
            self.loss_check.notes.clear()

    # ---- state, under one-device names; all of these are called on every rank --------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """As every evaluator's."""
        self.meet("step.evaluate(...)")
        self.after_events()
        with self.evaluated_weights(), super().evaluating():
            yield

    def _train_weights(self) -> None:
        """Put an optimizer with ``train()`` and ``eval()`` in training mode."""
        for optimizer in self._with_modes:
            optimizer.train()

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """With the weights of the ``eval()`` of an optimizer that has one; what is written
        meanwhile stays.

        ``train()`` gives other parameters their values back but for rounding. They get the same
        bits, so that neither evaluations nor callbacks change a result, and a resumed run goes on
        as one that was not interrupted.
        """
        if not self._with_modes or self._evaluates_weights:
            yield
            return
        before = {p: p.detach().clone() for p in self.parts().values()}
        for optimizer in self._with_modes:
            optimizer.eval()
        # None where a person has called eval() already, whose train() it is then.
        versions = {p: p._version for p, value in before.items() if not torch.equal(p, value)}
        self._evaluates_weights = True
        try:
            yield
        finally:
            self._evaluates_weights = False
            unwritten = [p for p, version in versions.items() if p._version == version]
            if versions:
                self._train_weights()
            with torch.no_grad():
                for p in unwritten:
                    p.copy_(before[p])

    def after_events(self) -> None:
        """Look for what a person's functions, which run on rank 0 only, may have changed."""

    def meet(self, what: str) -> None:
        """In a loop of a person's own, make sure that every rank calls ``what``.

        Raises:
            InputError: one doesn't.
        """
        if self.own_loop:
            self.world.meet(what, together=self.together)

    def save(self, folder: str | Path) -> None:
        """Write all that a loop needs to go on: weights and the optimizer's state, under one-device
        names.

        It is a checkpoint (`lockstep.checkpoint`), which ``load`` takes up under any strategy and
        number of devices. A crash leaves what was there before.

        Raises:
            SaveError: it can't be written.
            InputError: this isn't called on every rank.
        """
        self.meet("step.save(...)")
        writer = Writer(Path(folder), self.world, 1, alike=self.alike)
        error: SaveError | None = None
        try:
            state = self.state_dict(whole=not (self.keeps_shards and writer.is_shared))
            writer.save(self.number, {**state, "step": self.number}, {"step": self.number})
            writer.finish()
        except SaveError as raised:
            error = raised
        for one in self.world.gather_objects(error):
            if one is not None:
                raise one

    def load(self, folder: str | Path) -> None:
        """Take over what ``save`` wrote.

        Raises:
            FolderError: it isn't there, or can't be read.
            InputError: it is of another model, or this isn't called on every rank.
        """
        self.meet("step.load(...)")
        path = Path(folder)
        if not CheckpointFolder(path).steps() and (path / "state.pt").is_file():
            state = load_earlier(path / "state.pt")
        else:
            state = load_newest(path, self.world, lambda said: self.tell_once([said]), self.split)
        self.load_state_dict(state)
        self.world.step = state["step"]

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ...}`` under the names of the one-device model.

        The optimizer's state is by parameter name too, so it does not depend on the order of its
        groups.

        Args:
            whole: else, of a tensor of which ranks have some rows each, this rank's (`RowShard`).

        Raises:
            InputError: this isn't called on every rank.
        """
        if self.own_loop:
            self.meet("step.state_dict()")
            self.after_events()
        self._share_buffers()
        scaler = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        self._check_left_out()
        optimizer = self.optimizer_state(whole=whole)
        extra = self.extra_states()
        kept = self._with_alike(extra, whole=whole)
        not_persistent = {name: b for name, b in self.model.named_buffers() if name not in kept}
        beside = {
            "buffers": not_persistent,
            "extra_state": [] if len(extra) > 1 and are_alike(extra) else extra,
            "changed_attributes": self._changed_attributes(),
        }
        return {
            "model": kept,
            "optimizer": optimizer,
            **scaler,
            **{name: of for name, of in beside.items() if of},
        }

    def extra_states(self) -> list[dict[str, Any]]:
        """Gather the extra state of every replica, in the order of ranks; [] where there is
        none.
        """
        mine = [extra_state_of(model) for model in self.models()]
        return list(itertools.chain(*self.world.gather_objects(mine))) if mine[0] else []

    def weights_for_file(self, *, whole: bool = True) -> dict[str, Any]:
        """Give the model's state dict without extra state in which replicas differ."""
        return self._with_alike(self.extra_states(), whole=whole)

    def _with_alike(self, extra: Sequence[Mapping[str, Any]], *, whole: bool) -> dict[str, Any]:
        weights = {**self.weights(whole=whole), **self.left_out}
        if not extra:
            return weights
        common = extra[0] if are_alike(extra) else {}
        others = {name: value for name, value in weights.items() if not is_extra_state(name)}
        return {**others, **common}

    def _changed_attributes(self) -> dict[str, str]:
        """Describe the attributes that have changed since the training began in this process."""
        if self._built_attributes is None:  # no update was made
            return dict(self._saved_attributes)
        built, now = self._built_attributes, plain_attributes_of(self.model)
        return {name: text for name, text in now.items() if built.get(name) != text}

    def leave_out_frozen(self) -> None:
        """From now on states have no parameter that is frozen now: whoever loads one builds it
        again.
        """
        frozen = {
            n: p
            for n, p in self.model.named_parameters(remove_duplicate=False)
            if not p.requires_grad
        }
        own = self.weights(whole=False) if frozen else {}
        self.left_out = {name: self._sum_of(name, own[name]) for name in frozen}
        self._digests = {name: _digest(own[name]) for name in frozen}

    def _sum_of(self, name: str, part: torch.Tensor | RowShard) -> str:
        return sum_in_place_of(
            self.joined(name, part.local) if isinstance(part, RowShard) else part
        )

    def _check_left_out(self) -> None:
        """Look whether those are still as the job built them.

        Raises:
            RunError: one isn't, and would be lost.
        """
        own = self.weights(whole=False) if self.left_out else {}
        for name in self.left_out:
            p, is_written = (
                self.model.get_parameter(name),
                _digest(own[name]) != self._digests[name],
            )
            if p.requires_grad or is_written:
                raise RunError(
                    f'save_frozen: "{name}" was frozen when the training began, so that it is not '
                    "saved, and "
                    f"{'has other values' if is_written else 'is trained'} now: leave save_frozen "
                    "out"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, under any strategy and number of devices.

        Raises:
            InputError: the names or shapes are another model's.
        """
        extra = self._extra_state_in(state)
        own = extra_state_of(self.model) if extra[0] == {} else {}
        weights = {**own, **state["model"], **extra[0]}
        if any(isinstance(value, str) for value in weights.values()):
            weights = with_own(weights, self.weights(whole=False), "the checkpoint", self._sum_of)
        try:
            self.take_weights(weights)
        except RuntimeError as error:
            raise InputError(
                f"the saved model is another one: {str(error).splitlines()[-1].strip()}"
            ) from error
        for model, its in zip(self.models()[1:], extra[1:], strict=True):
            set_extra_state(model, its)
        self._take_buffers(state.get("buffers", {}))
        earlier = dict.fromkeys(state.get("attributes", {}), "")  # (earlier versions kept them)
        self._saved_attributes = state.get("changed_attributes", earlier)
        if self.own_loop:
            self.tell_what_is_not_kept()
        self.take_optimizer_state(state["optimizer"])
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])

    def _extra_state_in(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The extra state in ``state`` for each replica of this process."""
        models = len(self.models())
        replicas = self.world.size * models
        saved = state.get("extra_state")
        self._begins_anew = None
        if saved is None:  # it is the same for all
            weights = state["model"]
            return [{name: its for name, its in weights.items() if is_extra_state(name)}] * models
        if len(saved) == replicas:
            first = self.world.rank * models
            return list(saved[first : first + models])
        name, saved_by = next(iter(saved[0])), counted(len(saved), "replica")
        self._begins_anew = Caveat(
            "state",
            f'extra state "{name}" was saved by {saved_by} and this training has {replicas}, so '
            "it begins anew",
            "resume on as many devices, or keep what does not depend on the samples in a buffer",
        )
        return [{}] * models

    def _take_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Take over the buffers that are not persistent."""
        for name, buffer in buffers.items():
            owner, _, own = name.rpartition(".")
            module = self.model.get_submodule(owner)
            now = getattr(module, own, None)
            setattr(module, own, buffer if now is None else buffer.to(now.device))

    def _begin_training(self) -> None:
        """Note the attributes before the first update; what was done to them until then is done
        again.
        """
        self._built_attributes = plain_attributes_of(self.model)

    def tell_what_is_not_kept(self) -> None:
        """Take over what was frozen, and log what the loaded checkpoint does not have; callbacks
        have begun.
        """
        set_flags(self.model, self._saved_attributes)
        now = plain_attributes_of(self.model) if self._saved_attributes else {}
        lost = [name for name, text in self._saved_attributes.items() if now.get(name) != text]
        notes = [self._begins_anew] if self._begins_anew is not None else []
        notes += [note_on_attributes(lost)] if lost else []
        self.tell_once(notes if self.world.is_first else [])

    # ---- what a strategy does in another way whose ranks hold shards; all of these are called on e

    def weights(self, *, whole: bool = True) -> dict[str, Any]:
        """The model's state dict; ``whole`` as in ``state_dict``."""
        del whole
        weights: dict[str, Any] = self.model.state_dict()
        return weights

    def write_weights(self, path: Path) -> None:
        """Write the model's state dict to a file of the first rank."""
        self._share_buffers()
        self._check_left_out()
        with self.evaluated_weights():
            weights = self.weights_for_file(whole=not self.keeps_shards)
            save_weights(path, weights, joined=self.joined, writes=self.world.is_first)

    def split(self, name: str, shape: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
        """How many rows of a tensor of a checkpoint each rank has, and this rank; None where
        each has all of it.
        """
        del name, shape
        return None

    def take_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over what ``weights`` gave."""
        self.model.load_state_dict(weights)

    def optimizer_state(self, *, whole: bool = True) -> dict[str, Any]:
        """The optimizer's state by parameter name; ``whole`` as in ``state_dict``."""
        del whole
        return named_optimizer_state(self.optimizer, self.model)

    def take_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Take over what ``optimizer_state`` gave."""
        load_named_optimizer_state(self.optimizer, self.model, saved)

    def parts(self) -> dict[str, torch.Tensor]:
        """By name, what this process has of each parameter. (Not called on every rank.)"""
        return dict(self.model.named_parameters())

    def part_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What this process has of a tensor of the shape of a parameter, or of a buffer."""
        del name
        return whole

    def joined(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor that the ranks have these parts of."""
        del name
        return part

    def rows(self, name: str, part: torch.Tensor) -> torch.Tensor | RowShard:
        """That tensor, or the rows of it that this rank has."""
        del name
        return part

    def gathered_parameters(self) -> dict[str, torch.Tensor]:
        """The whole parameters by name."""
        return dict(self.model.named_parameters())

    def gathered_gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradients, as far as there are any, by the names of their parameters."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def _digest(part: torch.Tensor | RowShard) -> Any:
    return digest(part.local if isinstance(part, RowShard) else part)
