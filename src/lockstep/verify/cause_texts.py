"""Cause texts: the words of every cause that ``verify`` can name: kind, text with places for what
was found, and fix.

A kind with several texts has a word after a colon. `docs/verify.md` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.errors import DeviceError, FolderError, InputError, LockstepError, told
from lockstep.launch.events import Caveat


def _read(table: str) -> dict[str, tuple[str, str]]:
    causes = {}
    for entry in table.strip().split("\n\n"):
        name, _, words = entry.partition("\n")
        text, _, fix = " ".join(words.split()).partition(" -> ")
        causes[name] = text, fix
    return causes


CAUSES = _read("""
batchnorm
  BatchNorm normalizes over each replica's local batch; over the global batch the results agree
  ({left:.0e})
  -> sync_batchnorm=True (--sync-batchnorm)

batchnorm: not synchronised
  BatchNorm normalizes over each replica's local batch; with its running statistics the results
  agree ({left:.0e})
  -> ddp or dp with sync_batchnorm=True, or layers that see one sample at a time (GroupNorm,
  LayerNorm)

drawing
  the model draws random numbers in {where}, which differ from single-device training; without
  them the results agree ({left:.0e})
  -> none needed where any draw will do; mp draws those of one device, or let the dataset draw,
  by sample

drawing: elsewhere
  the model draws random numbers {whence}, which differ from single-device training; they can't
  be taken out, so nothing else is compared
  -> draw from torch in forward, or let the dataset draw, by sample

mixing
  outputs depend on other samples of the batch in or before {layer}: single-device results
  change as well when the batch is split
  -> mp or single, which see the whole batch; or a layer that sees one sample at a time

mixing: in evaluation
  "{loss}" of the evaluation depends on how its batches are split, and training doesn't: in eval
  mode outputs depend on other samples of the batch, or the loss is not a mean over samples
  -> a model that sees one sample at a time in eval mode, or evaluate under mp or single

collate
  collate makes other rows of a local batch than of the global batch (it pads to the longest
  sample, or mixes samples), and {layer} gives other results for them
  -> a collate that makes the same of a sample in any batch (one length for all, say), or a
  model that masks the padding; mp and single give it the whole batch

metric
  {names} of the evaluation depends on how its batches are split, and the loss doesn't: it is
  not a sum over items
  -> return (total, count), each summed over items, or give a metric of torchmetrics, which
  keeps what it needs

state
  "{name}" is neither parameter nor buffer of the model, and changes in training by what a
  forward sees
  -> a buffer (register_buffer) that doesn't depend on the local batch; mp or single keep it as
  it is

state: parameter
  parameter "{name}" has no gradient and changes: the model writes it, from what it sees of the
  local batch
  -> let it depend on the parameters only, or take mp or single, which see the whole batch

buffer of one rank
  buffer "{name}" is updated on {replicas} only, and acts on all
  -> update it on every rank alike, before it is used

buffer
  buffer "{name}" depends on the local batch: each replica computes its own, all follow the
  first, and one device would compute another
  -> let it depend on the parameters only, or take mp or single, which see the whole batch

autograd function
  {which} depends on the number of samples that it sees: it divides by it, say{seen}
  -> leave the mean over samples to the loss, and let backward treat each sample by itself

hook
  a hook on parameter {names} is not linear in the gradient: it clips it, normalizes it or adds
  to it, say, for each local batch
  -> clip_norm, or weight_decay, which see the whole gradient; mp gives hooks that of the whole
  batch

unseeded model: initial values
  the model draws unseeded numbers when it is built: "{name}" has other values each time
  -> draw initial values from torch's, random's or numpy.random's global generator, which are
  seeded

unseeded model
  single-device training can't be repeated on the same samples, with deterministic operators
  either: the model, or the optimizer, draws unseeded numbers, or counts in a class or a module
  -> draw from torch's global generator (or from one that is seeded in forward); count in a
  buffer

operators
  operators that are not deterministic{name}: single-device training can't be repeated
  -> torch.use_deterministic_algorithms(True) refuses or replaces them

loss
  the loss is not a mean over samples: its parts, weighted by their counts, don't add up to the
  whole
  -> return (total, count) from it, each summed over samples; mp and single give it the whole
  batch

auxiliary loss
  the loss reads {output}, which is no sum over samples, or of which it makes none (a loss for
  load balancing, say)
  -> mp or single on whole batches; or a term that is a sum over samples

cut
  the batch's cutting alone changes the results: single with {parts} micro-batches differs from
  single with the whole batch, by {apart:.0e}
  -> accumulate=1, or one micro-batch (mp instead of pp)

refused: shape
  of a local batch the model gives what the loss doesn't take: {said}
  -> outputs with a row for each sample, also where there is only one: squeeze(1), say, for
  squeeze()

unseeded data
  the dataset draws unseeded numbers: the same sample of the same epoch is another one each time
  -> draw from torch's, random's or numpy.random's global generator, which are seeded for each
  sample

sampler
  the strategy {faults} of batch {batch} in epoch {epoch}, of which each counts once
  -> give every sample of a global batch to one device; leave a device without one where there
  are too few

scheduler
  the learning rate is {rate:.6g} against {reference:.6g} in update {update}
  -> step the scheduler once per update, on one rank's clock

summed gradient
  the gradient is {devices} times one device's: summed over the devices where it should be
  averaged
  -> divide by the number of devices, or run backward on total / samples of the global batch

scaled gradient
  the gradient is {ratio:.6g} times one device's: weighted otherwise than by samples
  -> sum totals and counts

drift
  parameter "{name}" has come to differ between ranks: something but the optimizer writes it, or
  the optimizer draws other random numbers on each rank
  -> let only the optimizer write parameters, and sum every gradient over the ranks

update
  the gradients of update {number} agree before clipping, and the parameters after it don't:
  clipping, or the optimizer, differs
  -> clip what is summed over all devices, and give each rank the same optimizer

start
  the strategy begins with other values of "{name}"
  -> build the model under the job's seed

declared
  {text}
  -> an exact strategy: ddp, dp, mp or pp

announced
  not traced to one layer; said before training: {text}
  -> as the line says

failed
  the strategy fails: {error}
  -> a forward that takes any local batch

refused
  {text}
  -> another strategy

unknown
  none of the known causes: repeated runs agree, and so does single-device training when its
  batches are split
  -> look at the first layer that differs; where the strategy is one of Lockstep's, please
  report it
""")


def cause(name: str, /, **seen: object) -> Caveat:
    """The cause of this name in the table, with what was seen."""
    text, fix = CAUSES[name]
    return Caveat(name.partition(":")[0], text.format(**seen), fix)


def of_refusal(error: Exception) -> Caveat | None:
    """What a refusal, or a failure, under the strategy alone says of the job; None where it
    isn't of the job.
    """
    if isinstance(error, DeviceError | FolderError):
        return None
    if not isinstance(error, LockstepError) or not (error.kind or isinstance(error, InputError)):
        return cause("failed", error=told(error))
    if error.kind == "shape":
        return cause("refused: shape", said=error)
    kind = error.kind or "refused"
    return Caveat(kind, error.text, error.fix or CAUSES.get(kind, CAUSES["refused"])[1])


def named(layer: str, kind: str) -> str:
    """``"body.1" (BatchNorm2d)``, or the model itself."""
    return f'"{layer}" ({kind})' if layer else f"the model's own forward ({kind})"


def quoted(names: Sequence[str]) -> str:
    """``"a", "b"``: four of them at most."""
    return ", ".join(f'"{name}"' for name in names[:4]) + (", ..." if len(names) > 4 else "")


def listed(what: str, numbers: Sequence[int]) -> str:
    """``samples 1, 2, 3``: six of them at most."""
    shown = ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"


def replica_buffer(own: Mapping[str, Sequence[int]]) -> Caveat:
    """A buffer that is other on each replica; the first that only some of them updated."""
    for name, replicas in own.items():
        if replicas:
            return cause("buffer of one rank", name=name, replicas=listed("replica", replicas))
    return cause("buffer", name=next(iter(own)))


def own_backward(functions: Sequence[str], ratios: Mapping[str, float]) -> Caveat:
    """A backward that depends on how many samples it sees."""
    seen = ""
    scaled = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > 1e-6}
    if scaled:
        name, ratio = next(iter(scaled.items()))
        seen = f' (the gradient of "{name}" is {ratio:.4g} times as large when the batch is split)'
    which = (
        f"autograd function {quoted(functions)}"
        if functions
        else "a backward of the model, or a hook in it,"
    )
    return cause("autograd function", which=which, seen=seen)
