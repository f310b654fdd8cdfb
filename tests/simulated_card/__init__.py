"""Simulated cards: ``card:0`` and ``card:1``, accelerators with threads, queues, clocks and
generators, on any CPU.

``load()`` compiles card.cpp, once for each of its texts and each torch, and makes it this process's
accelerator. What it does is said there. Its number of cards is ``SIMULATED_CARDS``, 2 where that
isn't set.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from simulated_card import group

SOURCE = Path(__file__).with_name("card.cpp")


def compiler() -> str | None:
    """The C++ compiler; None where there is none."""
    return shutil.which("g++")


def library() -> Path:
    """The compiled library, kept among the temporary files."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"lockstep-simulated-card-{os.getuid()}" / f"{key}.so"
    if made.exists():
        return made
    made.parent.mkdir(mode=0o700, exist_ok=True)
    found = compiler()
    assert found is not None, "there is no C++ compiler"
    root = Path(torch.__file__).parent
    unfinished = made.with_suffix(f".{os.getpid()}")
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    link = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
    subprocess.run([found, *flags, *include, str(SOURCE), "-o", str(unfinished), *link], check=True)
    unfinished.rename(made)
    entry = made.parent / "simulated_card-0.dist-info" / "entry_points.txt"
    entry.parent.mkdir(exist_ok=True)
    entry.write_text("[torch.backends]\ncard = simulated_card:load\n")
    return made


class _Module(ModuleType):
    """What PyTorch looks for in ``torch.card``."""

    _initialized = True  # else its checkpoints keep no generators

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.simulated_card, name)

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(
            torch.ops.simulated_card.default_generator(i) for i in range(self.device_count())
        )

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(_index(device))
        try:
            yield
        finally:
            self.set_device(before)

    def Stream(self, device: Any = "card", priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device("card", _index(device)), priority=priority)

    def Event(self) -> torch.Event:
        return torch.Event("card")

    def current_stream(self, device: Any = "card") -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    def stream(self, stream: torch.Stream) -> torch.Stream:
        """To be entered, by any thread, as an object of its own."""
        ids = {
            "stream_id": stream.stream_id,
            "device_index": stream.device_index,
            "device_type": stream.device_type,
        }
        return torch.Stream(**ids)

    def is_available(self) -> bool:
        return bool(self.device_count() > 0)

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = "card") -> torch.Tensor:
        return self.default_generators[_index(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "card") -> None:
        self.default_generators[_index(device)].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _index(device: Any) -> int:
    place = torch.device("card", device) if isinstance(device, int) else torch.device(device)
    return int(torch.ops.simulated_card.current_device()) if place.index is None else place.index


def load() -> None:
    """Make the cards the accelerators of this process, and of those that it starts, once."""
    if hasattr(torch, "card"):
        return
    made = library()
    torch.ops.load_library(made)
    for folder in (
        str(made.parent),
        str(SOURCE.parent.parent),
    ):  # ranks find an entry point there, for PyTorch
        if folder not in sys.path:
            sys.path.append(folder)
    torch.utils.rename_privateuse1_backend("card")
    torch._register_device_module("card", _Module("torch.card"))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.get_device_module.cache_clear()
    group.register()


def counts(*names: str) -> dict[str, int]:
    """How often each happened in this process: host_reads, waits, blocking_copies, copies,
    crossings, operators.
    """
    return {name: int(torch.ops.simulated_card.count_of(name)) for name in names}
