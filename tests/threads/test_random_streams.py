"""A stream of random numbers per thread: the same bits whatever the threads' timing, and
PyTorch's own bits.
"""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from lockstep.launch import devices
from lockstep.threads.random_streams import current, stream
from lockstep.threads.thread_pool import run

X = torch.linspace(-2, 2, 192, dtype=torch.float64).sin().view(4, 6, 8)
IMAGES = torch.linspace(-9, 9, 384).sin().view(2, 3, 8, 8)


class _Self(nn.Module):
    """A module that is given the same tensor several times."""

    def __init__(self, module: nn.Module, times: int = 3) -> None:
        super().__init__()
        self.module, self.times = module, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.module(*[x] * self.times)
        return found[0] if isinstance(found, tuple) else found


def _module(make: Callable[[], nn.Module], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    module = make().to(x.dtype)

    def run() -> torch.Tensor:
        found = module(x)
        return found[0] if isinstance(found, tuple) else found

    return run


def _attend(**kwargs: object) -> Callable[[], torch.Tensor]:
    return lambda: F.scaled_dot_product_attention(
        X[None], X[None], X[None], dropout_p=0.4, **kwargs
    )  # type: ignore[arg-type]


def _packed(kind: type[nn.RNNBase]) -> Callable[[], torch.Tensor]:
    rnn = kind(8, 5, 3, dropout=0.5).double()

    def run() -> torch.Tensor:
        return rnn(pack_padded_sequence(X, [4, 4, 3, 2, 2, 1]))[0].data

    return run


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "dropout": lambda: F.dropout(X),
    "dropout in place": lambda: F.dropout(X.clone(), inplace=True),
    "dropout1d": lambda: F.dropout1d(X),
    "dropout2d": lambda: F.dropout2d(IMAGES),
    "dropout3d in place": lambda: F.dropout3d(IMAGES[None].clone(), inplace=True),
    "alpha_dropout": lambda: F.alpha_dropout(X, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(IMAGES, training=True),
    "torch.dropout": lambda: torch.dropout(X, 0.3, True),
    "rand": lambda: torch.rand(5),
    "randn": lambda: torch.randn((5,), dtype=torch.float64),
    "randint": lambda: torch.randint(1000, (5,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "randint_like": lambda: torch.randint_like(X, 1000),
    "normal": lambda: torch.normal(0.0, 1.0, (5,)),
    "normal of tensors": lambda: torch.normal(X, 1.0),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 20),
    "poisson": lambda: torch.poisson(torch.full((50,), 3.0)),
    "rrelu": lambda: F.rrelu(X, training=True),
    "rrelu in place": lambda: F.rrelu(X.clone(), training=True, inplace=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(IMAGES, 2, output_size=5),
    "fractional_max_pool2d with indices": lambda: F.fractional_max_pool2d(
        IMAGES, 2, output_size=5, return_indices=True
    )[1],
    "attention": _attend(),
    "causal attention": _attend(is_causal=True, scale=0.3),
    "masked attention": _attend(attn_mask=torch.ones(6, 6).tril().bool()),
    "rows that are masked": _attend(attn_mask=torch.ones(6, 6).tril(-1).bool()),
    "added mask": _attend(
        attn_mask=torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6), scale=-0.2
    ),
    "grouped attention": lambda: F.scaled_dot_product_attention(
        X[None], X[None, :2], X[None, :2], dropout_p=0.4, enable_gqa=True
    ),
    "MultiheadAttention": _module(
        lambda: _Self(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)),
        X,
    ),
    "LSTM": _module(lambda: nn.LSTM(8, 5, 3, dropout=0.5, bidirectional=True, batch_first=True), X),
    "LSTM in float32": _module(lambda: nn.LSTM(8, 5, 2, dropout=0.5), X.float()),
    "LSTM with projection": _module(lambda: nn.LSTM(8, 5, 2, dropout=0.5, proj_size=3), X),
    "GRU": _module(lambda: nn.GRU(8, 5, 2, dropout=0.5), X),
    "RNN": _module(lambda: nn.RNN(8, 5, 2, dropout=0.5, bias=False), X),
    "packed LSTM": _packed(nn.LSTM),
    "packed GRU": _packed(nn.GRU),
    "TransformerEncoderLayer": _module(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), X
    ),
    "TransformerDecoderLayer": _module(lambda: _Self(nn.TransformerDecoderLayer(8, 2, 16), 2), X),
    "init": lambda: nn.init.kaiming_uniform_(nn.init.normal_(torch.empty(3, 3))),
    "distributions": lambda: torch.distributions.Gamma(torch.ones(5), torch.ones(5)).sample(),
    **{
        name: lambda name=name, args=args: getattr(torch.empty(64), name)(*args)  # type: ignore[misc]
        for name, args in {
            "bernoulli_": (0.5,),
            "uniform_": (),
            "normal_": (),
            "exponential_": (),
            "random_": (1000,),
            "cauchy_": (),
            "geometric_": (0.2,),
            "log_normal_": (),
        }.items()
    },
}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_pytorch_from_a_generator_of_ones_own(name: str) -> None:
    draw = DRAWS[name]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        wanted = [draw(), draw()]
        after = torch.rand(3)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        own = _generator(11)
        with stream(own):
            found = [draw(), draw()]
            then = torch.rand(3)
        assert torch.equal(torch.get_rng_state(), before), "PyTorch's own generator isn't touched"
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert torch.equal(then, after), "and as much was drawn"
    assert not torch.equal(found[0], found[1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.3)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.rnn(self.layer(x))[0]).sum() * torch.rand(())


def test_threads_with_equal_seeds_compute_equal_bits_whatever_their_timing() -> None:
    torch.manual_seed(0)
    net = Net()
    three = devices.slots(3)

    def work(number: int, delay: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        def run() -> tuple[torch.Tensor, torch.Tensor]:
            torch.ones(delay * 1000).sum()
            with stream(_generator(number)):
                loss = net(X.float())
            return loss.detach(), torch.autograd.grad(loss, net.layer.linear1.weight)[0]

        return run

    runs = [run(three, [work(i, (i + k) % 3 * 50) for i in range(3)]) for k in range(6)]
    for results in runs[1:]:
        for (loss, grad), (first_loss, first_grad) in zip(results, runs[0], strict=True):  # type: ignore[misc]
            assert torch.equal(loss, first_loss) and torch.equal(grad, first_grad)


def test_gradients_of_dropout_follow_its_mask() -> None:
    x = X.clone().requires_grad_()
    with stream(_generator(3)):
        y = F.dropout(x, 0.25)
    (grad,) = torch.autograd.grad(y.sum(), x)
    mask = torch.empty_like(X).bernoulli_(0.75, generator=_generator(3))
    assert torch.equal(y, X * (mask / 0.75)) and torch.equal(grad, mask / 0.75)


@pytest.mark.parametrize(
    "draw", [F.dropout, F.dropout2d, lambda x, p=0.5: F.alpha_dropout(x, p, training=True)]
)
def test_probabilities_0_and_1_and_evaluation_are_right(draw: Callable[..., torch.Tensor]) -> None:
    own = _generator(0)
    before = own.get_state()
    with stream(own):
        assert torch.equal(draw(IMAGES, p=0.0), IMAGES)
        assert torch.equal(draw(IMAGES, p=1.0), torch.zeros_like(IMAGES))
        assert torch.equal(F.dropout(IMAGES, training=False), IMAGES)
        with pytest.raises((ValueError, RuntimeError), match="between 0 and 1"):
            draw(IMAGES, p=1.5)
    assert torch.equal(own.get_state(), before)


def test_gradients_of_attention_and_recurrent_layers_are_those_of_pytorch() -> None:
    def grads(
        run: Callable[[torch.Tensor], torch.Tensor], own: torch.Generator | None
    ) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(7)
        x = X.clone().requires_grad_()
        with stream(own):
            return torch.autograd.grad(run(x).square().sum(), x)

    lstm = nn.LSTM(8, 5, 3, dropout=0.5).double()
    for drawing in (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
        lambda x: lstm(x, (torch.ones(3, 6, 5).double(), torch.ones(3, 6, 5).double()))[1][1],
        lambda x: F.rrelu(x, training=True),
    ):
        with torch.random.fork_rng():
            torch.testing.assert_close(
                grads(drawing, _generator(7)), grads(drawing, None), rtol=1e-13, atol=1e-13
            )


def test_a_generator_that_was_given_is_left_alone() -> None:
    own, given = _generator(1), _generator(2)
    before = own.get_state()
    with stream(own):
        assert torch.equal(torch.rand(3, generator=given), torch.rand(3, generator=_generator(2)))
        torch.empty(3).normal_(generator=given)
    assert torch.equal(own.get_state(), before)


def test_what_is_drawn_elsewhere_than_on_the_cpu_is_left_alone() -> None:
    with stream(_generator(1)):
        assert torch.rand(3, device="meta").is_meta
        assert F.dropout(torch.zeros(3, device="meta")).is_meta
        with torch.device("meta"):
            assert torch.rand(3).is_meta and torch.empty(3).uniform_().is_meta


def test_streams_nest_and_belong_to_their_thread() -> None:
    outer, inner = _generator(1), _generator(2)
    seen: list[object] = []
    assert current() is None
    with stream(outer):
        with stream(inner):
            assert current() is inner
            assert torch.equal(torch.rand(2), torch.rand(2, generator=_generator(2)))
        assert current() is outer
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [None] and current() is None
    with stream(None):
        assert current() is None


def test_an_error_inside_leaves_no_stream_behind() -> None:
    with pytest.raises(ZeroDivisionError), stream(_generator(0)):
        raise ZeroDivisionError
    assert current() is None
