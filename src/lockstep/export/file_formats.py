"""The formats: how each is written, and loaded again."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.weights import save_weights, take_weights
from lockstep.errors import InputError, NotEqual, error_line
from lockstep.export.exportable import Exportable, arguments, split
from lockstep.tensors.pytree import described, each, tensors

ENDINGS = {
    "safetensors": ".safetensors",
    "torch-export": ".pt2",
    "onnx": ".onnx",
    "tensorrt": ".pt2",
}

_NEEDS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "tensorrt": ("torch_tensorrt",)}
_INSTALL = {
    "onnx": "'torch-lockstep[export]'",
    "tensorrt": "torch-tensorrt, beside a PyTorch for CUDA",
}


def check_installed(format: str) -> None:
    """Check that what a format needs is here, before anything is built.

    Raises:
        InputError: a package is missing, or a GPU.
    """
    missing = []
    for package in _NEEDS.get(format, ()):
        if importlib.util.find_spec(package) is None:
            missing.append(package)
    if missing:
        raise InputError(
            f"{format} needs {', '.join(missing)}, not installed here: pip install "
            f"{_INSTALL[format]}"
        )
    if format == "tensorrt" and not torch.cuda.is_available():
        raise InputError(
            "tensorrt: engines are built on the GPU that is to run them, and there is no CUDA here"
        )


def write(format: str, what: Exportable, path: Path, outputs: list[str], most: int) -> None:
    """Write a model.

    Args:
        format: of the file.
        what: the model.
        path: the file.
        outputs: the names of the model's outputs, where the format has such.
        most: samples of the largest batch, where the format has such.
    """
    if format == "safetensors":
        save_weights(path, what.model.state_dict())
    elif format == "torch-export":
        _write_program(what, path)
    elif format == "onnx":
        _write_onnx(what, path, outputs)
    else:
        _write_engine(what, path, most)


def _write_program(what: Exportable, path: Path) -> None:
    """Write a ``torch.export`` file.

    Raises:
        InputError: there are pickles in it.
    """
    torch.export.save(what.program(), path)
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if not name.endswith("_config.json"):
                continue
            if b'"use_pickle": true' in archive.read(name):
                raise InputError(
                    "torch-export: the model holds tensors of a class of its own, which would be "
                    "pickled"
                )


def _write_onnx(what: Exportable, path: Path, outputs: list[str]) -> None:
    """Write an ONNX file; an output that has the name of an input gets another one."""
    names = []
    for name in outputs:
        if name in what.names:
            name = f"{name}_output"
        names.append(name)
    made = torch.onnx.export(
        what.program(),
        dynamo=True,
        output_names=names,
        dynamic_shapes=tuple(what.dims),
        verbose=False,
    )
    # There is a second file beside it, where that is more than one may hold.
    made.save(path)  # type: ignore[union-attr]


def _write_engine(what: Exportable, path: Path, most: int) -> None:
    """Build a TensorRT engine.

    Args:
        what: the model, which is moved to the GPU.
        path: the file.
        most: samples of the largest batch.
    """
    import torch_tensorrt

    what.model.cuda()
    what.example = each(torch.Tensor.cuda, what.example)
    dims = iter(what.dims)

    def sizes(tensor: torch.Tensor) -> Any:
        its = next(dims)
        least = []
        largest = []
        for d, size in enumerate(tensor.shape):
            is_batch = its.get(d) == "batch"
            least.append(1 if d in its else size)
            largest.append(most if is_batch else size)
        return torch_tensorrt.Input(
            min_shape=least,
            opt_shape=list(tensor.shape),
            max_shape=largest,
            dtype=tensor.dtype,
        )

    ranges, named_ranges = split(each(sizes, what.example))
    args, kwargs = split(what.example)
    engine = torch_tensorrt.dynamo.compile(
        what.program(),
        arg_inputs=ranges,
        kwarg_inputs=named_ranges,
    )
    torch_tensorrt.save(engine, str(path), arg_inputs=args, kwarg_inputs=kwargs)


def read(format: str, what: Exportable, path: Path, outputs: Any) -> nn.Module:
    """Load what was written, as a module that computes by the file.

    Args:
        format: of the file.
        what: the model that was written.
        path: the file.
        outputs: of the run; those of the file are nested alike.
    """
    compute = _onnx_session(path) if format == "onnx" else _module(format, what, path)

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs or args
        try:
            found = tensors(compute(arguments(inputs)))
            return each(lambda _: next(found).cpu(), outputs)
        except Exception as error:
            raise NotEqual(
                f"not equal: the file can't take {described(inputs)}, as the run can: "
                f"{error_line(error)}"
            ) from error

    loaded = nn.Module()
    loaded.forward = forward
    return loaded


def _onnx_session(path: Path) -> Callable[[dict[Any, Any]], Any]:
    """Load an ONNX file, as a function of arguments."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def compute(given: dict[Any, Any]) -> Any:
        arrays = [tensor.detach().contiguous().numpy() for tensor in tensors(given)]
        fed = dict(zip(names, arrays, strict=True))
        found = session.run(None, fed)
        return list(map(torch.from_numpy, found))

    return compute


def _module(format: str, what: Exportable, path: Path) -> Callable[[dict[Any, Any]], Any]:
    """Load a file of PyTorch's, as a function of arguments."""
    if format == "safetensors":
        take_weights(what.model, path)
        module = what.model
    else:
        module = torch.export.load(path).module()

    def compute(given: dict[Any, Any]) -> Any:
        if format == "tensorrt":
            given = each(torch.Tensor.cuda, given)
        args, kwargs = split(given)
        return module(*args, **kwargs)

    return compute
