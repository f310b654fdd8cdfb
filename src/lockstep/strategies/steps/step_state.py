"""StepState: a model and its optimizer, the parameters that are trained, and the saved state.

Saved state has the names and the shapes of the single-device model under every strategy.
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
        together: whether the ranks meet in each update.
    """

    alike = True
    """Whether ``state_dict`` is the same on every rank; otherwise rank 0's is saved."""

    own_loop = False
    """Whether a person's own loop calls this step, perhaps on some of the ranks only."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, job: Recipe, world: World
    ) -> None:
        super().__init__(model, job, world)
        self.optimizer = optimizer
        self.together = world.layout.together
        self.layout = ParameterLayout(model, optimizer)
        self._with_modes = with_modes(optimizer)
        self._evaluates_weights = False
        self.scaler = self._precision.scaler
        self._optimized = self._in_optimizer()
        held = set(self._optimized)
        self._held: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        for name, p in model.named_parameters():
            if id(p) in held:
                self._held[name] = p
            elif not p.requires_grad:
                self._frozen[name] = p
        # A step function may train frozen parameters within an update.
        self._trains_frozen = job.step is not None
        self._find_trained()
        self._noted: set[Caveat | str] = set()
        self._part_names: tuple[str, ...] | None = None
        self.saved = SavedState(self)

    def _names_of_parts(self, loss: Loss) -> tuple[str, ...]:
        """Give the names of the parts that the loss of any rank had in the first update.

        Raises:
            LossError: ``loss`` has another part, which the other ranks don't have.
        """
        if not self.together:
            return tuple(loss.parts)
        if self._part_names is None:
            names = list(loss.parts)
            if not self.loss.is_known:  # PyTorch's losses have no parts, on any rank
                names = list(itertools.chain(*self.world.gather_objects(names)))
            self._part_names = tuple(dict.fromkeys(names))
        new = sorted(set(loss.parts).difference(self._part_names))
        if new:
            raise LossError(
                f'{self.loss.name}: part "{new[0]}" is new in step {self.world.step}, and no '
                "batch had it before",
                fix="give each part from the first update on, as (0.0, 0) where a batch has "
                "nothing of it",
            )
        return self._part_names

    def _find_trained(self) -> None:
        """Find the parameters that are trained: those of the optimizer that aren't frozen."""
        self._flags = [p.requires_grad for p in self._held.values()]
        self._names = []
        for name, p in self._held.items():
            if p.requires_grad or self._trains_frozen:
                self._names.append(name)
        self._parameters = [self._held[name] for name in self._names]

    def _in_optimizer(self) -> list[int]:
        """List the ids of the optimizer's parameters."""
        return [id(p) for group in self.optimizer.param_groups for p in group["params"]]

    def _look_at_flags(self) -> None:
        """Follow parameters that were frozen or thawed.

        Raises:
            StrategyError: the optimizer was given other parameters.
        """
        if self._in_optimizer() != self._optimized:
            how = "give it all from the beginning, and freeze and train them with requires_grad_()"
            if self.own_loop:
                how = "call lockstep.parallelize again, with the model as it is now"
            raise StrategyError(
                f"the optimizer has other parameters than when the step was made: {how}"
            )
        flags = [p.requires_grad for p in self._held.values()]
        if flags != self._flags:
            changed = zip(self._held, flags, self._flags, strict=True)
            self._follow_flags(next(name for name, now, before in changed if now != before))
        for name, p in self._frozen.items():
            if p.requires_grad and self.world.is_first:
                self.tell_once(
                    [f'"{name}" requires gradients now and isn\'t trained, since {_NOT_OPTIMIZED}']
                )
                break

    def _follow_flags(self, name: str) -> None:
        """Follow a person who has frozen or thawed parameters of the optimizer.

        Args:
            name: of the first of them.
        """
        for p in self._parameters:
            p.grad = None
        self._find_trained()

    def tell_once(self, notes: Iterable[Caveat | str]) -> None:
        """Log each note that was not logged before."""
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                self.world.tell(Line.note(note))

    def tell_of_loss(self) -> None:
        """Log what the check of the loss has noted on this rank."""
        notes = self.loss_check.notes
        if notes:
            self.tell_once(notes)
            notes.clear()

    # ---- state, under one-device names; all of these are called on every rank --------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate with the weights that the optimizer has for evaluation; all ranks call this."""
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
        """Give the model the weights of the optimizer's ``eval()`` for a while, if it has one.

        What is written to parameters meanwhile stays. ``train()`` gives the others their values
        back but for rounding, so they are given the same bits: neither evaluations nor callbacks
        change a result, and a resumed run goes on as one that was not interrupted.
        """
        if not self._with_modes or self._evaluates_weights:
            yield
            return
        before = {p: p.detach().clone() for p in self.layout.parts().values()}
        for optimizer in self._with_modes:
            optimizer.eval()
        # Nothing changes where a person has called eval(), who then calls train() too.
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
        """Follow what a person's functions, which run on rank 0 only, may have changed."""

    def meet(self, what: str) -> None:
        """In a loop of a person's own, make sure that every rank calls ``what``.

        Raises:
            InputError: a rank doesn't.
        """
        if self.own_loop:
            self.world.meet(what, together=self.together)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint of weights and the optimizer's state, under one-device names.

        ``load`` takes it up under any strategy and number of devices. A crash leaves what was there
        before.

        Raises:
            SaveError: the checkpoint can't be written.
            InputError: some ranks don't call this.
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
        """Take over the checkpoint that ``save`` wrote.

        Raises:
            FolderError: there is no checkpoint, or it can't be read.
            InputError: the checkpoint is of another model, or some ranks don't call this.
        """
        self.meet("step.load(...)")
        path = Path(folder)
        if not CheckpointFolder(path).steps() and (path / "state.pt").is_file():
            state = load_earlier(path / "state.pt")
        else:
            state = load_newest(
                path, self.world, lambda note: self.tell_once([note]), self.layout.split
            )
        self.load_state_dict(state)
        self.world.step = state["step"]

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Give ``{"model": ..., "optimizer": ...}`` under the names of the one-device model.

        The optimizer's state is by parameter name too, so it does not depend on the order of
        groups.

        Args:
            whole: False gives this rank's rows (`RowShard`) of tensors that ranks share out.

        Raises:
            InputError: some ranks don't call this.
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
