"""Every exception that Lockstep raises on purpose.

::

    LockstepError
    ├── InputError            what was asked can't be done as it stands; nothing was made   exit code 2
    │   ├── JobError          a field of the job, or a setting
    │   ├── DeviceError       devices that don't exist, or not that many
    │   ├── StrategyError     a strategy, or a combination that can't keep the numbers
    │   │   └── TooFewLayers  more stages than layers that forward comes to
    │   ├── LossError         a loss that can't be totalled, or can't take the outputs
    │   └── FolderError       a run folder that can't be made, read or written
    ├── NotEqual              an exported file doesn't compute what the run does            exit code 3
    └── RunError              the run failed on the way; its folder is kept                 exit code 1
        ├── Lost              a process of the training was killed; --restarts begins again from the last checkpoint
        │   └── RankFailed    a rank raised or died: which, at which step, its traceback
        ├── NonFiniteLoss     the loss became NaN or infinite: rank and step
        ├── SampleError       a sample of the dataset raised: its index
        ├── ItemFailed        an item of a map raised, or its process died: its index, its traceback
        ├── OutOfMemory       device, step, share, and the setting that helps
        └── SaveError         the state could not be written (a full disk, say)

The message of each is one line: what was wrong, and what to do. What a program acts upon is in
attributes (``kind``, ``fix``), never in the words of a message. `lockstep.run.events.Caveat` is
a fact of the same form that is no error.

The command imports this before all else, so it imports next to nothing.
"""

from __future__ import annotations

import functools


class LockstepError(Exception):
    """The root of Lockstep's exceptions.

    Attributes:
        kind: the kind of `Caveat` that it is; "" where it is of none.
        text: what was wrong.
        fix: what to do; "" where the text says it.
    """

    exit_code = 1
    kind = ""

    def __init__(self, text: str = "", *, kind: str = "", fix: str = "") -> None:
        super().__init__(f"{text}: {fix}" if fix else text)
        self.text = text
        self.fix = fix
        if kind:
            self.kind = kind


class InputError(LockstepError):
    """What was asked can't be done as it stands; nothing was made."""

    exit_code = 2


class JobError(InputError):
    """A field of the job, or a setting given for it, is wrong. The message begins with the
    field's name.
    """


class DeviceError(InputError):
    """Devices that don't exist, or more of them than there are."""


class StrategyError(InputError):
    """An unknown strategy, or a combination that can't keep the results of single-device
    training.
    """


class TooFewLayers(StrategyError):
    """More stages than layers that forward comes to."""


class LossError(InputError):
    """A loss that can't be turned into total and count, or can't take the model's outputs."""

    kind = "loss"


class FolderError(InputError):
    """A run folder that can't be made, read or written."""


class NotEqual(LockstepError):
    """An exported file doesn't compute what the run does."""

    exit_code = 3


class RunError(LockstepError):
    """The run failed on the way; what it had saved is kept."""


class Lost(RunError):
    """A process of the training was killed, or failed; the training can go on from its last
    checkpoint.
    """


class RankFailed(Lost):
    """A rank raised or died.

    Attributes:
        rank: which rank failed first.
        step: the step it was in (0 before the first), or None where that isn't known.
        traceback: that rank's own traceback as text, or "" where it died without one.
    """

    def __init__(
        self, message: str, rank: int = 0, step: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.traceback = traceback


class NonFiniteLoss(RunError):
    """The loss became NaN or infinite."""


class SampleError(RunError):
    """A sample of the dataset raised."""


class ItemFailed(RunError):
    """The function of a map raised for an item, or the process that worked on it died.

    Attributes:
        index: of the item, from 0; of the first of some items where the process died at one of
            them; None where it died between two items.
        traceback: the traceback in that process as text, or "" where it died without one.
    """

    def __init__(self, message: str, index: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.index = index
        self.traceback = traceback


class OutOfMemory(RunError):
    """A device's memory was not enough."""


class SaveError(RunError):
    """The state of a run could not be written."""


def nearest(name: str, names: list[str]) -> str:
    """Ask ``did you mean "x"?`` of a name that isn't among ``names``, or else list what there is."""
    for near in near_names(name, names):
        return f'did you mean "{near}"?'
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"there are: {', '.join(names[:20])}{more}"


def near_names(name: str, names: list[str]) -> list[str]:
    """Return the name that a person may have meant; none where no name is near."""
    import difflib

    bare = {one.strip("-"): one for one in names}
    return [bare[near] for near in difflib.get_close_matches(name.strip("-"), bare, 1)]


def counted(number: int, what: str, ending: str = "s") -> str:
    """Write a number of things, which may be one: ``1 device``, ``2,000 samples``, ``3
    micro-batches``.
    """
    return f"{number:,} {what}{'' if number == 1 else ending}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or else the name of its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def own_traceback(error: BaseException) -> str:
    """Return an exception's traceback as text, from the person's own code on where that is in it.

    What called the person's code (this package, PyTorch) is of no use to them.
    """
    import traceback

    trace = error.__traceback__
    while trace is not None and not is_own_code(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
    return "".join(lines)


@functools.cache
def is_own_code(file: str) -> bool:
    """Return whether a file is the person's own code: neither installed, nor of this package."""
    import sysconfig
    from pathlib import Path

    if "site-packages" in file or "dist-packages" in file:  # of the system's Python too
        return False
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "scripts")]
    return not file.startswith((*installed, str(Path(__file__).parent), "<frozen"))


def error_line(error: BaseException) -> str:
    """Describe an error in one line, with the line of the person's own code that raised it:
    ``TypeError: what (file.py, line 12)``.
    """
    line = type(error).__name__
    if str(error).strip():
        line += f": {first_line(error)}"
    return line + own_line(error) + _hint(error)


def own_line(error: BaseException) -> str:
    """Return the last line of the person's own code in a traceback: `` (file.py, line 12)``; ""
    where there is none.
    """
    import traceback
    from pathlib import Path

    where = ""
    for file, number, _, _ in traceback.extract_tb(error.__traceback__):
        if is_own_code(file) and not file.startswith("<"):
            where = f" ({Path(file).name}, line {number})"
    return where


def _hint(error: BaseException) -> str:
    """Return what to do about an error, where that is known."""
    import os

    path = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(path, str) and not os.path.isabs(path):
        return f"; relative paths are taken from {os.getcwd()}, where the command was started"
    if "not compiled with CUDA" in str(error) or "No CUDA GPUs are available" in str(error):
        return (
            "; build models and data on the CPU, without .cuda() and .to(...): Lockstep moves "
            "them to the devices"
        )
    return ""
