"""What a model was seen to do in forward (by `lockstep.model.inspection`), and what the person
has to know of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from lockstep.errors import StrategyError
from lockstep.launch.events import Caveat

Kind = Literal["sum", "mean", "mean of items", "same", "neither", "whole numbers"]
"""What an output over a batch is to those of parts of it; the items are those that the loss
counts.
"""


@dataclass
class Seen:
    """What a model was seen to do in forward.

    Attributes:
        writes: the first parameter that changed, or that an embedding with ``max_norm`` may change.
        writes_within: the first parameter that forward writes, if only for a while.
        freezes: the first parameter whose ``requires_grad`` changed.
        mixes: whether samples act on one another.
        remembers: whether there is state that is neither parameter nor buffer.
        written: names of the buffers that forward writes.
        follows: names of those that depend on the share.
        collects: names of attributes of modules that forward makes of what they were and of the
            share.
        counts: names of attributes that each forward changes, whatever the share: a number of
            calls, say.
        overwrites: names of attributes that forward makes of the share alone: an activation, a
            statistic of it.
        draws: whether layers other than dropout draw random numbers.
        draws_elsewhere: whether they come from Python's or numpy's generator.
        seeds: whether it seeds PyTorch's generator.
        counts_words: whether an embedding scales gradients by how often a word is in the batch.
        backward: the first parameter whose gradient depends on the share, though outputs and the
            loss don't.
        recomputed: the first whose gradient is another one where blocks keep their activations.
        ungraded: why gradients couldn't be compared.
        nonlinear: the first parameter whose gradient isn't so many times itself when backward
            begins with so many times what it began with.
        backward_writes: names of buffers and attributes that backward writes, in a hook, say.
        backward_follows: names of those that depend on the share.
        puts_back: the name of a variable outside of the model that forward changes and puts back.
        changes: the names of variables outside of the model that forward or backward changes
            (`outside_variables`).
        passes_on: the first of them that holds tensors, which other functions may read.
        loss_reads: names of attributes that forward writes, where the loss reads one of the model
            itself.
        leaves: whether the loss reads what forward leaves beside its outputs, and that is no sum
            over samples.
        uncopied: why nothing was seen: the model can't be copied.
        unparted: why little was seen: the model can't take a part of these samples.
        ran: whether it could take them all.
        ragged: whether inputs have several rows for a sample, as the nodes of graphs, or none: they
            can't be cut.
        of_batch: names of outputs that are computed over all samples, and what they are.
        bent: names of parts of the loss ("": all of it) that are no sums where parts of a batch
            have such outputs, too.
        bends: whether the loss makes something else of such outputs than a sum over samples (their
            square, say).
    """

    writes: str | None = None
    writes_within: str | None = None
    freezes: str | None = None
    mixes: bool = False
    remembers: bool = False
    written: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    collects: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    overwrites: tuple[str, ...] = field(default=(), compare=False)
    draws: bool = False
    draws_elsewhere: bool = False
    seeds: bool = False
    counts_words: bool = False
    backward: str | None = None
    recomputed: str | None = None
    ungraded: str | None = None
    nonlinear: str | None = None
    backward_writes: tuple[str, ...] = ()
    backward_follows: tuple[str, ...] = ()
    puts_back: str | None = None
    changes: tuple[str, ...] = ()
    passes_on: str | None = None
    loss_reads: tuple[str, ...] = ()
    leaves: bool = False
    uncopied: str | None = None
    unparted: str | None = None
    ran: bool = field(default=False, compare=False)
    ragged: bool = False
    of_batch: dict[str, Kind] = field(default_factory=dict)
    bends: bool = False
    bent: tuple[str, ...] = field(default=(), compare=False)

    def refuse_writes(self) -> None:
        """Refuse a model that writes its parameters, where replicas compute a local batch each.

        Raises:
            StrategyError: it writes one.
        """
        if self.writes is not None:
            raise StrategyError(
                f'the model writes its parameter "{self.writes}" in forward: each replica would '
                "write it once more, or "
                "from its local batch",
                kind="state",
                fix="make it a buffer, write it between updates, or use single",
            )

    def refuse_recomputed(self) -> None:
        """Refuse checkpointed blocks that backward computes otherwise than forward did.

        Raises:
            StrategyError: there are some.
        """
        if self.recomputed is not None:
            raise StrategyError(
                f'activation_checkpointing: the gradient of "{self.recomputed}" is not that '
                "without it: "
                "forward gives a block something for its call only (weights, a hook, an object, a "
                "global variable), "
                "which is not there any more as backward computes it a second time",
                kind="state",
                fix="name other blocks, or leave activation_checkpointing out",
            )

    def refuse_in_replicas(self, *, on_threads: bool) -> None:
        """Refuse what replicas, which compute a local batch each, can't do in training.

        Args:
            on_threads: whether replicas are threads of one process.

        Raises:
            StrategyError: forward writes a parameter, or what is outside of the model where threads
                would write to it at once; the loss reads what forward writes to one of several
                threads' models; or an embedding scales gradients by how often a word is in the
                batch.
        """
        self.refuse_writes()
        if on_threads:
            self.refuse_on_threads()
        if self.counts_words:
            raise StrategyError(
                "the model calls embedding with scale_grad_by_freq=True, which divides gradients "
                "by how often a word "
                "is in the batch, and each replica sees its local batch only",
                kind="mixing",
                fix="use single or mp, or scale_grad_by_freq=False",
            )

    def refuse_what_is_put_back(self) -> None:
        """Refuse a variable that each of several threads would set for its own local batch, and all
        would see.

        Raises:
            StrategyError: there is one.
        """
        if self.puts_back is not None:
            raise StrategyError(
                f'"{self.puts_back}", which is outside of the model, is set in a step and put '
                "back, and the replicas "
                "of this process would see one another's",
                kind="state",
                fix="give it to the layers as an argument, make it a contextvars.ContextVar, or "
                "use ddp",
            )

    def refuse_on_threads(self) -> None:
        """Refuse what replicas that are threads of one process would write to at once.

        Raises:
            StrategyError: as ``refuse_in_replicas``.
        """
        if self.writes_within is not None:
            raise StrategyError(
                f'forward writes parameter "{self.writes_within}" of the model and puts it back, '
                "and the replicas of "
                "this process share it",
                kind="state",
                fix="compute with another tensor, or use ddp, which has a process for each replica",
            )
        if self.passes_on is not None:
            raise StrategyError(
                f'forward writes tensors to "{self.passes_on}", which is outside of the model, so '
                "that all replicas of "
                "this process would write to one",
                kind="state",
                fix="return them from forward, or use ddp, which has a process for each replica",
            )
        if self.loss_reads:
            raise StrategyError(
                "the loss reads what forward writes to the model itself "
                f"({', '.join(self.loss_reads[:3])}; by a "
                "global, a closure or a reference), and not what it writes to the replica",
                kind="state",
                fix="return that from forward, or use ddp, which has a process for each replica",
            )

    def of_output(self, name: str) -> Caveat | None:
        """What the person has to know where the loss reads an output that isn't one row for each
        sample.
        """
        kind = self.of_batch.get(name)
        read = (
            f'the loss reads the model\'s output "{name}", '
            if name
            else "the loss reads an output of the model, "
        )
        if kind in ("sum", "mean of items", "same") and not self.bends:
            return None
        if kind in ("sum", "mean") and self.bends:
            text = (
                f"{read}a {kind} over the samples of one forward, and makes something else of it "
                "than a sum (its "
                "square, say): each local batch has its own, so results differ from single-device "
                "training"
            )
            return Caveat("auxiliary loss", text, "mp and single keep them")
        if kind == "mean":
            text = (
                f"{read}a mean over the samples of one forward: where a later batch leaves some "
                "out (labels that are "
                "ignored), local batches are weighted wrongly unless the loss multiplies it by "
                "the number of the others"
            )
            return Caveat("auxiliary loss", text, "let the model return the sum")
        if kind == "neither":
            text = (
                f"{read}which is no sum or mean over samples (a loss for load balancing, say): "
                "each forward "
                "computes it over its local batch, so results differ from single-device training"
            )
            return Caveat("auxiliary loss", text, "mp and single keep them")
        text = (
            f"{read}computed over the samples of one forward: results are those of single-device "
            "training only if it "
            "is a sum over samples"
        )
        return Caveat("auxiliary loss", text)

    def of_loss(self, name: str) -> Caveat:
        """What the person has to know where the loss, or its part of that name, is one of
        `bent`.
        """
        which = f'part "{name}" of the loss' if name else "the loss"
        read = [
            output for output, kind in self.of_batch.items() if kind in ("neither", "whole numbers")
        ]
        of = f" ({', '.join(read)})" if read and all(read) else ""
        text = (
            f"{which} is no sum over samples with what the model computes over those of one "
            f"forward{of}: each local "
            "batch has its own, so results differ from single-device training"
        )
        return Caveat("auxiliary loss", text, "mp and single keep them")

    def of_microbatches(self, *, with_dropout: bool) -> Iterator[Caveat]:
        """What differs where one model computes a batch in micro-batches.

        Args:
            with_dropout: whether the model has dropout layers, of which it is known that they draw.
        """
        if self.writes is not None:
            text = (
                f'the model writes its parameter "{self.writes}" in forward, once per '
                "micro-batch, not once per batch"
            )
            yield Caveat("state", text)
        yield from self._once_per_microbatch()
        if self.counts_words:
            text = (
                "scale_grad_by_freq divides gradients by how often a word is in a micro-batch, "
                "not in the whole batch"
            )
            yield Caveat("mixing", text)
        if self.draws and not with_dropout:
            text = (
                "the model draws random numbers in forward, which differ from single-device "
                "training; they are"
            )
            yield Caveat("drawing", f"{text} reproducible")
        for name in self.collects:
            yield Caveat(
                "state",
                f'forward writes attribute "{name}" from the samples of each micro-batch, not of '
                "a batch",
            )
        if self.remembers:
            text = (
                "the model remembers something that is neither parameter nor buffer (the same "
                "inputs give other "
                "outputs the second time), and each micro-batch changes it, not each batch"
            )
            yield Caveat("state", text, "single or mp without accumulate keeps the results")
        if self.mixes:
            text = (
                "outputs depend on other samples of the batch, and each micro-batch is "
                "computed alone"
            )
            yield Caveat("mixing", text, "single or mp without accumulate keeps the results")
        yield from self._of_shares()

    def _once_per_microbatch(self) -> Iterator[Caveat]:
        """What is written oftener than once a batch."""
        for name in self.written:
            yield Caveat(
                "buffer",
                f'buffer "{name}" is written in forward, once per micro-batch, not once per batch',
            )
        for name in self.backward_writes:
            yield Caveat(
                "state",
                f'"{name}" is written in backward, once per micro-batch, not once per batch',
            )
        for name in self.counts:
            yield Caveat(
                "state",
                f'forward changes attribute "{name}" once per micro-batch, not once per batch',
            )
        for name in () if self.remembers else self.changes:
            yield Caveat(
                "state", f'the model changes "{name}", which is outside of it, once per micro-batch'
            )

    def _of_shares(self) -> Iterator[Caveat]:
        """What differs where a batch is computed in parts, on however many devices."""
        if self.uncopied is not None:
            text = (
                "the model's forward was not inspected, since the model can't be copied "
                f"({self.uncopied})"
            )
            yield Caveat(
                "uncopied",
                text,
                "lockstep verify shows whether results are those of single-device training",
            )
        if self.unparted is not None and not self.ragged:
            text = (
                "the model was not inspected further, since it can't take a part of its "
                f"inputs ({self.unparted})"
            )
            yield Caveat(
                "uncopied",
                text,
                "lockstep verify shows whether results are those of single-device training",
            )
        if self.ragged:
            text = (
                "inputs have several rows for a sample (words, nodes of graphs), or none (time "
                "first), so whether "
                "samples act on one another in forward (a norm over all rows, say) isn't seen"
            )
            yield Caveat("mixing", text, "lockstep verify shows it")
        if self.freezes is not None:
            text = (
                f'the model changes requires_grad of "{self.freezes}" in forward, for each '
                "part of a batch"
            )
            yield Caveat("state", text, "set it between updates")
        if self.leaves:
            where = ", ".join(f'"{name}"' for name in (*self.loss_reads, *self.changes)[:2])
            text = (
                "the loss reads what forward leaves beside its outputs "
                f"({where or 'in a variable'}), which is no sum "
                "over samples: each part of a batch leaves its own, so results differ from "
                "single-device training"
            )
            yield Caveat("auxiliary loss", text, "mp and single without accumulate keep them")
        if self.ungraded is not None:
            text = (
                "gradients of parts of the batch could not be compared with those of the "
                f"whole ({self.ungraded})"
            )
            yield Caveat("autograd function", text, "lockstep verify shows whether they add up")
        if self.backward is not None:
            text = (
                f'the gradient of "{self.backward}" is not the sum of those of parts of the '
                "batch, though the loss is "
                "(as far as rounding shows): a hook, an autograd function or a small term of the "
                "loss depends on what "
                "the other samples are"
            )
            yield Caveat(
                "autograd function", text, "single or mp without accumulate keeps the results"
            )

    def of_weighting(self) -> Iterator[Caveat]:
        """What differs where gradients are multiplied afterwards, by samples / items that the
        loss counted.
        """
        if self.nonlinear is not None:
            text = (
                f'backward to "{self.nonlinear}" is not linear (a hook or an autograd function '
                "that clamps gradients, "
                "say), and is given the gradient of the loss's total / samples, not of total / "
                "count: only afterwards "
                "is it known what the loss counts in the whole batch"
            )
            yield Caveat(
                "autograd function", text, "single or mp without accumulate keeps the results"
            )

    def of_evaluation(self) -> Iterator[Caveat]:
        """What differs where devices evaluate, or predict, a local batch each."""
        if self.mixes:
            yield MIXES
        for name in self.written:
            yield Caveat(
                "buffer",
                f'buffer "{name}" is written in evaluation, by each replica from its local batch',
            )
        if self.remembers:
            text = (
                "in evaluation the model remembers something that is neither parameter nor "
                "buffer, each replica its own"
            )
            yield Caveat("state", text, "make it a buffer that training writes")
        if self.draws:
            text = (
                "the model draws random numbers in evaluation, which differ from single-device "
                "ones; they are"
            )
            yield Caveat("drawing", f"{text} reproducible")
        yield from self._of_shares()

    def of_replicas(
        self, *, with_dropout: bool, accumulates: bool = False, on_threads: bool = False
    ) -> Iterator[Caveat]:
        """What differs where replicas compute a local batch each.

        Args:
            with_dropout: whether the model has dropout layers, of which it is known that they draw.
            accumulates: whether they compute it in micro-batches.
            on_threads: whether replicas are threads of one process.
        """
        if accumulates:
            yield from self._once_per_microbatch()
        for name in self.changes if on_threads and not self.remembers else ():
            text = (
                f'the model changes "{name}", which is outside of it, once per replica, not '
                "once per batch"
            )
            yield Caveat(
                "state", text, "make it a buffer, or use ddp, which has a process for each replica"
            )
        if self.draws_elsewhere:
            text = (
                "the model draws from Python's or numpy's random in forward: the numbers differ "
                "from single-device "
                "training, and under dp their order is left to chance"
            )
            yield Caveat("drawing", text, "draw from torch")
        elif self.draws and not with_dropout:
            text = (
                "the model draws random numbers in forward, which differ from single-device "
                "training; they are"
            )
            yield Caveat("drawing", f"{text} reproducible")
        for name in self.follows:
            text = (
                f'buffer "{name}" depends on the local batch: all replicas follow the first, '
                "one device would not"
            )
            yield Caveat("buffer", text)
        for name in self.collects:
            text = (
                f'forward writes attribute "{name}" from its local batch: each replica has its own'
            )
            yield Caveat("state", text, STATE_OF_ROWS)
        for name in self.backward_follows:
            text = (
                f'backward writes "{name}" from its local batch: each replica has its own, one '
                "device would not"
            )
            yield Caveat("state", text, "single keeps the results")
        if self.remembers:
            text = (
                "the model remembers something that is neither parameter nor buffer (the same "
                "inputs give other "
                "outputs the second time): each replica has its own"
            )
            yield Caveat("state", text, STATE_OF_ROWS)
        if self.mixes:
            yield MIXES
        yield from self._of_shares()

    def of_empty_share(self, buffers: Collection[str]) -> Iterator[Caveat]:
        """What differs where a rank has no sample of a batch; ``buffers``, by name, are the
        first rank's then.
        """
        every = [f'forward changes attribute "{name}"' for name in self.counts]
        every += [f'the model changes "{name}", which is outside of it,' for name in self.changes]
        every += [
            f'backward writes "{name}"' for name in self.backward_writes if name not in buffers
        ]
        for what in every:
            text = f"{what} in each call, and a rank without a sample of a batch makes none"
            yield Caveat("state", text, "make it a buffer that forward writes")


STATE_OF_ROWS = (
    "keep what belongs to the rows of a batch by get_extra_state and set_extra_state "
    "(docs/resume.md), else in a buffer"
)

MIXES = Caveat(
    "mixing",
    "outputs depend on other samples of the batch, and each replica sees only its local batch",
    "single keeps the results",
)

BESIDE = Caveat(
    "auxiliary loss",
    "the loss reads what forward computes beside the outputs that can be cut (an attribute, a "
    "variable outside of the "
    "model): each local batch or micro-batch has its own, and whether it is additive over samples "
    "can't be checked",
    "let forward return it, in a tuple or a dict; mp and single without accumulate keep the "
    "results",
)
