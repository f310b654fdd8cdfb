"""A trained model as a function from tensors to tensors, with an example of its inputs, and which
dimensions vary.

A file is called as the job calls the model. Numbers and words among the inputs become part of it.
Outputs are a tensor, a tuple of tensors, or a dict of them in the place of an object whose class
the reader of a file may not have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from lockstep.errors import InputError, error_line
from lockstep.tensors.pytree import each, named_tensors, parts, tensors


def plain(outputs: Any) -> Any:
    """Return outputs without classes of the model's own: a tensor, a tuple of tensors, or a dict of
    tensors by name.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    inside = parts(outputs) or ()
    are_tensors = all(isinstance(part, torch.Tensor) for part in inside)
    if type(outputs) in (tuple, list) and are_tensors:
        return tuple(outputs)
    return dict(named_tensors(outputs))


def all_arguments(inputs: Any) -> dict[Any, Any]:
    """Return the arguments of a model by name or position."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if type(inputs) in (tuple, list):
        return dict(enumerate(inputs))
    return {0: inputs}


def arguments(inputs: Any) -> dict[Any, Any]:
    """Return the arguments of a model that hold tensors."""
    found = {}
    for key, value in all_arguments(inputs).items():
        if any(True for _ in tensors(value)):
            found[key] = value
    return found


def split(given: dict[Any, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments by position, and by name.

    Args:
        given: by name, or all by position.
    """
    if all(isinstance(key, str) for key in given):
        return (), given
    return tuple(given.values()), {}


class Exportable:
    """A model in evaluation mode whose forward takes and gives plain tensors.

    Args:
        model: of the run. It is changed.
        batches: inputs of several batches. The first one is the example.
        sizes: the samples of each batch.

    Attributes:
        model: with the new forward.
        example: what it is called with, by name or position.
        names: of each tensor of the example.
        dims: of each tensor, the dimensions that vary from batch to batch, and their names.

    Raises:
        InputError: the batches differ in more than the sizes of tensors.
    """

    def __init__(self, model: nn.Module, batches: list[Any], sizes: list[int]) -> None:
        kinds = set()
        for batch in batches:
            kind = each(lambda t: f"{t.dtype} {t.dim()}", batch)
            kinds.add(repr(kind))
        if len(kinds) > 1:
            raise InputError(
                "inputs: more than the sizes of tensors changes from batch to batch: use tensors "
                "for it"
            )
        self.model = model.eval().requires_grad_(False)
        self.example = arguments(batches[0])
        parameters = self._replace_forward(batches[0])
        named = dict(zip(parameters, self.example.values(), strict=True))
        self.names = [name for name, _ in named_tensors(named)]

        self.dims: list[dict[int, str]] = []
        of_batches = [list(tensors(arguments(batch))) for batch in batches]
        for name, *alike in zip(self.names, *of_batches, strict=True):
            dims = {}
            shapes = [tensor.shape for tensor in alike]
            for d, lengths in enumerate(zip(*shapes, strict=True)):
                if len(set(lengths)) > 1:
                    is_batch = d == 0 and list(lengths) == sizes
                    dims[d] = "batch" if is_batch else f"{name}_{d}"
            self.dims.append(dims)

    def _replace_forward(self, inputs: Any) -> list[str]:
        """Give the model a forward with a parameter for each argument that holds tensors.

        Args:
            inputs: of the example.

        Returns:
            The names of these parameters.
        """
        forward = self.model.forward
        every = all_arguments(inputs)
        keys = list(self.example)

        def exported(*args: Any, **kwargs: Any) -> Any:
            """Compute the outputs; arguments without tensors are those of the example."""
            by_position = dict(zip(keys, args, strict=False))
            args, kwargs = split({**every, **by_position, **kwargs})
            return plain(forward(*args, **kwargs))

        names = _names_of(forward, keys)
        # torch.export calls inputs by the names in a signature.
        named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        exported.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        self.model.forward = exported
        return names

    def __str__(self) -> str:
        """Return ``images float32(batch, 3, 32, 32)``: each tensor that the file takes."""
        words = []
        for name, tensor, dims in zip(self.names, tensors(self.example), self.dims, strict=True):
            sizes = [dims.get(d, str(size)) for d, size in enumerate(tensor.shape)]
            shape = ", ".join(sizes)
            dtype = str(tensor.dtype).removeprefix("torch.")
            words.append(f"{name} {dtype}({shape})")
        return ", ".join(words)

    def program(self) -> ExportedProgram:
        """Return the model as ``torch.export`` has it, without samples of the data or source lines.

        Raises:
            InputError: ``torch.export`` can't take it.
        """
        shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
        for tensor, dims in zip(tensors(self.example), self.dims, strict=True):
            if dims:
                shapes[tensor] = dict.fromkeys(dims, Dim.DYNAMIC)
        dynamic = shapes if any(self.dims) else None

        try:
            with torch.no_grad():
                program = torch.export.export(
                    self.model,
                    *split(self.example),
                    dynamic_shapes=dynamic,
                    strict=False,
                )
        except Exception as error:
            advice = "; --dynamic none fixes all sizes" if dynamic else ""
            raise InputError(
                f"torch.export can't take this model: {error_line(error)}{advice}"
            ) from error

        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)
        program.example_inputs = None
        return program


def _names_of(forward: Callable[..., Any], keys: list[Any]) -> list[str]:
    """Return a name for each argument of a forward.

    Args:
        forward: of the model.
        keys: the name or the position of each argument; what is behind ``*args`` has a number.
    """
    known = []
    for p in inspect.signature(forward).parameters.values():
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            known.append(p.name)

    names = []
    for key in keys:
        if isinstance(key, str):
            names.append(key)
        elif key < len(known):
            names.append(known[key])
        else:
            names.append(f"input_{key}")
    return names
