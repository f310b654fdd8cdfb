"""A trained model as a function from tensors to tensors, with an example of its inputs, and which
dimensions vary.

A file is called as the job calls the model. Numbers and words among the inputs become part of it.
Outputs are a tensor, a tuple of tensors, or a dict of them in the place of an object whose class
the reader of a file may not have.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from lockstep.errors import InputError, told
from lockstep.tensors.pytree import each, named_tensors, tensors


def plain(outputs: Any) -> Any:
    """The outputs without classes of the model's own: a tensor, a tuple of tensors, or a dict of
    tensors by name.
    """
    if type(outputs) in (tuple, list) and all(isinstance(part, torch.Tensor) for part in outputs):
        return tuple(outputs)
    return outputs if isinstance(outputs, torch.Tensor) else dict(named_tensors(outputs))


def arguments(inputs: Any, *, all: bool = False) -> dict[Any, Any]:
    """The arguments of a model by name or position: those that hold tensors, or all."""
    several = inputs if type(inputs) in (tuple, list) else (inputs,)
    every = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(several))
    return {key: value for key, value in every.items() if all or any(True for _ in tensors(value))}


def split(given: dict[Any, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position, and by name."""
    return (
        ((), given) if all(isinstance(key, str) for key in given) else (tuple(given.values()), {})
    )


class Exportable:
    """A model in evaluation mode whose forward takes and gives plain tensors.

    ``example`` is what it is called with, by name or position, ``names`` what each tensor of that
    is called, and ``dims`` what the dimensions of each that vary are called.
    """

    def __init__(
        self, model: nn.Module, batches: list[Any], sizes: list[int], dtype: torch.dtype | None
    ) -> None:
        """Prepare a model; what varies between inputs of batches of these sizes varies in the file.

        The first batch is the example. With ``dtype`` the model computes in that, and takes and
        gives the run's. An InputError says that the batches differ in more than the sizes of
        tensors.
        """
        if len({repr(each(lambda t: f"{t.dtype} {t.dim()}", batch)) for batch in batches}) > 1:
            raise InputError(
                "inputs: more than the sizes of tensors changes from batch to batch: use tensors "
                "for it"
            )
        self.model, self.example = model.eval().requires_grad_(False), arguments(batches[0])
        named = dict(
            zip(self._replace_forward(batches[0], dtype), self.example.values(), strict=True)
        )
        self.names = [name for name, _ in named_tensors(named)]
        self.dims: list[dict[int, str]] = [{} for _ in self.names]
        shapes = zip(
            *([t.shape for t in tensors(arguments(batch))] for batch in batches), strict=True
        )
        for name, dims, of_one in zip(self.names, self.dims, shapes, strict=True):
            for d, lengths in enumerate(zip(*of_one, strict=True)):
                if len(set(lengths)) > 1:
                    dims[d] = "batch" if d == 0 and list(lengths) == sizes else f"{name}_{d}"

    def _replace_forward(self, inputs: Any, dtype: torch.dtype | None) -> list[str]:
        """Give the model a forward with a parameter for each argument that holds tensors; gives
        their names.
        """
        forward, every, keys = self.model.forward, arguments(inputs, all=True), list(self.example)
        known = [
            p.name
            for p in inspect.signature(forward).parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        own = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)

        def cast(nest: Any, wanted: torch.dtype | None) -> Any:
            return (
                nest
                if dtype is None
                else each(lambda t: t.to(wanted) if t.is_floating_point() else t, nest)
            )

        def exported(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = split(
                cast({**every, **dict(zip(keys, args, strict=False)), **kwargs}, dtype)
            )
            return cast(plain(forward(*args, **kwargs)), own)

        names = [
            key if isinstance(key, str) else known[key] if key < len(known) else f"input_{key}"
            for key in keys
        ]
        named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        exported.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]  # torch.export names inputs so
        self.model.forward = exported
        self.model.to(dtype)
        return names

    def __str__(self) -> str:
        """``images float32(batch, 3, 32, 32)``: each tensor that the file takes."""
        words = []
        for name, tensor, dims in zip(self.names, tensors(self.example), self.dims, strict=True):
            shape = ", ".join(dims.get(d, str(size)) for d, size in enumerate(tensor.shape))
            words.append(f"{name} {str(tensor.dtype).removeprefix('torch.')}({shape})")
        return ", ".join(words)

    def program(self) -> ExportedProgram:
        """The model as ``torch.export`` has it, without samples of the data or source lines; an
        InputError if not.
        """
        shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
        for tensor, dims in zip(tensors(self.example), self.dims, strict=True):
            if dims:
                shapes[tensor] = dict.fromkeys(dims, Dim.DYNAMIC)
        dynamic = shapes if any(self.dims) else None
        try:
            with torch.no_grad():
                program = torch.export.export(
                    self.model, *split(self.example), dynamic_shapes=dynamic, strict=False
                )
        except Exception as error:
            if fixed := next(
                (line for line in str(error).splitlines() if "specialized" in line), None
            ):
                why = (
                    f"the model can't have each size that varies in {self}: "
                    f"{fixed.strip(' -').split('. ')[0]}"
                )
                raise InputError(f"{why}: --dynamic none fixes them") from error
            raise InputError(f"torch.export can't take this model: {told(error)}") from error
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)
        program.example_inputs = None
        return program
