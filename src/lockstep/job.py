"""A job describes what to train, without any device.

The model, the loss and the data once, and every setting of a training as a field with a default.
The command line has the same names and wins; there is no third place where a setting can hide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import JobError
from lockstep.recipe import MakesOptimizer, Recipe, refuse_other_kind, refuse_uncallable
from lockstep.settings import Every, checked, plain_fields, read_best

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Job(Recipe):
    """What to train.

    Attributes:
        model: builds the model, afresh wherever it is needed: ``lambda: Net()``. It is called under
            the job's seed. With ``step`` it may give a dict of modules by name, which becomes an
            ``nn.ModuleDict``.
        loss: ``loss(outputs, targets)``: one of PyTorch's losses, or a function that gives
            ``(total, count)`` or a ``lockstep.Loss``; any other scalar is taken as a mean over
            samples. Where batches are cut, this is checked in updates 1 to 16 and each 32nd, and in
            all others on a CPU if that takes at most 5 % of the time. Not needed with ``step``.
        loss_over: ``"samples"`` for a loss that is a sum or a mean over samples; ``"batch"`` for a
            loss of all samples of the global batch together, as contrastive losses are.
            ``accumulate`` computes forward twice then, and ``pp`` keeps all activations.
        counts: ``counts(targets)`` gives numbers by name, ``{"tokens": ..., "sentences": ...}``. They
            are summed over the global batch, and ``loss(outputs, targets, counts)`` returns its
            share of the loss: several means in one loss, or class frequencies.
        optimizer: makes the optimizer from the list of ``(name, parameter)`` pairs of the
            parameters that are trained; with ``step``, a dict of such functions by the names of the
            model's parts.
        train_data: a dataset of ``(inputs, targets)``, or a callable that gives one. Inputs that
            are a tuple or a list are passed as ``model(*inputs)``, a dict as ``model(**inputs)``,
            anything else (a named tuple, say) as ``model(inputs)``. One that can only be gone
            through (an ``IterableDataset``, a generator function) is a stream: every rank reads all
            of it, in its own order, and keeps its share. A stream must be the same on every rank, so
            don't cut it by rank. A ``set_epoch(epoch)`` of the dataset is called each epoch.
        batch_size: the number of samples of the global batch, on any number of devices.
        eval_data: as ``train_data``; None trains without evaluation. A dict of sets by name has
            metrics ``clean/loss``, ``clean/accuracy``, ...; the first one's loss is the one that
            chooses the best weights.
        epochs: the number of passes through the data (None: 1, if ``steps`` isn't given).
        steps: the number of updates after which the training ends.
        step: ``step(models, batch, update)`` makes the updates of one step, of several losses and
            optimizers: it calls ``update("generator", total, count)``.
        lr_scheduler: makes a scheduler from the optimizer; with ``step``, a dict by the names of
            the optimizers.
        lr_scheduler_every: ``"epoch"`` or ``"step"``: when the scheduler makes a step.
        metrics: by name, a function ``(outputs, targets) -> (total, count)``, or a torchmetrics
            ``Metric``.
        seed: the seed of weights, order, augmentation and dropout.
        shuffle: draw a new order of the samples for each epoch, from ``(seed, epoch)``. A stream
            isn't shuffled.
        order: ``order(epoch)`` gives the indices to go through, instead of a permutation: weighted,
            grouped by length, ... It draws from the global generators, which are seeded by ``(seed,
            epoch)``.
        batches: ``batches(epoch)`` gives the global batches of an epoch, each a list of indices of
            any length; it draws as ``order`` does. ``shuffle`` isn't used then, and ``batch_size``
            is the size of evaluation batches.
        cut_by: the cost of each sample, or a function of its index. Local batches and micro-batches
            of training have like costs then, not like numbers of samples.
        collate: makes ``(inputs, targets)`` of a list of samples, instead of PyTorch's default.
        accumulate: the number of micro-batches that each global batch is cut into.
        clip_norm: the largest norm of all gradients together (None: no clipping; ``inf``: only
            computed, in every update).
        nonfinite: ``"raise"`` ends the training if the loss is NaN or infinite; ``"skip"`` skips
            each update whose loss or gradients aren't finite, on all ranks alike. What forward
            wrote into buffers stays. The host then waits for an accelerator in each update. An
            update whose loss counts no item is skipped, too (on an accelerator by ``"skip"``, or by
            a fused optimizer).
        nonfinite_limit: the number of updates in a row that may be skipped. One more ends the
            training.
        accept_differences: train although results depend on where a batch is cut, and log a note.
            Otherwise such a training ends with an error.
        check_every: check in every N-th update, too, that total, count and gradients don't depend
            on where a batch is cut (None: only in updates 1, 2, 4, 8, ...; 0: in none).
        init: the weights to begin with: a safetensors file, the folder of a run, or a folder of a
            Hugging Face model. It has ``model.safetensors``, or shards with an index. A run that is
            resumed keeps its own weights.
        init_strict: refuse an ``init`` that lacks weights of the model, or has others. False loads
            the weights that fit, and logs the others.
        sync_batchnorm: let BatchNorm normalize over the batch that one device would have, not over
            each replica's local batch.
        channels_last: store images and convolution weights in the channels-last memory format.
        precision: ``"fp64"`` or ``"fp32"`` for model and inputs; ``"tf32"``: fp32, with products
            that CUDA devices round to TensorFloat-32; ``"bf16"`` or ``"fp16"``: fp32 weights and
            autocast (None: as the model was built).
        compile: compile the model by ``torch.compile``: True, a mode (``"reduce-overhead"``,
            ``"max-autotune"``, ``"max-autotune-no-cudagraphs"``, ``"default"``), or the name of a
            backend.
        activation_checkpointing: the blocks whose activations are computed again in backward
            instead of being kept: ``"auto"`` for the model's lists of blocks, or names with commas
            between.
        fused: use the fused implementation of the optimizer (None: if PyTorch has a correct one).
        keep_memory: on CPU devices, keep the memory that an update frees for the next update:
            faster if activations are large, with a larger peak.
        eval_batch_size: the number of samples of an evaluation batch (None: ``batch_size``).
        log_every: within an epoch, log every N steps (``100``) or after a time (``"10 min"``). The
            end of an epoch is logged anyway; with ``"10 epochs"``, each tenth epoch is.
        eval_every: evaluate every N steps (``100``) or epochs (``"2 epochs"``, ``"0.25 epochs"``),
            or after a time (``"10 min"``) (None: at the end of each epoch). The last step is
            evaluated anyway.
        eval_at_start: evaluate before the first update, too, as step 0.
        eval_batches: the number of batches of each evaluation set that a training evaluates, its
            first ones (None: all). ``lockstep evaluate`` has all, unless it is given there.
        save_every: save a checkpoint every N steps or epochs, or after a time, as in ``eval_every``
            (None: at the end of each epoch). With steps or a time, the end of each epoch is saved,
            too.
        best: the metric that chooses the weights of ``best.safetensors``, with ``max`` or ``min``:
            ``"accuracy:max"``, ``"clean/accuracy:max"`` (None: ``"eval_loss:min"``). The loss is
            that of the first set.
        keep: the number of checkpoints that are kept, the newest ones.
        save_frozen: keep frozen parameters in checkpoints and files of weights. False leaves out
            what is frozen when the training begins: ``model`` has to build the same values again,
            and a SHA-256 is compared.
        loader_workers: the number of processes that fetch samples, for each rank (None: chosen by
            the cores and the dataset). A stream has at most one, which reads ahead: each further
            one would read the whole stream.
        tensorboard: also write events for TensorBoard, in the run's folder.
        on_event: functions called with each ``Event`` on rank 0; one that returns ``"stop"`` ends
            the training.
        callbacks: ``lockstep.Callback`` objects, whose methods are called on every rank with the
            model: early stopping, averaged weights, freezing, ... (see ``lockstep.callbacks``).

    Raises:
        JobError: a field is wrong; the message begins with its name.
    """

    loss: Callable[..., Any] = None  # type: ignore[assignment]
    optimizer: MakesOptimizer | Mapping[str, Callable[..., torch.optim.Optimizer]]
    train_data: Any
    batch_size: int
    eval_data: Any = None
    epochs: int | None = None
    steps: int | None = None
    lr_scheduler: (
        Callable[[torch.optim.Optimizer], Any] | Mapping[str, Callable[..., Any]] | None
    ) = None
    lr_scheduler_every: Literal["epoch", "step"] = "epoch"
    metrics: Mapping[str, Any] = field(default_factory=dict)
    shuffle: bool = True
    order: Callable[[int], Sequence[int] | torch.Tensor] | None = None
    batches: Callable[[int], Iterable[Sequence[int] | torch.Tensor]] | None = None
    cut_by: Callable[[int], float] | Sequence[float] | torch.Tensor | None = None
    collate: Callable[[list[Any]], tuple[Any, Any]] | None = None
    eval_batch_size: int | None = None
    log_every: int | str | None = None
    eval_every: int | str | None = None
    eval_at_start: bool = False
    eval_batches: int | None = None
    save_every: int | str | None = None
    best: str | None = None
    keep: int = 2
    save_frozen: bool = True
    loader_workers: int | None = None
    tensorboard: bool = False
    on_event: Sequence[Callable[[Any], str | None]] = ()
    callbacks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if self.optimizer is None:
            raise JobError("optimizer: None can't be called")
        for name in ("log_every", "eval_every", "save_every"):
            Every.read(getattr(self, name), name)
        super().__post_init__()
        refuse_uncallable(self, "lr_scheduler", "order", "batches", "collate")
        if self.order is not None and self.batches is not None:
            raise JobError("order: batches gives the order of samples, too: leave order out")
        if self.train_data is None:
            raise JobError(
                "train_data: there is none; give a dataset of (inputs, targets), or a callable "
                "that gives one"
            )
        for name, kind, what in _CONTAINERS:
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, str):
                raise JobError(f"{name}: {what} is expected, not {type(value).__name__}")
        refuse_uncallable(self, "metrics", "on_event")
        read_best(self.best)
        if self.init is not None and not self.save_frozen:
            raise JobError(
                "save_frozen: with false, frozen weights come from model only: load them there, "
                "not by init"
            )
        refuse_other_kind(self, "lr_scheduler")
        if self.eval_data is not None and self.loss is None:
            raise JobError(
                "eval_data: with step=, give a loss(outputs, targets) to evaluate too, and a "
                "model with a forward"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that are plain values, by name, as ``config.json`` keeps them."""
        return {name: getattr(self, name) for name in SETTINGS}


_CONTAINERS = (
    ("metrics", Mapping, "a dict of functions by name"),
    ("on_event", Sequence, "a list of functions"),
    ("callbacks", Sequence, "a list of lockstep.Callback objects"),
)

SETTINGS: dict[str, Any] = plain_fields(Job)
"""The settings that a command line can give, with their types."""


def checked_setting(name: str, value: Any) -> Any:
    """Return the value of a plain setting of a job, converted to the setting's type.

    Raises:
        JobError: the value has another type, or is a number that the setting can't have.
    """
    return checked(name, value, SETTINGS[name])
