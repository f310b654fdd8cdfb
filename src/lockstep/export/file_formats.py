"""The formats: how each is written, and loaded again."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.weights import save_weights, take_weights
from lockstep.errors import InputError, NotEqual, told
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
    """Raise an InputError where a package is missing, or a GPU, before anything is built."""
    if missing := [
        package for package in _NEEDS.get(format, ()) if importlib.util.find_spec(package) is None
    ]:
        raise InputError(
            f"{format} needs {', '.join(missing)}, not installed here: pip install "
            f"{_INSTALL[format]}"
        )
    if format == "tensorrt" and not torch.cuda.is_available():
        raise InputError(
            "tensorrt: engines are built on the GPU that is to run them, and there is no CUDA here"
        )


def write(format: str, what: Exportable, path: Path, outputs: list[str], most: int) -> None:
    """Write a model; ``outputs`` are their names, ``most`` the largest batch, where the format
    has such.
    """
    if format == "safetensors":
        save_weights(path, what.model.state_dict())
    elif format == "torch-export":
        torch.export.save(what.program(), path)
        with zipfile.ZipFile(path) as archive:
            said = [
                archive.read(name) for name in archive.namelist() if name.endswith("_config.json")
            ]
        if any(b'"use_pickle": true' in text for text in said):
            raise InputError(
                "torch-export: the model holds tensors of a class of its own, which would be "
                "pickled"
            )
    elif format == "onnx":
        names = [f"{name}_output" if name in what.names else name for name in outputs]
        how: dict[str, Any] = {
            "output_names": names,
            "dynamic_shapes": tuple(what.dims),
            "verbose": False,
        }
        made = torch.onnx.export(what.program(), (), dynamo=True, **how)
        made.save(path)  # type: ignore[union-attr]  # with a file beside it where that is more than one may hold
    else:
        import torch_tensorrt

        what.model.cuda()
        what.example, dims = each(torch.Tensor.cuda, what.example), iter(what.dims)

        def sizes(tensor: torch.Tensor) -> Any:
            its, shape = next(dims), tensor.shape
            least = [1 if d in its else size for d, size in enumerate(shape)]
            largest = [most if its.get(d) == "batch" else size for d, size in enumerate(shape)]
            return torch_tensorrt.Input(
                min_shape=least, opt_shape=list(shape), max_shape=largest, dtype=tensor.dtype
            )

        (ranges, named_ranges), (args, kwargs) = (
            split(each(sizes, what.example)),
            split(what.example),
        )
        engine = torch_tensorrt.dynamo.compile(
            what.program(), arg_inputs=ranges, kwarg_inputs=named_ranges
        )
        torch_tensorrt.save(engine, str(path), arg_inputs=args, kwarg_inputs=kwargs)


def quantize_linear_layers(path: Path) -> None:
    """Turn the weights of an ONNX file's linear layers to int8; convolutions would be slower,
    and off by a fifth.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(path, path, weight_type=QuantType.QUInt8, op_types_to_quantize=["MatMul"])
    path.with_name(f"{path.name}.data").unlink(
        missing_ok=True
    )  # of a large one: now all is in one file
    if not any(node.op_type == "MatMulInteger" for node in onnx.load(path).graph.node):
        raise InputError(
            "quantize: the model has no linear layer, and nothing else becomes int8: leave it out"
        )


def read(format: str, what: Exportable, path: Path, outputs: Any) -> nn.Module:
    """Load what was written, as a module that gives what the file does, nested as the outputs of
    the run are.
    """
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
    elif format == "safetensors":
        take_weights(what.model, path)
    module = what.model if format in ("onnx", "safetensors") else torch.export.load(path).module()

    def compute(given: dict[Any, Any]) -> Any:
        if format == "onnx":
            arrays = [tensor.detach().contiguous().numpy() for tensor in tensors(given)]
            return [
                torch.from_numpy(array)
                for array in session.run(None, dict(zip(names, arrays, strict=True)))
            ]
        args, kwargs = split(each(torch.Tensor.cuda, given) if format == "tensorrt" else given)
        return module(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            found = tensors(compute(arguments(kwargs or args)))
            return each(lambda _: next(found).cpu(), outputs)
        except Exception as error:
            inputs = described(kwargs or args)
            raise NotEqual(
                f"not equal: the file can't take {inputs}, as the run can: {told(error)}"
            ) from error

    loaded = nn.Module()
    loaded.forward = forward
    return loaded
