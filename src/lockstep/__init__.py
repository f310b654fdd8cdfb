"""Lockstep trains an ordinary PyTorch model on many devices, with the results of one.

The public names are those of ``__all__``. They are loaded when first used: the command starts its
server of ranks before it imports torch, so importing this package must not import torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep import callbacks as callbacks
    from lockstep import parallel as parallel
    from lockstep.compare.compare import compare as compare
    from lockstep.compare.tune import tune as tune
    from lockstep.data import batches as batches
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.export import export as export
    from lockstep.job import Job as Job
    from lockstep.launch import launch as launch
    from lockstep.launch.devices import Device as Device
    from lockstep.launch.world import World as World
    from lockstep.map import map as map
    from lockstep.model.losses.loss import Loss as Loss
    from lockstep.model.losses.model_loss import model_loss as model_loss
    from lockstep.parallelize import parallelize as parallelize
    from lockstep.pipelining.planner.partition import partition as partition
    from lockstep.prediction.predict import predict as predict
    from lockstep.run.events import Event as Event
    from lockstep.train import train as train
    from lockstep.training.callbacks.callback import Callback as Callback
    from lockstep.training.evaluate_run import evaluate as evaluate
    from lockstep.training.run import Run as Run
    from lockstep.verify import verify as verify
    from lockstep.version import __version__ as __version__

_HOME = {
    "__version__": "lockstep.version",
    "Callback": "lockstep.training.callbacks.callback",
    "Device": "lockstep.launch.devices",
    "Event": "lockstep.run.events",
    "Job": "lockstep.job",
    "LockstepError": "lockstep.errors",
    "Loss": "lockstep.model.losses.loss",
    "Run": "lockstep.training.run",
    "World": "lockstep.launch.world",
    "batches": "lockstep.data",
    "callbacks": "lockstep.callbacks",
    "compare": "lockstep.compare.compare",
    "evaluate": "lockstep.training.evaluate_run",
    "export": "lockstep.export",
    "launch": "lockstep.launch",
    "map": "lockstep.map",
    "model_loss": "lockstep.model.losses.model_loss",
    "parallel": "lockstep.parallel",
    "parallelize": "lockstep.parallelize",
    "partition": "lockstep.pipelining.planner.partition",
    "predict": "lockstep.prediction.predict",
    "train": "lockstep.train",
    "tune": "lockstep.compare.tune",
    "verify": "lockstep.verify",
}

_MODULES = {"callbacks", "parallel"}

__all__ = [*sorted(_HOME.keys() - {"__version__"}), "__version__"]


class _Package(types.ModuleType):
    """The package itself: where a function and its module share a name (``train``), the function
    is public.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and name not in _MODULES and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
        module = importlib.import_module(_HOME[name])
        value = module if name in _MODULES else getattr(module, name)
        super().__setattr__(name, value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        # Functions that are sent to ranks may refer to this package; it goes by name, as any
        # module.
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
