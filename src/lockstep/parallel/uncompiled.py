"""Uncompiled: ``torch.compile`` keeps out of a forward that several threads compute.

Of a ``DataParallel`` in a compiled function it would compile pieces of what is here, and gradients of inputs come out
wrong, without a word (torch 2.13). What a replica calls may be compiled all the same: each thread has its own compiler.
"""

from __future__ import annotations

from typing import Any

import torch


def stop() -> Any:
    """Compile nothing more in this thread; gives what to go on with."""
    return torch._C._dynamo.eval_frame.set_eval_frame(None)


def go_on(before: Any) -> None:
    """As before ``stop``."""
    torch._C._dynamo.eval_frame.set_eval_frame(before)


# As of torch.compiler.disable, which would import the compiler, for 0.8 s: it calls these functions as they are.
for _function in (stop, go_on):
    vars(_function)["_torchdynamo_disable"] = True
