"""What a person's functions change in a model beside parameters and buffers, and checkpoints keep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from lockstep.errors import counted
from lockstep.launch.events import Caveat
from lockstep.model.inspection import attribute_prints, changed_attributes, set_attributes
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import tensors

KINDS = ("attributes", "requires_grad", "modes")
"""What of a state they are."""


class ModelSettings:
    """The attributes of a model's modules, which of its parameters are trained, and the mode of its layers.

    A checkpoint keeps how they differ from those of the model that was built, and what callbacks had changed when they
    began; of attributes numbers, texts, tensors and
    nests of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._built, self._trained, self._modes = attribute_prints(model), _trained(model), _modes(model)
        self._begun = self._built, self._trained, self._modes
        self._buffers = _not_persistent(model)

    def begin(self) -> None:
        """Callbacks have begun: what they changed until now they do again in a resumed run, so all of it is kept."""
        self._begun = attribute_prints(self._model), _trained(self._model), _modes(self._model)

    def state(self, *, with_mode: bool) -> dict[str, dict[str, Any]]:
        """What has changed since the model was built, by kind and name.

        Args:
            with_mode: with that of the model itself, else only where layers are in another one.
        """
        prints, trained, modes = self._begun
        still = {name: its for name, its in self._built.items() if prints.get(name) == its}
        attributes, _ = changed_attributes(self._model, still)
        now = _modes(self._model) | ({} if with_mode else {"": self._modes[""]})
        changed = _changed(self._trained, trained, _trained(self._model)), _changed(self._modes, modes, now)
        return {kind: of for kind, of in zip(KINDS, (attributes, *changed), strict=True) if of}

    def plain_attributes(self) -> dict[str, Any]:
        """Attributes that have changed since the model was built, but for those with tensors, which have a device."""
        changed = self.state(with_mode=False).get("attributes", {})
        return {name: value for name, value in changed.items() if next(tensors(value), None) is None}

    def not_in_files(self) -> Iterator[Caveat]:
        """What acts in evaluations, perhaps, and isn't in files of weights."""
        for name, its in _not_persistent(self._model).items():
            if self._buffers.get(name, its) != its:
                text = f'buffer "{name}" changes in training, and isn\'t persistent: evaluate, predict and Run.model() '
                yield Caveat("state", f"{text}have it as it is built", "register it with persistent=True")

    def take(self, state: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        """Take over what ``state`` gave, and give a line for each kind that someone may not expect."""
        set_attributes(self._model, state.get("attributes", {}))
        parameters, modules = dict(self._model.named_parameters()), dict(self._model.named_modules())
        changed = {
            n: its for n, its in state.get("requires_grad", {}).items() if parameters[n].requires_grad is not its
        }
        for name, is_trained in changed.items():
            parameters[name].requires_grad_(is_trained)
        if modes := state.get("modes"):
            mode, of = modes.get("", self._model.training), {**self._modes, **modes}
            set_modes((module, of[name] is mode if name else mode) for name, module in modules.items())
        for is_trained in (True, False):
            if names := [name for name, its in changed.items() if its is is_trained]:
                more = f" and {counted(len(names) - 1, 'more parameter')}" if len(names) > 1 else ""
                what = f"{'is' if len(names) == 1 else 'are'} {'trained' if is_trained else 'frozen'}"
                yield f'"{names[0]}"{more} {what}, as when the run was saved'


def set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Set the mode of modules of which some may have a ``train`` of their own, which does more: it merges weights, say.

    What such a ``train`` leaves in evaluation mode stays so: it may have been told meanwhile to freeze a batch norm.

    Args:
        modes: each module, before those within it, and whether it is in training.
    """
    left = set[nn.Module]()
    for module, is_training in modes:
        if module in left:
            continue
        if not has_own_train(module):
            module.training = is_training
        elif module.training is not is_training:
            module.train(is_training)
            left.update(m for m in module.modules() if is_training and not m.training)


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode; each module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        set_modes(modes)


def has_own_train(module: nn.Module) -> bool:
    """Whether its class has a ``train`` of its own."""
    return type(module).train is not nn.Module.train or type(module).eval is not nn.Module.eval


def _not_persistent(model: nn.Module) -> dict[str, Any]:
    """A hash of each buffer that isn't in the state dict."""
    saved = model.state_dict().keys()
    return {name: digest(buffer) for name, buffer in model.named_buffers() if name not in saved}


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters()}


def _modes(model: nn.Module) -> dict[str, bool]:
    """Whether the model is in training mode, and each other module in the mode that the model is in."""
    return {name: module.training is (not name or model.training) for name, module in model.named_modules()}


def _changed(built: Mapping[str, bool], begun: Mapping[str, bool], now: Mapping[str, bool]) -> dict[str, bool]:
    return {name: its for name, its in now.items() if not built.get(name) is begun.get(name) is its}
