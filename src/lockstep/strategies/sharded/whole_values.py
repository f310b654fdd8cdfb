"""What is computed from sharded parameters by code that expects whole ones: a person's callbacks.

PyTorch gives such code DTensors. Of a sum or a norm of one, ``float`` would be this rank's part, without a word; a
maximum of a shard without elements fails; and each rank would draw other random numbers.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.launch.events import Caveat
from lockstep.model.inspection import writes_in_place

_BY_ELEMENT = {
    *("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "lerp_", "addcmul_"),
    *("addcdiv_", "copy_", "zero_", "fill_", "masked_fill_", "clamp_", "clamp_min_", "clamp_max_", "neg_", "abs_"),
    *("sign_", "pow_", "sqrt_", "rsqrt_", "square_", "reciprocal_", "exp_", "log_", "tanh_", "sigmoid_", "round_"),
}
"""Functions that write in place, to each element by itself: they act on shards; others on whole tensors."""

_OF_ALL = {
    *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__format__"),
    *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "mean", "std", "var", "median", "quantile"),
    *("_foreach_max", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
    *("kl_div", "cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("rand_like", "randn_like", "randint_like", "bernoulli", "normal", "dropout", "equal", "allclose", "isclose"),
}
"""Functions that are given whole tensors."""

_TO_NUMPY = {"numpy", "__array__"}
"""Functions that give an array of the memory of a tensor."""

_VIEWS = {
    *("__getitem__", "select", "narrow", "chunk", "split", "tensor_split", "unbind", "diagonal", "view", "view_as"),
    *("reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "transpose", "t", "permute", "movedim"),
    *("as_strided", "unfold", "hsplit", "vsplit", "dsplit", "swapaxes", "swapdims", "moveaxis", "expand", "expand_as"),
}
"""Those too, and what is written to what they give goes to the shard."""

_GIVES_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""``parameter.data = value``."""

_TAKES_DATA = (torch.Tensor.data.__get__, torch.Tensor.detach)  # type: ignore[attr-defined]
"""``parameter.data``, and the like."""


_TAKEN: Any = WeakTensorKeyDictionary()
"""By parameter, weak references to the tensors that share its memory."""

_OWNERS: Any = WeakTensorKeyDictionary()
"""By each of those, the parameter."""

_WHOLES: Any = WeakTensorKeyDictionary()
"""By parameter, a weak reference to the whole tensor of which views were taken."""


OF_OWN_LOOP = Caveat(
    "state",
    "between updates the model's parameters and gradients are shards (DTensors): a number made of one is of this "
    "rank's part, and what is written to a part of one is lost",
    "do both within `with step.whole_values():`, on every rank",
)


class WholeValues(TorchFunctionMode):
    """Single-device values from DTensors; every rank has to compute them.

    What treats each element by itself acts on shards, with whole tensors beside them. A view of a shard is one of a
    whole tensor, ``of_shard``, which is written back after each write, and made anew before it is used where the shard
    was written since (``changes``)::

        row = p[0]         a view of a whole tensor of p
        p.mul_(2)          writes the shards
        row.norm()         of the whole tensor as it is by now
        row.zero_()        writes it, and then the shards

    Args:
        cut: by the id of each parameter that has this rank's part, which somebody may have taken from the optimizer
            outside of here, the one that was cut.
    """

    changes = 0
    """How often shards may have been written: by functions, and between two contexts by the optimizer."""

    is_off = False
    """Whether functions are called as they are."""

    def __init__(self, cut: Mapping[int, DTensor]) -> None:
        super().__init__()
        self._cut = cut

    def __enter__(self) -> WholeValues:
        """Begin."""
        WholeValues.changes += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``; what it gives is whole, or a shard."""
        del types
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.is_off:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(nn.Parameter, lambda p: self._cut.get(id(p), p), (args, kwargs))
        if name == "data_ptr" and isinstance(args[0], DTensor):  # to tell them apart, tied ones say
            return id(_owner(args[0]))
        if name == "__deepcopy__" and isinstance(args[0], DTensor):
            return _copy(*args)
        if name in _TO_NUMPY and isinstance(args[0], DTensor):
            array = getattr(args[0].full_tensor(), name)(*args[1:], **kwargs)
            array.flags.writeable = False  # on one device it would write to the parameter
            return array
        written = _written(name, args, kwargs)
        of_all = name in _OF_ALL or name.endswith("_loss") or _is_largest(name, args, kwargs)
        if of_all or name in _VIEWS or _is_whole(written):
            args, kwargs = tree_map_only(DTensor, _whole if name in _VIEWS else DTensor.full_tensor, (args, kwargs))
        shard = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)), None)
        if shard is None:
            for leaf in tree_leaves((args, kwargs)):
                _refresh(leaf)
            found = func(*args, **kwargs)
            for leaf in tree_leaves(written):
                _write_back(leaf)
            if func in _TAKES_DATA and hasattr(_root(args[0]), "of_shard"):
                found.of_root = args[0]
            return found
        from torch.distributed.tensor.experimental import implicit_replication  # takes 0.1 s; few need it

        WholeValues.changes += written is not None or func == _GIVES_DATA
        if func == _GIVES_DATA:  # which would leave the shard as it is
            if _owner(args[1]) is shard:  # p.data += ..., which has written it by now
                return None
            _keep_taken(shard)
            func, args = torch.Tensor.copy_, (shard.detach(), *args[1:])
        if isinstance(written, DTensor) and name not in _BY_ELEMENT:
            return _on_wholes(func, args, kwargs, written)
        cut_args, cut_kwargs = tree_map_only(torch.Tensor, lambda value: _cut(value, shard), (args, kwargs))
        try:
            with implicit_replication():
                found = tree_map_only(DTensor, _whole_if_partial, func(*cut_args, **cut_kwargs))
        except (NotImplementedError, RuntimeError):  # what DTensor doesn't know
            return _on_wholes(func, args, kwargs, written)
        if func in _TAKES_DATA and isinstance(shard, nn.Parameter):
            _note_taken(shard, found)
        return found


def _note_taken(parameter: nn.Parameter, taken: DTensor) -> None:
    """Note a tensor that shares a parameter's memory."""
    alive = [ref for ref in _TAKEN.get(parameter, []) if ref() is not None]
    _TAKEN[parameter], _OWNERS[taken] = [*alive, weakref.ref(taken)], parameter


def _keep_taken(parameter: DTensor) -> None:
    """Let such tensors have what they hold for their own: ``kept = p.data; p.data = averages; ...; p.data = kept``."""
    for ref in _TAKEN.pop(parameter, []):
        if (taken := ref()) is not None:
            taken._local_tensor = taken._local_tensor.clone()
            del _OWNERS[taken]
    if (root := _whole_of(parameter)) is not None:
        _refresh(root)
        del root.of_shard


def _owner(tensor: Any) -> Any:
    """The parameter whose memory a tensor has; itself, where it is of none."""
    return _OWNERS.get(tensor, tensor) if isinstance(tensor, DTensor) else tensor


def _copy(shard: DTensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy, of a parameter without its gradient, as PyTorch's of one device; of DTensors it would copy that."""
    copied: torch.Tensor = shard.detach().clone().requires_grad_(shard.requires_grad)
    memo[id(shard)] = nn.Parameter(copied, copied.requires_grad) if isinstance(shard, nn.Parameter) else copied
    return memo[id(shard)]  # type: ignore[no-any-return]


def _is_largest(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether it is a norm that is the largest element, or the smallest, which a shard may have none of."""
    return "norm" in name and any(isinstance(one, float) and math.isinf(one) for one in (*args, *kwargs.values()))


def _written(name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The tensor that a function writes to, or several in a list; None for one that writes to none."""
    first = args[0] if args else kwargs.get("tensor")  # (as functions of nn.init give it)
    return first if writes_in_place(name) or kwargs.get("inplace") is True else kwargs.get("out")


def _is_whole(written: Any) -> bool:
    """Whether what is written to, if anything is, is no shard."""
    written = next(iter(written), None) if isinstance(written, list | tuple) else written
    return isinstance(written, torch.Tensor) and not isinstance(written, DTensor)


def _on_wholes(func: Callable[..., Any], args: Any, kwargs: Any, written: Any) -> Any:
    """Call a function with whole tensors, and give the shards that it writes to what these become."""
    wholes: dict[int, torch.Tensor] = {}

    def whole_of(shard: DTensor) -> torch.Tensor:
        return wholes[id(shard)] if id(shard) in wholes else wholes.setdefault(id(shard), shard.full_tensor())

    with contextlib.nullcontext() if written is None else torch.no_grad():
        whole_args, whole_kwargs = tree_map_only(DTensor, whole_of, (args, kwargs))
        found = func(*whole_args, **whole_kwargs)
        for shard in tree_leaves(written):
            if id(shard) in wholes:
                shard.copy_(_cut(wholes[id(shard)], shard))
    return written if isinstance(written, DTensor) else found


def _whole(shard: DTensor) -> torch.Tensor:
    """All of a shard, of which a view is taken; while there is one, others are views of the same tensor."""
    if shard.requires_grad and torch.is_grad_enabled():
        whole: torch.Tensor = shard.full_tensor()
        _root(whole).of_shard = shard  # type: ignore[attr-defined]
        return whole
    owner: Any = _owner(shard)
    root: Any = _whole_of(owner)
    if root is None:
        root = owner.full_tensor().detach().clone()
        root.of_shard, root.stamp, _WHOLES[owner] = owner, WholeValues.changes, weakref.ref(root)
    _refresh(root)
    return root  # type: ignore[no-any-return]


def _whole_of(shard: DTensor) -> Any:
    """The tensor that ``_whole`` has made of it, where somebody has that, or a view of it."""
    root = _WHOLES.get(shard, lambda: None)()
    return root if hasattr(root, "of_shard") else None


def _refresh(leaf: Any) -> None:
    """Before a whole tensor, or a view of it, is used, give it what its shard is by now."""
    root: Any = _root(leaf) if isinstance(leaf, torch.Tensor) else None
    if getattr(root, "stamp", WholeValues.changes) != WholeValues.changes and hasattr(root, "of_shard"):
        root.detach().copy_(root.of_shard.full_tensor())
        root.stamp = WholeValues.changes


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """Of a view, or its ``data``, what it is a view of."""
    root = tensor if tensor._base is None else tensor._base
    above = getattr(root, "of_root", None)
    return root if above is None else _root(above)


def _write_back(written: Any) -> None:
    """After a write to a tensor that may be a view of a whole one, give its shard the new values."""
    if not isinstance(written, torch.Tensor):
        return
    root = _root(written)
    if (shard := getattr(root, "of_shard", None)) is not None:
        with torch.no_grad():
            shard.copy_(_cut(root.detach().view(shard.shape), shard))
        if hasattr(root, "stamp"):
            root.stamp = WholeValues.changes


def _cut(value: torch.Tensor, shard: DTensor) -> torch.Tensor:
    """A tensor of the shape of a shard, cut as that is; another one as it is."""
    if isinstance(value, DTensor) or value.shape != shard.shape:
        return value
    return distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)


def _whole_if_partial(found: DTensor) -> Any:
    return found.full_tensor() if any(place.is_partial() for place in found.placements) else found
