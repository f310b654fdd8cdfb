"""Stages: which layer is where, read from a device map.

A device map gives prefixes of names a stage; the longest prefix wins::

    {"": 0, "layer3": 1, "layer3.0.norm": 0}

        conv1.weight     -> ""                  -> stage 0
        layer3.1.weight  -> "layer3"            -> stage 1
        layer3.0.norm    -> "layer3.0.norm"     -> stage 0

A prefix is the name of a module, of a parameter or of a buffer, or "" for all. A container that
holds layers of several stages needs none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from lockstep.errors import StrategyError, counted, error_line, nearest

DeviceMap = Mapping[str, int]
"""Prefix of names -> stage, from 0."""


def stage_of(model: nn.Module, device_map: DeviceMap, stages: int | None = None) -> dict[str, int]:
    """Find the stage of each module, parameter and buffer by name, those that share a tensor under
    each of their names.

    Modules that no prefix covers (the model itself, containers) are left out.

    Args:
        model: whose names they are.
        device_map: see the top of this module.
        stages: how many there are, where that is known; each must get something.

    Raises:
        StrategyError: a name doesn't exist (the nearest is offered), a parameter is left out, a
            stage isn't a whole number from 0, has nothing, or is beyond those there are.
    """
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    known = {*modules, *parameters, *buffers}
    for prefix, stage in device_map.items():
        if prefix not in known:
            names = [name for name in (*modules, *parameters) if name]
            raise StrategyError(
                f'device map: the model has no "{prefix}": {nearest(prefix, names)}'
            )
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
            raise StrategyError(
                f'device map: "{prefix}" is on stage {stage!r}: give a whole number, from 0'
            )
        if stages is not None and stage >= stages:
            raise StrategyError(
                f'device map: "{prefix}" is on stage {stage}, the last of {stages} is '
                f"{stages - 1}: use {stage + 1} devices, or another map"
            )
    found: dict[str, int] = {}
    for name in sorted(known):
        place = longest(name, device_map)
        if place is not None:
            found[name] = place
    left = [name for name in parameters if name not in found]
    if left:
        raise StrategyError(
            f'device map: it leaves out {len(left)} of {len(parameters)} parameters, "{left[0]}" '
            'first: give it a stage, or give "" a stage, for all the rest'
        )
    used = {found[name] for name in (*parameters, *buffers) if name in found}
    count = stages or max(used, default=0) + 1
    for stage in range(count):
        if stage not in used:
            raise StrategyError(
                f"device map: stage {stage} holds no parameter, of {count} stages: "
                f"use {counted(len(used), 'device')}, or give it a layer"
            )
    return found


def read_map(word: str) -> dict[str, int]:
    """Read a device map: as JSON, ``{"stem": 0, "layer3": 1}``, or from a file that has it.

    Raises:
        StrategyError: it can't be read.
    """
    try:
        text = word
        if not word.lstrip().startswith("{"):
            text = Path(word).read_text()
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise StrategyError(
            f'device map: "{word}" can\'t be read ({error_line(error)}): give a file, or JSON as '
            f"{_EXAMPLE}"
        ) from error
    if not isinstance(found, dict):
        raise StrategyError(f"device map: it is a {type(found).__name__}: write it as {_EXAMPLE}")
    return found


_EXAMPLE = '{"stem": 0, "layer3": 1}'


def longest(name: str, device_map: DeviceMap) -> int | None:
    """Give the stage of the longest prefix of a name; None where none fits."""
    for prefix in (name, *modules_around(name)[::-1]):
        if prefix in device_map:
            return device_map[prefix]
    return None


def modules_around(name: str) -> list[str]:
    """List the modules that a name lies in: ``""``, ``"a"``, ``"a.b"`` for ``"a.b.c"``."""
    words = name.split(".") if name else []
    return [".".join(words[:length]) for length in range(len(words))]
