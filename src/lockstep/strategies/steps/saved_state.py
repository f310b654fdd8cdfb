"""SavedState: the state of a model and its optimizer that is saved.

It has the names and the shapes of the single-device model under every strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.checkpoint.reading import load_newest
from lockstep.checkpoint.weights import is_extra_state, save_weights, with_own
from lockstep.checkpoint.writer import Writer
from lockstep.errors import InputError, SaveError, counted
from lockstep.model.module_state import (
    are_alike,
    extra_state_of,
    flags_of,
    set_extra_state,
    set_flags,
)
from lockstep.run.events import Caveat
from lockstep.strategies.steps.left_out_parameters import LeftOutParameters

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step


class SavedState:
    """Gives and takes the state of one step. Every rank calls each method.

    Args:
        step: the step.

    Attributes:
        frozen: the frozen parameters that states leave out.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.frozen = LeftOutParameters(step)
        self._built_flags: dict[str, str] | None = None
        self._saved_flags: Mapping[str, str] = {}
        self._not_kept: list[Caveat] = []

    def begin_training(self) -> None:
        """Note what is frozen, and the modes of modules, before the first update.

        What changed them until then will change them again in a resumed training.
        """
        self._built_flags = flags_of(self._step.model)

    # ---- the state that is given -----------------------------------------------------------------

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Give ``{"model": ..., "optimizer": ...}`` under the names of the one-device model.

        Args:
            whole: False gives this rank's rows (`RowShard`) of tensors that ranks share out.
        """
        step = self._step
        self.frozen.check()
        extra = self._extra_states()
        weights = self._weights(extra, whole=whole)
        state: dict[str, Any] = {"model": weights}
        state["optimizer"] = step.layout.optimizer_state(whole=whole)
        if step.scaler is not None:
            state["scaler"] = step.scaler.state_dict()
        named = step.model.named_buffers()
        buffers = {name: buffer for name, buffer in named if name not in weights}
        if buffers:
            state["buffers"] = buffers
        if len(extra) == 1 or (extra and not are_alike(extra)):
            state["extra_state"] = extra
        changed = self._changed_flags()
        if changed:
            state["changed_attributes"] = changed
        return state

    def weights_for_file(self, *, whole: bool = True) -> dict[str, Any]:
        """Give the model's state dict without extra state in which replicas differ."""
        return self._weights(self._extra_states(), whole=whole)

    def write_weights(self, path: Path) -> None:
        """Write the model's state dict to a file of the first rank."""
        step = self._step
        step.share_buffers()
        self.frozen.check()
        with step.modes.evaluating():
            weights = self.weights_for_file(whole=not step.layout.keeps_shards)
            save_weights(path, weights, joined=step.layout.joined, writes=step.world.is_first)

    def save(self, folder: Path) -> None:
        """Write a checkpoint to a folder; see `Step.save`."""
        step = self._step
        writer = Writer(folder, step.world, 1, alike=step.alike)
        error: SaveError | None = None
        try:
            state = step.state_dict(whole=not (step.layout.keeps_shards and writer.is_shared))
            writer.save(step.number, {**state, "step": step.number}, {"step": step.number})
            writer.finish()
        except SaveError as raised:
            error = raised
        for one in step.world.gather_objects(error):
            if one is not None:
                raise one

    def _extra_states(self) -> list[dict[str, Any]]:
        """Gather the extra state of every replica, in the order of ranks; [] if there is none."""
        mine = [extra_state_of(model) for model in self._step.models()]
        if not mine[0]:
            return []
        return list(itertools.chain(*self._step.world.gather_objects(mine)))

    def _weights(self, extra: Sequence[Mapping[str, Any]], *, whole: bool) -> dict[str, Any]:
        """Give the model's state dict, with extra state only where it is the same in all replicas.

        Args:
            extra: of every replica.
            whole: as in ``state_dict``.
        """
        weights = self._step.layout.weights(whole=whole) | self.frozen.sums
        if not extra:
            return weights
        weights = {name: value for name, value in weights.items() if not is_extra_state(name)}
        if are_alike(extra):
            weights.update(extra[0])
        return weights

    def _changed_flags(self) -> dict[str, str]:
        """Describe what was frozen, or changed its mode, since the training began here."""
        built = self._built_flags
        if built is None:
            # No update was made here.
            return dict(self._saved_flags)
        now = flags_of(self._step.model)
        return {name: text for name, text in now.items() if built.get(name) != text}

    # ---- the state that is taken over ------------------------------------------------------------

    def load(self, folder: Path) -> None:
        """Take over the checkpoint in a folder; see `Step.load`."""
        step = self._step
        state = load_newest(
            folder,
            step.world,
            lambda note: step.tell_once([note]),
            step.layout.split,
        )
        step.load_state_dict(state)
        step.world.step = state["step"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state that ``state_dict`` gave, under any strategy and number of devices.

        Raises:
            InputError: the names or shapes are another model's.
        """
        step = self._step
        extra = self._extra_state_in(state)
        own = extra_state_of(step.model) if extra[0] == {} else {}
        weights = {**own, **state["model"], **extra[0]}
        if any(isinstance(value, str) for value in weights.values()):
            mine = step.layout.weights(whole=False)
            weights = with_own(weights, mine, "the checkpoint", self.frozen.sum_of)
        try:
            step.layout.take_weights(weights)
        except RuntimeError as error:
            raise InputError(
                f"the saved model is another one: {str(error).splitlines()[-1].strip()}"
            ) from error
        for model, of_model in zip(step.models()[1:], extra[1:], strict=True):
            set_extra_state(model, of_model)
        self._take_buffers(state.get("buffers", {}))
        self._saved_flags = state.get("changed_attributes", {})
        step.layout.take_optimizer_state(state["optimizer"])
        if step.scaler is not None and "scaler" in state:
            step.scaler.load_state_dict(state["scaler"])

    def _extra_state_in(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Give the extra state in ``state`` for each replica of this process."""
        models = len(self._step.models())
        replicas = self._step.world.size * models
        saved = state.get("extra_state")
        self._not_kept = []
        if saved is None:
            # All replicas have the same.
            weights = state["model"].items()
            return [{name: value for name, value in weights if is_extra_state(name)}] * models
        if len(saved) == replicas:
            first = self._step.world.rank * models
            return list(saved[first : first + models])
        name = next(iter(saved[0]))
        before = counted(len(saved), "replica")
        text = f'extra state "{name}" was saved by {before} and this training has {replicas}'
        fix = "resume on as many devices, or keep what does not depend on the samples in a buffer"
        self._not_kept = [Caveat("state", f"{text}, so it begins anew", fix)]
        return [{}] * models

    def _take_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Take over the buffers that are not persistent."""
        for name, buffer in buffers.items():
            owner, _, attribute = name.rpartition(".")
            module = self._step.model.get_submodule(owner)
            now = getattr(module, attribute, None)
            if now is not None:
                buffer = buffer.to(now.device)
            setattr(module, attribute, buffer)

    def note_what_is_not_kept(self) -> None:
        """Freeze what was frozen, and log what the loaded checkpoint does not have.

        Callbacks have begun when this is called.
        """
        if self._saved_flags:
            set_flags(self._step.model, self._saved_flags)
        if self._step.world.is_first:
            self._step.tell_once(self._not_kept)
