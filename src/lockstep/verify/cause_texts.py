"""Cause texts: the words of every cause that ``verify`` finds: kind, text with places for what was
found, and fix. A refusal (``unseeded data``, ``sampler``) has words of its own.

A kind with several texts has a word after a colon. `docs/verify.md` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import DeviceError, FolderError, InputError, LockstepError, error_line
from lockstep.run.events import Caveat


def _read(table: str) -> dict[str, tuple[str, str]]:
    """Read the table: text and fix, by name."""
    causes = {}
    for entry in table.strip().split("\n\n"):
        name, _, words = entry.partition("\n")
        text, _, fix = " ".join(words.split()).partition(" -> ")
        causes[name] = text, fix
    return causes


CAUSES = _read("""
batchnorm
  BatchNorm normalizes over each replica's local batch; with its running statistics the results
  agree ({left:.0e})
  -> sync_batchnorm=True (--sync-batchnorm) under ddp or dp, or layers that normalize each
  sample by itself (GroupNorm, LayerNorm)

drawing
  the model draws random numbers in {where}, which differ from single-device training; without
  them the results agree ({left:.0e})
  -> no fix if other random numbers are acceptable; else mp, which draws those of one device, or
  let the dataset draw, by sample

drawing: elsewhere
  the model draws random numbers that can't be taken out (from Python's or numpy's random, or in an
  extension), which differ from single-device training, so nothing else is compared
  -> draw from torch in forward, or let the dataset draw, by sample

mixing
  outputs depend on other samples of the batch in or before {layer} (a layer that mixes samples or
  keeps a state, or a collate that pads to the longest sample): single-device results change as well
  when the batch is split
  -> mp or single, which don't split the batch; or a layer that treats each sample by itself and keeps
  nothing of the batch, and padding that the model masks

mixing: in evaluation
  "{loss}" of the evaluation depends on how its batches are split, and training doesn't: in eval
  mode outputs depend on other samples of the batch, or the loss is not a mean over samples
  -> a model that treats each sample by itself in eval mode, or evaluate under mp or single

metric
  {names} of the evaluation depends on how its batches are split, and the loss doesn't: it is
  not a sum over items
  -> return (total, count), each summed over items, or give a metric of torchmetrics, which
  keeps what it needs

state
  parameter "{name}" has no gradient and changes: the model writes it, from the
  local batch
  -> let it depend on the parameters only, or take mp or single, which don't split the batch

buffer
  buffer "{name}" depends on the local batch, or only some replicas update it: one device would
  compute another
  -> let it depend on the parameters only, and update it on every rank alike; or take mp or
  single, which don't split the batch

autograd function
  a backward of the model, or a hook in it, depends on which samples are computed together: it
  divides by the number of samples, say, or clips
  -> leave the mean over samples to the loss, and let backward treat each sample by itself; clip
  by clip_norm

unseeded model
  single-device training can't be repeated: the model (when it is built, or in forward), the
  optimizer or the dataset draws unseeded numbers, counts in a class or a module, or has operators
  that are not deterministic
  -> draw from torch's global generator (or from one that is seeded in forward), in a dataset and
  for initial values also from random's or numpy.random's, which are seeded; count in a buffer;
  torch.use_deterministic_algorithms(True) names such operators

loss
  the loss is not a mean over samples: its parts, weighted by their counts, don't add up to the
  whole; or it uses an output that is computed from all samples together (for load balancing, say)
  -> return (total, count) from it, each summed over samples; or divide by counts= of the whole
  batch, where it has several means; mp and single give it the whole batch

cut
  cutting the batch is enough to change the results: single with {parts} micro-batches differs from
  single with the whole batch, by {apart:.0e}
  -> accumulate=1, or one micro-batch (mp instead of pp)

refused: shape
  for a local batch the loss doesn't accept the model's outputs: {error}
  -> outputs with a row for each sample, also where there is only one: squeeze(1), say, for
  squeeze()

drift
  parameter "{name}" differs between ranks: something other than the optimizer writes it, or the
  optimizer draws other random numbers on each rank
  -> let only the optimizer write parameters, and sum every gradient over the ranks

update
  the gradients of update {number} agree before clipping, and the parameters after it don't:
  clipping, the optimizer or its learning rate differs
  -> clip what is summed over all devices, give each rank the same optimizer, and step the
  scheduler once per update

declared
  {text}
  -> an exact strategy: ddp, dp, mp or pp

failed
  the strategy fails: {error}
  -> a forward that takes any local batch

refused
  {text}
  -> another strategy

unknown
  none of the known causes: repeated runs agree, and so does single-device training when its
  batches are split
  -> look at the notes above and at the first layer that differs; where the strategy is one of
  Lockstep's, please report it
""")


def cause(name: str, /, **seen: object) -> Caveat:
    """Return the cause of this name in the table, with what was seen."""
    text, fix = CAUSES[name]
    return Caveat(name.partition(":")[0], text.format(**seen), fix)


def of_refusal(error: Exception) -> Caveat | None:
    """Return what a refusal, or a failure, under the strategy alone shows of the job.

    Args:
        error: what the strategy raised.

    Returns:
        The cause; None where the error has another reason than the job.
    """
    if isinstance(error, DeviceError | FolderError):
        return None

    is_refusal = isinstance(error, InputError)
    if not isinstance(error, LockstepError) or not (error.kind or is_refusal):
        return cause("failed", error=error_line(error))
    if error.kind == "shape":
        return cause("refused: shape", error=error)

    kind = error.kind or "refused"
    fix = CAUSES.get(kind, CAUSES["refused"])[1]
    return Caveat(kind, error.text, error.fix or fix)


def named(layer: str, kind: str) -> str:
    """Return ``"body.1" (BatchNorm2d)``, or words for the model itself."""
    if layer:
        return f'"{layer}" ({kind})'
    return f"the model's own forward ({kind})"


def quoted(names: Sequence[str]) -> str:
    """Return ``"a", "b"``: four of the names at most."""
    shown = ", ".join(f'"{name}"' for name in names[:4])
    return shown + ", ..." if len(names) > 4 else shown
