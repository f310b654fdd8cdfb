"""SavedState: the state of a model and its optimizer that is saved.

It has the names and the shapes of the single-device model under every strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.checkpoint.folder import load_newest
from lockstep.checkpoint.weights import save_weights, with_own
from lockstep.checkpoint.writer import Writer
from lockstep.errors import InputError, SaveError, counted
from lockstep.model.module_state import extra_state_of, flags_of, set_extra_state, set_flags
from lockstep.run.events import Caveat
from lockstep.strategies.steps.left_out_parameters import LeftOutParameters
from lockstep.tensors.row_shard import RowShard

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
        weights = self.weights(whole=whole)
        state: dict[str, Any] = {
            "model": weights,
            "optimizer": step.layout.optimizer_state(whole=whole),
        }
        if step.scaler is not None:
            state["scaler"] = step.scaler.state_dict()

        buffers = {}
        for name, buffer in step.model.named_buffers():
            if name not in weights:
                buffers[name] = buffer
        if buffers:
            state["buffers"] = buffers

        extra = self._extra_states()
        if extra:
            state["extra_state"] = extra
        changed = self._changed_flags()
        if changed:
            state["changed_attributes"] = changed
        return state

    def weights(self, *, whole: bool = True) -> dict[str, Any]:
        """Give the model's state dict, with the checksums of frozen parameters that are left out.

        Args:
            whole: as in ``state_dict``.
        """
        return self._step.layout.weights(whole=whole) | self.frozen.sums

    def write_weights(self, path: Path) -> None:
        """Write the model's state dict to a file of the first rank."""
        step = self._step
        step.share_buffers()
        self.frozen.check()
        with step.modes.evaluating():
            weights = self.weights(whole=False)
            for name, value in weights.items():
                if isinstance(value, RowShard):  # one at a time on a device
                    weights[name] = step.layout.joined(name, value.local).cpu()
            if step.world.is_first:
                save_weights(path, weights)

    def save(self, folder: Path) -> None:
        """Write a checkpoint to a folder; see `Step.save`."""
        step = self._step
        writer = Writer(folder, step.world, 1)
        error: SaveError | None = None
        try:
            shares_out = step.layout.keeps_shards and writer.is_shared
            state = step.state_dict(whole=not shares_out)
            number = step.world.step
            state |= {"step": number, "number": step.number}
            writer.save(number, state, {"step": number})
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
        of_ranks = self._step.world.gather_objects(mine)
        return list(itertools.chain(*of_ranks))

    def _changed_flags(self) -> dict[str, str]:
        """Describe what was frozen, or changed its mode, since the training began here."""
        built = self._built_flags
        if built is None:
            # No update was made here.
            return dict(self._saved_flags)
        changed = {}
        for name, text in flags_of(self._step.model).items():
            if built.get(name) != text:
                changed[name] = text
        return changed

    # ---- the state that is taken over ------------------------------------------------------------

    def load(self, folder: Path) -> None:
        """Take over the checkpoint in a folder; see `Step.load`."""
        step = self._step
        state = load_newest(
            folder,
            step.world,
            lambda note: step.log_once([note]),
            step.layout.split,
        )
        step.load_state_dict(state)
        step.world.step = state["step"]
        step.number = state.get("number", state["step"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state that ``state_dict`` gave, under any strategy and number of devices.

        Raises:
            InputError: the names or shapes are another model's.
        """
        step = self._step
        extra = self._extra_state_in(state)
        weights = state["model"]
        if any(isinstance(value, str) for value in weights.values()):
            # Frozen parameters were left out.
            mine = step.layout.weights(whole=False)
            weights = with_own(weights, mine, "the checkpoint", self.frozen.sum_of)
        try:
            step.layout.take_weights(weights)
        except RuntimeError as error:
            *_, reason = str(error).splitlines()
            raise InputError(f"the saved model is different: {reason.strip()}") from error

        for model, of_model in zip(step.models(), extra, strict=False):
            set_extra_state(model, of_model)
        self._take_buffers(state.get("buffers", {}))
        self._saved_flags = state.get("changed_attributes", {})
        step.layout.take_optimizer_state(state["optimizer"])
        if step.scaler is not None and "scaler" in state:
            step.scaler.load_state_dict(state["scaler"])

    def _extra_state_in(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Give the extra state in ``state`` for each replica of this process; [] without any."""
        step = self._step
        models = len(step.models())
        replicas = step.world.size * models
        saved = state.get("extra_state", [])
        if not saved or len(saved) == replicas:
            first = step.world.rank * models
            return list(saved[first : first + models])
        if step.world.is_first:
            before = counted(len(saved), "replica")
            caveat = Caveat(
                "state",
                f'extra state "{next(iter(saved[0]))}" was saved by {before} and this training has '
                f"{replicas}, so each takes that of the first",
                "resume on as many devices, or keep what does not depend on the samples in a "
                "buffer",
            )
            step.log_once([caveat])
        return [saved[0]] * models

    def _take_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Take over the buffers that are not persistent."""
        for name, buffer in buffers.items():
            owner, _, attribute = name.rpartition(".")
            module = self._step.model.get_submodule(owner)
            now = getattr(module, attribute, None)
            if now is not None:
                buffer = buffer.to(now.device)
            setattr(module, attribute, buffer)

    def restore_flags(self) -> None:
        """Freeze what was frozen in the loaded checkpoint, and set the modes of modules.

        Callbacks have begun when this is called.
        """
        if self._saved_flags:
            set_flags(self._step.model, self._saved_flags)
