"""StepState: a model and its optimizer, which of its parameters are trained, and what is saved of
both.

What is saved has the names and the shapes of the single-device model under every strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.reading import load_earlier, load_newest
from lockstep.checkpoint.writer import Writer
from lockstep.errors import LossError, SaveError, StrategyError
from lockstep.launch.events import Caveat, Line
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss
from lockstep.model.optimizer import with_modes
from lockstep.recipe import Recipe
from lockstep.strategies.steps.evaluator import Evaluator
from lockstep.strategies.steps.parameter_layout import ParameterLayout
from lockstep.strategies.steps.saved_state import SavedState

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
        layout: what each rank has of the parameters.
        saved: gives and takes the state of both.
        scaler: of the gradients of fp16; None for other formats.
    """

    alike = True
    """Whether ``state_dict`` is the same on every rank; else it is rank 0's."""

    own_loop = False
    """Whether a person's own loop calls it, perhaps on some of the ranks only."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, job: Recipe, world: World
    ) -> None:
        super().__init__(model, job, world)
        self.optimizer = optimizer
        self.layout = ParameterLayout(model, optimizer)
        self._with_modes = with_modes(optimizer)
        self._evaluates_weights = False
        self.scaler = self._precision.scaler
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
        self._noted: set[Caveat | str] = set()
        self._part_names: tuple[str, ...] | None = None
        self.saved = SavedState(self)

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
        before = {p: p.detach().clone() for p in self.layout.parts().values()}
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
            state = self.state_dict(whole=not (self.layout.keeps_shards and writer.is_shared))
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
            state = load_newest(
                path, self.world, lambda said: self.tell_once([said]), self.layout.split
            )
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
        self.share_buffers()
        return self.saved.state_dict(whole=whole)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, under any strategy and number of devices.

        Raises:
            InputError: the names or shapes are another model's.
        """
        self.saved.load_state_dict(state)
        if self.own_loop:
            self.saved.note_what_is_not_kept()
