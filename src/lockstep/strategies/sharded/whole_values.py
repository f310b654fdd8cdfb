"""What is computed from sharded parameters by code that expects whole ones: a person's callbacks.

PyTorch gives such code DTensors. Of a sum or a norm of one, ``float`` would be this rank's part, without a word; a
maximum of a shard without elements fails; and each rank would draw other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_DRAWS_IN_PLACE = {
    *("normal_", "uniform_", "trunc_normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_"),
    *("geometric_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_", "orthogonal_"),
    *("sparse_", "eye_", "dirac_"),
}
_OF_ALL = {
    *("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__format__", "__getitem__"),
    *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "mean", "std", "var", "median", "quantile"),
    *("rand_like", "randn_like", "randint_like", "bernoulli", "normal", "dropout", "equal", "allclose", "isclose"),
}
"""Functions that are given whole tensors."""

_GIVES_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""``parameter.data = value``."""


class WholeValues(TorchFunctionMode):
    """Single-device values from DTensors; every rank has to compute them.

    What treats each element by itself acts on shards, with whole tensors beside them.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``; what it gives is whole, or a shard."""
        del types
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _OF_ALL:
            args, kwargs = tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
        shard = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)), None)
        if shard is None:
            return func(*args, **kwargs)
        from torch.distributed.tensor.experimental import implicit_replication  # takes 0.1 s; few need it

        if func == _GIVES_DATA:  # which would leave the shard as it is
            func, args = torch.Tensor.copy_, (shard.detach(), *args[1:])
        if name in _DRAWS_IN_PLACE:
            whole = shard.full_tensor()
            args, kwargs = tree_map_only(DTensor, lambda _: whole, (args, kwargs))
            func(*args, **kwargs)
            return shard.copy_(_cut(whole, shard))
        args, kwargs = tree_map_only(torch.Tensor, lambda value: _cut(value, shard), (args, kwargs))
        with implicit_replication():
            return tree_map_only(DTensor, _whole_if_partial, func(*args, **kwargs))


def _cut(value: torch.Tensor, shard: DTensor) -> torch.Tensor:
    """A tensor of the shape of a shard, cut as that is; another one as it is."""
    if isinstance(value, DTensor) or value.shape != shard.shape:
        return value
    return distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)


def _whole_if_partial(found: DTensor) -> Any:
    return found.full_tensor() if any(place.is_partial() for place in found.placements) else found
