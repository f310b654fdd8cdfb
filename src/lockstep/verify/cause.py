"""Cause: one reason for numbers that part, in words, with what mends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import DeviceError, FolderError, InputError, LossError, told
from lockstep.verify.comparison import Update


@dataclass(frozen=True)
class Cause:
    """Why a strategy's numbers are not one device's.

    Attributes:
        name: one word or two, the same in each release.
        words: what it is, with what was seen.
        mend: the setting, or the change, that keeps the numbers.
    """

    name: str
    words: str
    mend: str

    @classmethod
    def of_refusal(cls, error: Exception) -> Cause | None:
        """What a refusal, or a failure, under the strategy alone says of the job; None where it isn't of the job."""
        said = str(error)
        if isinstance(error, LossError):
            return cls.shape(said) if "can't take outputs" in said else cls.loss(said)
        for words, cause in (
            ("builds differently", "unseeded model"),
            ("has other values on rank 0", "unseeded model"),
            ("its samples are others on rank", "unseeded data"),
            ("the stream is not the same on every rank", "unseeded data"),
            ("gave other indices", "sampler"),
            ("writes its parameter", "state"),
            ("has max_norm", "state"),
            ("scale_grad_by_freq", "mixing"),
            ("has come to differ between ranks", "drift"),
        ):
            if words in said:
                what, _, mend = said.partition(": ") if cause == "drift" else said.rpartition(": ")
                return cls(cause, what, mend)
        if isinstance(error, (DeviceError, FolderError)):
            return None
        return cls.refused(said) if isinstance(error, InputError) else cls.failed(error)

    # ---- the model --------------------------------------------------------------------------------------------------

    @classmethod
    def batchnorm(cls, left: float, synchronises: bool) -> Cause:
        """Batch norm per replica; ``left`` is what is left of the difference without."""
        if synchronises:
            return cls(
                "batchnorm",
                f"BatchNorm normalises over the share of each replica; over the whole batch the two agree ({left:.0e})",
                "sync_batchnorm=True (--sync-batchnorm)",
            )
        return cls(
            "batchnorm",
            f"BatchNorm normalises over the share of each replica; with its running statistics they agree ({left:.0e})",
            "ddp or dp with sync_batchnorm=True, or layers that look at one sample (GroupNorm, LayerNorm)",
        )

    @classmethod
    def dropout(cls, left: float) -> Cause:
        """Dropout draws other masks on each replica."""
        return cls(
            "dropout",
            f"dropout draws other masks than one device does, as random; without it the two agree ({left:.0e})",
            "nothing to mend where only the masks differ; mp draws those of one device, dropout 0 shows all the rest",
        )

    @classmethod
    def drawing(cls, left: float, where: str = "forward") -> Cause:
        """The model draws from PyTorch's generator."""
        return cls(
            "drawing",
            f"the model draws random numbers in {where}, others than one device would; without them the two agree "
            f"({left:.0e})",
            "nothing where any draw will do; mp draws those of one device, or let the dataset draw, by sample",
        )

    @classmethod
    def drawing_on(cls, elsewhere: bool) -> Cause:
        """It draws, also where PyTorch's operators that draw are held still."""
        whence = (
            "from Python's or numpy's random"
            if elsewhere
            else "in an operator that isn't PyTorch's own, or its optimizer does"
        )
        return cls(
            "drawing",
            f"the model draws random numbers {whence}, others than one device would; they can't be taken out here, so "
            "that nothing else is seen",
            "draw from torch in forward, or let the dataset draw, by sample",
        )

    @classmethod
    def mixing(cls, layer: str, kind: str) -> Cause:
        """Samples act on one another."""
        return cls(
            "mixing",
            f"samples of a batch act on one another in {named(layer, kind)}: single parts from itself too when its "
            "batches are cut",
            "mp or single, which see the whole batch; or a layer that looks at one sample at a time",
        )

    @classmethod
    def collate(cls, layer: str, kind: str) -> Cause:
        """The job's own collate sees a share."""
        return cls(
            "collate",
            "collate makes other rows of a share than of the whole batch (it pads to the longest, or mixes samples), "
            f"and {named(layer, kind)} gives other numbers for them",
            "a collate that makes the same of a sample in any batch (one length for all, say), or a model that masks "
            "what was padded; mp and single give it the whole batch",
        )

    @classmethod
    def cut_in_evaluation(cls, loss: str) -> Cause:
        """Training agrees, and the loss of an evaluation doesn't."""
        return cls(
            "mixing",
            f'"{loss}" of the evaluation depends on how its batches are cut, and training doesn\'t: in eval mode '
            "samples of a batch act on one another, or the loss is no mean over samples there",
            "let eval mode look at one sample at a time, or evaluate under mp or single",
        )

    @classmethod
    def metric(cls, names: Sequence[str]) -> Cause:
        """The evaluation's loss agrees, and metrics don't."""
        return cls(
            "metric",
            f"{_quoted(names)} of the evaluation depends on how its batches are cut, and the loss doesn't: it is no "
            "sum over items",
            "return (total, count), each summed over items, or give torchmetrics' own, which keep what they need",
        )

    @classmethod
    def state(cls, attributes: Sequence[str]) -> Cause:
        """State that is neither parameter nor buffer."""
        return cls(
            "state",
            f'the model keeps state outside of its state dict: "{attributes[0]}" changes in training, and each replica '
            "has its own",
            "make it a buffer (register_buffer) that doesn't depend on the share; mp or single keep it as it is",
        )

    @classmethod
    def written(cls, name: str) -> Cause:
        """A parameter without a gradient, which the model writes."""
        return cls(
            "state",
            f'parameter "{name}" has no gradient and changes all the same: the model writes it, by what a share shows',
            "let it depend on the parameters only, or take mp or single, whose forward sees the whole batch",
        )

    @classmethod
    def buffer(cls, own: Sequence[str], updated_on: Mapping[str, Sequence[int]]) -> Cause:
        """A buffer that is other on each replica."""
        if updated_on:
            name, ranks = next(iter(updated_on.items()))
            return cls(
                "buffer of one rank",
                f'buffer "{name}" is updated on {_listed("replica", ranks)} only, and acts on all',
                "update it on every rank alike, before it is used",
            )
        return cls(
            "buffer",
            f'buffer "{own[0]}" depends on the share: each replica makes its own, all follow the first, and one device '
            "would make another",
            "let it depend on the parameters only, or take mp or single, whose forward sees the whole batch",
        )

    @classmethod
    def own_backward(cls, functions: Sequence[str], first: Update | None) -> Cause:
        """A backward that depends on how many samples it sees."""
        ratios = {} if first is None else {n: r for n, r in first.ratios.items() if abs(r - 1) > 1e-6}
        seen = ""
        if ratios:
            name, ratio = next(iter(ratios.items()))
            seen = f' (the gradient of "{name}" is {ratio:.4g} times as large once the batch is cut)'
        which = f"autograd function {_quoted(functions)}" if functions else "a backward of the model, or a hook in it,"
        return cls(
            "autograd function",
            f"{which} depends on the number of samples that it sees: it divides by it, say{seen}",
            "leave the mean over samples to the loss, and let backward treat each sample by itself",
        )

    @classmethod
    def hook(cls, names: Sequence[str]) -> Cause:
        """A hook on a gradient that isn't linear."""
        which = f'parameter "{names[0]}"' if len(names) == 1 else f"parameters {_quoted(names[:3])}"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return cls(
            "hook",
            f"a hook on {which}{more} makes of the gradient of each share what it would not make of the whole: it "
            "clips it, normalises it or adds to it, say",
            "clip_norm, or weight_decay, which see the whole gradient; mp gives hooks that of the whole batch",
        )

    @classmethod
    def unseeded_start(cls, name: str) -> Cause:
        """Initial values that can't be repeated."""
        return cls(
            "unseeded model",
            f'the model draws unseeded numbers when it is built: "{name}" has other values each time',
            "draw initial values from torch's, random's or numpy.random's global generator, which are seeded",
        )

    @classmethod
    def unseeded_model(cls) -> Cause:
        """A forward that can't be repeated."""
        return cls(
            "unseeded model",
            "single parts from itself on the same samples, with deterministic operators too: the model, or the "
            "optimizer, draws unseeded numbers, or counts in a class or a module, which both sides share here",
            "draw from torch's global generator (or from one that is seeded in forward); count in a buffer",
        )

    @classmethod
    def operators(cls, name: str = "") -> Cause:
        """Operators that aren't deterministic."""
        return cls(
            "operators",
            f"operators that are not deterministic{f', {name}' if name else ''}: single parts from itself",
            "torch.use_deterministic_algorithms(True) refuses or replaces them",
        )

    # ---- the loss, the data, the schedule ---------------------------------------------------------------------------

    @classmethod
    def loss(cls, said: str) -> Cause:
        """A loss that is no mean over samples, as it was said, or for this reason."""
        known, what = "not a mean over samples", said.partition(": ")[0]
        return cls(
            "loss",
            what if known in what else f"the loss is {known}: {said}",
            "return (total, count) from it, each summed over samples; mp and single give it the whole batch",
        )

    @classmethod
    def auxiliary_loss(cls, name: str) -> Cause:
        """A term of the loss that the model computes over a whole forward."""
        what = f'the model\'s output "{name}"' if name else "an output of the model"
        return cls(
            "auxiliary loss",
            f"the loss reads {what}, which is no sum over samples (a loss for load balancing, say): dp and ddp compute "
            "it for each replica, over its local batch",
            "mp or single, which see the whole batch; or a term that is a sum over samples",
        )

    @classmethod
    def shape(cls, said: str) -> Cause:
        """Outputs of a share that have not the shape of the whole batch's."""
        return cls(
            "refused",
            f"of a share of a batch the model gives what the loss doesn't take: {said}",
            "outputs with a row for each sample, also where there is only one: squeeze(1), say, for squeeze()",
        )

    @classmethod
    def unseeded_data(cls, said: str = "") -> Cause:
        """Samples that can't be repeated."""
        return cls(
            "unseeded data",
            said
            or "the dataset draws unseeded numbers: the same sample of the same epoch comes out otherwise each time",
            "draw from torch's, random's or numpy.random's global generator, which are seeded for each sample",
        )

    @classmethod
    def sampler(cls, first: Update) -> Cause:
        """Samples that are used twice, or not at all."""
        rows = first.rows
        said = [
            f"repeats {_listed('sample', rows.repeated)}" if rows.repeated else "",
            f"leaves out {_listed('sample', rows.left_out)}" if rows.left_out else "",
            f"takes {rows.others} that are not of the batch" if rows.others else "",
        ]
        return cls(
            "sampler",
            f"the strategy {' and '.join(filter(None, said))} of batch {first.batch} in epoch {first.epoch}, of which "
            "each counts once",
            "give every sample of a global batch to one device; leave a device without one where there are too few",
        )

    @classmethod
    def scheduler(cls, first: Update, found: int | None, moves: int) -> Cause:
        """A scheduler that moves at another pace."""
        rates = f"{first.rates[0]:.6g} against {first.reference_rates[0]:.6g} in update {first.number}"
        times = f": it has moved {found} times where {moves} is right" if found is not None else ""
        if found is not None and moves and found % moves == 0:
            times = f": it steps {found // moves} times for each one"
        return cls(
            "scheduler",
            f"the learning rate is {rates}{times}",
            "step the scheduler once per update, on one rank's clock",
        )

    # ---- the strategy -----------------------------------------------------------------------------------------------

    @classmethod
    def scaled(cls, ratio: float, devices: int) -> Cause:
        """A gradient that is a multiple of the right one."""
        if abs(ratio - devices) < 1e-6 * devices:
            return cls(
                "summed gradient",
                f"the gradient is {devices} times one device's: summed over the devices where it should be averaged",
                "divide by the number of devices, or run backward on total / samples of the global batch",
            )
        twice = abs(ratio * devices - 1) < 1e-6
        how = f"averaged over the {devices} devices once too often" if twice else "weighted otherwise than by samples"
        return cls("scaled gradient", f"the gradient is {ratio:.6g} times one device's: {how}", "sum totals and counts")

    @classmethod
    def drift(cls, name: str) -> Cause:
        """Ranks that have come apart."""
        return cls(
            "drift",
            f'parameter "{name}" has come to differ between ranks: something but the optimizer writes it, or the '
            "optimizer draws otherwise on each rank",
            "let only the optimizer write parameters, and sum every gradient over the ranks",
        )

    @classmethod
    def update(cls, number: int) -> Cause:
        """Gradients that agree, and parameters that don't."""
        return cls(
            "update",
            f"the gradients of update {number} agree before clipping, and the parameters after it don't: clipping, or "
            "the optimizer, differs",
            "clip what is summed over all devices, and give each rank the same optimizer",
        )

    @classmethod
    def other_start(cls, name: str) -> Cause:
        """Another model."""
        return cls(
            "start", f'the strategy begins with other values of "{name}"', "build the model under the job's seed"
        )

    @classmethod
    def declared(cls, words: str) -> Cause:
        """The strategy says so itself."""
        return cls("declared", words, "an exact strategy: ddp, dp, mp or pp")

    @classmethod
    def announced(cls, note: str) -> Cause:
        """What was said before training, and nothing else was found."""
        return cls("announced", f"not traced to one layer; said before training: {note}", "as the line says")

    @classmethod
    def failed(cls, error: Exception) -> Cause:
        """The strategy failed where one device didn't."""
        return cls(
            "failed",
            f"under the strategy it fails: {told(error)}",
            "a forward that takes any share of a batch",
        )

    @classmethod
    def refused(cls, said: str) -> Cause:
        """The strategy doesn't take the job, where one device does."""
        cut = max(said.rfind(": "), said.rfind("; "))
        return cls("refused", said, "another strategy") if cut < 0 else cls("refused", said[:cut], said[cut + 2 :])

    @classmethod
    def unknown(cls) -> Cause:
        """None of those that are known."""
        return cls(
            "unknown",
            "none of the known causes: repeated runs agree, and so does single when its batches are cut",
            "look at the first layer that differs; where the strategy is one of Lockstep's, please report it",
        )


def named(layer: str, kind: str) -> str:
    """``"body.1" (BatchNorm2d)``, or the model itself."""
    return f'"{layer}" ({kind})' if layer else f"the model's own forward ({kind})"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _listed(what: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"
