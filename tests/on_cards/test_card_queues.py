"""What a micro-batch computes out of its turns waits for its copies, and its copies for it; seen by
the cards' clocks.

(Simulated cards compute at once what is given to their computing streams, so a wait too few changes
no number there.)
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.pipelining.card_queues import CardQueues
from lockstep.pipelining.transfer import TransferMode

card = torch.ops.simulated_card
ONE, TWO = torch.device("card:0"), torch.device("card:1")
COSTS = {"copy": 5.0, "aten::mul": 1.0, "aten::mul_": 1.0}


@pytest.fixture
def queues() -> Iterator[CardQueues]:
    """Of a micro-batch that has left the first stage, and has the turn of the second one."""
    computing = {place: torch.accelerator.current_stream(place) for place in (ONE, TWO)}
    copying = {place: torch.Stream(place) for place in (ONE, TWO)}
    found = CardQueues((ONE, TWO), computing, copying, random=None, shared={})
    for name, cost in COSTS.items():
        card.set_cost(name, cost)
    card.reset_clocks()
    found.enter(0)
    found.leave(0)
    found.enter(1)
    yield found
    found.close()
    torch.accelerator.set_device_index(0)
    for name in COSTS:
        card.set_cost(name, 0.0)


def clocks() -> list[float]:
    return [card.clock_of(0), card.clock_of(1)]


def test_a_copy_begins_where_the_stage_was_left_and_holds_only_its_own_micro_batch(
    queues: CardQueues,
) -> None:
    x = torch.ones(3, device=ONE)
    for _ in range(8):
        x * 2  # another micro-batch, which has its turn there now
    with TransferMode((ONE, TWO), TWO, queues=queues) as mode:
        y = mode.moved(x)
        assert clocks() == [8, 5]
        y * 2
        assert clocks() == [8, 6]


def test_a_tensor_that_was_made_out_of_turn_is_sent_when_it_is_there(queues: CardQueues) -> None:
    x = torch.ones(3, device=ONE)
    with TransferMode((ONE, TWO), TWO, queues=queues) as mode:
        y = mode.moved(x * 2)
        assert clocks() == [6, 6]
        y * 2
    assert clocks() == [6, 7]


def test_a_tensor_of_another_card_is_written_to_behind_its_copy(queues: CardQueues) -> None:
    x = torch.ones(3, device=ONE)
    with TransferMode((ONE, TWO), TWO, queues=queues) as mode:
        y = mode.moved(x)
        x.mul_(2)
    assert clocks() == [6, 5]
    assert card.memory_of(y).sum() == 3


def test_what_is_sent_for_the_next_stage_is_waited_for_in_its_turn(queues: CardQueues) -> None:
    queues.leave(1)
    queues.enter(0)
    x = torch.ones(3, device=ONE)
    with (
        TransferMode((ONE, TWO), TWO, queues=queues) as mode,
        queues.sending(0, lambda stage: None),
    ):
        y = mode.moved(x)
    torch.ones(3, device=TWO) * 2  # another micro-batch, which has its turn there now
    assert card.memory_of(y).isnan().all()
    queues.leave(0)
    queues.enter(1)
    assert card.memory_of(y).sum() == 3
    y * 2
    assert clocks() == [5, 6]
