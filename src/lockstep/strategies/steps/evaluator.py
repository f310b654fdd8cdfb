"""Evaluator: computes outputs and losses of a step's model without an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.errors import JobError
from lockstep.model.layer_error import explained_call
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.modes import has_own_train, set_modes
from lockstep.tensors.rows import batch_size_of

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step

T = TypeVar("T")


class Evaluator:
    """Evaluates the model of a step. Strategies override where a local batch is computed.

    Args:
        step: the step.
    """

    def __init__(self, step: Step) -> None:
        self._step = step

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode, without gradients; all ranks call this.

        Afterwards each module gets back the mode it had. The model has the weights that the
        optimizer has for evaluation.

        An ``nn.TransformerEncoder`` computes padding as it does in training. PyTorch's fast path
        would make zeros of it, but not under the function modes and hooks of some strategies.
        """
        step = self._step
        step.meet("step.evaluate(...)")
        step.after_events()
        with step.modes.evaluating():
            model = step.model
            modes = [(module, module.training) for module in model.modules()]
            stream = step.draws.stream
            step.loss.follow()
            # A module's own ``train`` may merge adapters into weights.
            writes = any(has_own_train(module) for module, _ in modes)
            around = step.layout.whole if writes else nullcontext
            with around():
                model.eval()
            step.share_buffers()  # replicas of dp take the mode, too
            fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                with torch.no_grad():
                    yield
            finally:
                step.draws.stream = stream
                torch.backends.mha.set_fastpath_enabled(fast)
                with around(), torch.no_grad():
                    set_modes(modes)

    def evaluate(self, inputs: Any, targets: Any = None) -> tuple[Any, Number, Number]:
        """Compute outputs, total and count of this process's local batch; see `Step.evaluate`."""
        self._refuse_models()
        if isinstance(inputs, Batch):
            inputs, targets = inputs
        with self.evaluating():
            if inputs is None:
                if self._step.world.size > 1:  # other ranks may wait for this one
                    self.results(Batch([Part(None, None, 0, 0)], 0, 0, 0))
                return None, 0.0, 0
            size = batch_size_of(inputs)
            part = Part(inputs, targets, size, size)
            outputs, (total, count) = self.gathered(part)
            return outputs, total, count

    # ---- within ``evaluating()`` -----------------------------------------------------------------

    def over(
        self,
        batches: Iterable[Batch],
        compute: Callable[[Batch], T],
        seed: int,
    ) -> Iterator[tuple[Batch, T]]:
        """Yield each batch, in order, with what ``compute`` makes of it.

        Args:
            batches: of the loader.
            compute: ``results`` or ``predictions``, or what calls one of them.
            seed: gives each batch a random stream.
        """
        self._refuse_models()
        for batch in batches:
            self._step.seed(seed, batch.index + 1)
            yield batch, compute(batch)

    def _refuse_models(self) -> None:
        model = self._step.model
        if isinstance(model, nn.ModuleDict):
            first = next(iter(model))
            parts = ", ".join(model)
            raise JobError(
                f"model: it is the parts {parts}, without a forward to evaluate or predict with: "
                f'call a part yourself (run.model()["{first}"]), or give a Module with a forward'
            )

    def results(self, batch: Batch) -> list[tuple[Any, Any, Loss]]:
        """Compute outputs and loss of each local batch of this process.

        Empty ones are left out.

        Returns:
            Outputs, targets and loss of each local batch.
        """
        if self._step.counts is not None:
            self._step.counts.begin(batch)
        whole_batch = self._step.whole_batch
        if whole_batch is not None and self._step.replicas > 1:
            return whole_batch.results(self.of_each(self.predicted, batch))
        found = []
        for part, (outputs, loss) in self.of_each(self.judged, batch):
            found.append((outputs, part.targets, loss))
        return found

    def predictions(self, batch: Batch) -> list[tuple[int, Any]]:
        """Compute the outputs of each local batch of this process; the loss isn't called.

        Returns:
            The number of samples and the outputs of each local batch.
        """
        found = []
        for part, outputs in self.of_each(self.predicted, batch):
            found.append((part.size, outputs))
        return found

    def of_each(
        self,
        function: Callable[[nn.Module, Part], T],
        batch: Batch,
    ) -> list[tuple[Part, T]]:
        """Call a function for each replica of this process that has samples of a batch.

        Args:
            function: takes a model and samples that are on its device.
            batch: of the loader.

        Returns:
            The samples and what the function made of them, for each of these replicas.
        """
        if not batch.parts[0].size:
            return []
        part = self._step.placed(batch.parts[0])
        return [(part, function(self._step.model, part))]

    def gathered(self, part: Part) -> tuple[Any, Loss]:
        """Compute outputs and loss of a local batch of this process."""
        ((outputs, _, loss),) = self.results(Batch([part], part.size, 0, 0))
        return outputs, loss

    def predicted(self, model: nn.Module, part: Part) -> Any:
        """Compute the outputs of a model for samples that are on its device."""
        with self._step._precision.autocast():
            return explained_call(model, part.inputs)

    def judged(self, model: nn.Module, part: Part) -> tuple[Any, Loss]:
        """Compute outputs and loss of samples that are on the device of ``model``."""
        return self._step._outputs_and_loss(model, part)
