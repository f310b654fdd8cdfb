"""Activation checkpointing in threads with random streams of their own draws the same masks
again.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.launch.devices import slots
from lockstep.threads.random_streams import stream
from lockstep.threads.recompute import install
from lockstep.threads.thread_pool import run


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_dropout_has_the_mask_of_the_first_time(reentrant: bool) -> None:
    install()

    def error(seed: int) -> float:
        w = torch.ones(16, requires_grad=True)
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        generator = torch.Generator().manual_seed(seed)
        with stream(generator):
            out = checkpoint(
                lambda x: nn.functional.dropout(x * w, 0.5), x, use_reentrant=reentrant
            )
            after = generator.get_state()
            torch.rand(7)
            out.sum().backward()
        assert not torch.equal(after, generator.get_state())
        # At w = 1 the gradient of w is the sum of the outputs over the batch.
        return float((w.grad - out.detach().sum(dim=0)).abs().max())

    for _ in range(5):
        assert max(run(slots(2), [lambda: error(1), lambda: error(2)])) < 1e-5


def test_outside_of_a_stream_nothing_has_changed() -> None:
    install()
    w = torch.ones(4, requires_grad=True)
    out = checkpoint(
        lambda x: nn.functional.dropout(x * w, 0.5), torch.ones(8, 4), use_reentrant=False
    )
    out.sum().backward()
    assert torch.equal(w.grad, out.detach().sum(dim=0))


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_generator_that_threads_share_is_left_alone(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that sets its state while another reads it may wait for ever: the garbage
    collector runs in between.
    """
    install()
    refused = [torch.get_rng_state, torch.set_rng_state]

    def refuse(*args: object) -> None:
        raise AssertionError("the state of PyTorch's generator is not that of this thread")

    w = torch.ones(4, requires_grad=True)
    with monkeypatch.context() as patch, stream(torch.Generator()):
        for function in refused:
            patch.setattr(torch, function.__name__, refuse)
            patch.setattr(torch.random, function.__name__, refuse)
        x = torch.ones(8, 4, requires_grad=True)
        checkpoint(
            lambda x: nn.functional.dropout(x * w, 0.5), x, use_reentrant=reentrant
        ).sum().backward()
    assert w.grad is not None
