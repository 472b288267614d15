"""Modules that a schedule runs part by part, forwards between backwards of another micro-batch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, override

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.runtime.fsdp_module import named_units
from megatron_fsdp_v2.runtime.scheduled import ScheduledUnits
from tests.distributed.wrapping import STRATEGIES, held_error, mesh_of, said, wrap
from tests.ranks import RankPools

WIDTH = 5
MICRO_BATCHES = 3
BLOCKS = 3


class _Late(torch.autograd.Function):
    """A product whose weight's gradient is left for later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, layer: LateLinear) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.layer = weight, layer
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        main_grad = placeholder = None
        if ctx.layer.fuses:
            # A kernel that adds to the gradient by itself asks where in the backward.
            main_grad, placeholder = ctx.weight.main_grad, torch.empty_like(weight)
            ctx.weight.grad_added_to_main_grad = True
        ctx.layer.later.append((grad.t() @ x, main_grad))
        return grad @ weight, placeholder, None


class LateLinear(nn.Linear):
    """Keeps gradients of its weight for `backward_dw`, as Transformer Engine's modules do."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.later: list[Any] | None = None
        self.fuses = False

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.later is None:
            return super().forward(x)
        product: torch.Tensor = _Late.apply(x, self.weight, self)
        return product + self.bias

    def backward_dw(self) -> None:
        """Compute the weight's gradient of the oldest backward."""
        assert self.later is not None
        grad, main_grad = self.later.pop(0)
        if main_grad is None:
            self.weight.grad = grad
        else:
            main_grad.add_(grad)


class Layer(nn.Module):
    """A layer with experts in the middle, which are a unit of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = LateLinear(WIDTH)
        self.experts = nn.Sequential(LateLinear(WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.experts(torch.tanh(self.attention(x))))


class Model(nn.Module):
    """A root with layers."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(BLOCKS))
        self.output = LateLinear(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.input(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x).square().mean()


class Node:
    """One part that runs: its own piece of a graph, as Megatron's plans have it."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self.input = x.detach().requires_grad_()
        self.output = run(self.input)

    def backward(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Run its backward; return its input's gradient."""
        torch.autograd.backward(self.output, grad)
        return self.input.grad


class MicroBatch:
    """Forward and backward of a micro-batch, that stop after every node."""

    def __init__(self, model: Any, units: ScheduledUnits, x: torch.Tensor) -> None:
        self.model, self.units, self.x = model, units, x
        self.nodes: list[Node] = []

    def _run(self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        self.nodes.append(Node(run, x))
        return self.nodes[-1].output

    def forward(self) -> Iterator[None]:
        """The forward, node by node."""
        units = self.units
        units.begin()
        x = self._run(self.model.input, self.x)
        yield
        for layer in self.model.layers:
            units.begin_forward(layer)
            x = self._run(lambda x, layer=layer: torch.tanh(layer.attention(x)), x)
            yield
            units.begin_forward(layer.experts)
            x = self._run(layer.experts, x)
            units.end_forward(layer.experts)
            yield
            x = self._run(layer.last, x)
            units.end_forward(layer)
            yield
        self._run(lambda x: self.model.output(x).square().mean(), x)

    def backward(self) -> Iterator[None]:
        """The backward, node by node, with gradients of weights after those of inputs."""
        units = self.units
        units.expect_gradients()
        grad = self.nodes.pop().backward(None)
        yield
        for layer in reversed(self.model.layers):
            units.begin_backward(layer)
            grad = self.nodes.pop().backward(grad)
            yield
            units.begin_backward(layer.experts)
            grad = self.nodes.pop().backward(grad)
            yield
            layer.experts[0].backward_dw()
            units.end_backward(layer.experts)
            grad = self.nodes.pop().backward(grad)
            yield
            layer.attention.backward_dw()
            units.end_backward(layer)
        self.model.output.backward_dw()
        self.nodes.pop().backward(grad)
        units.end()


def data(step: int, rank: int) -> torch.Tensor:
    """Inputs of one rank's micro-batches: `(MICRO_BATCHES, 3, WIDTH)`."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(MICRO_BATCHES, 3, WIDTH, generator=generator, dtype=torch.float64)


class Trained:
    """A plain model, and a sharded one that a schedule runs."""

    def __init__(
        self, strategy: str, sizes: tuple[int, ...], *, fuses: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.plain = Model().double()
        torch.manual_seed(0)
        model = Model().double()
        for module in model.modules():
            if isinstance(module, LateLinear):
                module.later, module.fuses = [], fuses
        parts = [part for layer in model.layers for part in (layer.experts, layer)]
        options = {"sharding_strategy": strategy, "mesh": mesh_of(*sizes), **options}
        self.model = wrap(model, parts, **options)
        self.units = ScheduledUnits(self.model, parts)
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.plain, self.model)
        ]
        self.most_gathered = 0

    def _watch(self, *passes: Iterator[None]) -> None:
        """Run forwards and backwards in turn, node by node."""
        for _ in itertools.zip_longest(*passes):
            gathered = [unit for _, unit in named_units(self.model) if unit.is_unsharded]
            self.most_gathered = max(self.most_gathered, len(gathered))

    def run(self, step: int, *, fails: bool = False) -> None:
        """Gradients of a step, one forward ahead of the backwards."""
        batches = [MicroBatch(self.model, self.units, x) for x in data(step, dist.get_rank())]
        self._watch(batches[0].forward())
        with self.model.no_sync():
            for former, latter in itertools.pairwise(batches):
                self._watch(latter.forward(), former.backward())
                if fails:
                    raise KeyError
        self._watch(batches[-1].backward())

    def step(self, step: int) -> float:
        """A step of both; return how far weights and gradients are apart."""
        self.run(step)
        for rank in range(dist.get_world_size()):
            for x in data(step, rank):
                (self.plain(x) / dist.get_world_size()).backward()
        worst = self.difference(with_gradients=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return max(worst, self.difference(with_gradients=False))

    def difference(self, *, with_gradients: bool) -> float:
        """Largest difference of weights, and of gradients."""
        worst = 0.0
        for mine, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            worst = max(worst, held_error(mine, theirs))
            # A rank without rows of a parameter has no gradient of it.
            if with_gradients and (mine.grad is not None or mine.to_local().numel()):
                worst = max(worst, held_error(mine.grad, theirs.grad))
        return worst

    def evaluate(self) -> float:
        """Difference of an evaluation, which calls the model."""
        x = data(99, dist.get_rank())[0]
        for module in self.model.modules():
            if isinstance(module, LateLinear):
                module.later = None
        with torch.no_grad():
            error = abs(float(self.model(x) - self.plain(x)))
        for module in self.model.modules():
            if isinstance(module, LateLinear):
                module.later = []
        return error


def _train(strategy: str, sizes: tuple[int, ...], options: dict[str, Any]) -> tuple[float, int]:
    trained = Trained(strategy, sizes, **options)
    worst = 0.0
    for step in range(3):
        worst = max(worst, trained.step(step), trained.evaluate())
    at_rest = [unit for _, unit in named_units(trained.model) if unit.is_unsharded]
    assert not at_rest, "something stayed gathered"
    return worst, trained.most_gathered


PLAIN = {"enable_unshard_prefetch": False, "enable_async_reduce_grad": False}
OPTIONS: list[dict[str, Any]] = [{}, PLAIN, {"enable_trace_pool": True}, {"fuses": True}]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_schedule_of_parts_and_late_gradients_trains_like_a_plain_loop(
    pools: RankPools, strategy: str
) -> None:
    for options in OPTIONS:
        for worst, _ in pools(2).run(_train, strategy, (2,), options):
            assert worst < 1e-12, options


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_a_schedule_of_parts_trains_with_an_outer_axis(pools: RankPools, outer: str) -> None:
    options = {"outer_dp_sharding_strategy": outer, "check_ranks": "always"}
    for worst, _ in pools(4).run(_train, "optim_grads_params", (2, 2), options):
        assert worst < 1e-12


def test_units_are_gathered_for_the_parts_that_use_them(pools: RankPools) -> None:
    # The root; a layer in its forward, one in its backward; the experts of one. And one ahead.
    for _, most in pools(2).run(_train, "optim_grads_params", (2,), PLAIN):
        assert most == 4
    for _, most in pools(2).run(_train, "optim_grads_params", (2,), {}):
        assert most == 5


def _fail(strategy: str, how: str) -> float:
    trained = Trained(strategy, (2,))
    worst = trained.step(0)
    for module in trained.model.modules():
        if isinstance(module, LateLinear):
            module.later = []
    with contextlib.suppress(KeyError):
        trained.run(1, fails=True)
    assert trained.units.is_open
    if how == "abandon":
        trained.units.abandon()
    else:
        worst = max(worst, trained.evaluate())
    assert not trained.units.is_open
    trained.optimizers[1].zero_grad()
    for module in trained.model.modules():
        if isinstance(module, LateLinear):
            module.later = []
    return max(worst, trained.step(2))


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("how", ["abandon", "evaluate"])
def test_what_an_exception_leaves_of_a_schedule_is_cleared_away(
    pools: RankPools, strategy: str, how: str
) -> None:
    assert max(pools(2).run(_fail, strategy, how)) < 1e-12


def _misuse() -> dict[str, str]:
    trained = Trained("optim_grads_params", (2,))
    model, units = trained.model, trained.units
    layer = model.layers[0]
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    told = {"not begun": said(RuntimeError, lambda: units.begin_forward(layer))}
    with torch.no_grad():
        told["no gradients"] = said(RuntimeError, units.begin)
    units.begin()
    told["not used"] = said(RuntimeError, lambda: layer.experts(x))
    told["never begun"] = said(RuntimeError, lambda: units.end_forward(layer))
    units.begin_forward(layer.experts)
    output = layer.experts(x)
    units.end_forward(layer.experts)
    told["gradient"] = said(RuntimeError, lambda: output.sum().backward())
    units.abandon()
    told["over"] = said(RuntimeError, units.end)
    told["no root"] = said(ValueError, lambda: ScheduledUnits(layer, []))
    told["no unit"] = said(ValueError, lambda: ScheduledUnits(model, [model.input]))
    return told


def test_uses_that_a_schedule_does_not_tell_are_errors_that_name_the_unit(
    pools: RankPools,
) -> None:
    for told in pools(2).run(_misuse):
        assert "begin_forward was called with no micro-batch under way" in told["not begun"]
        assert "gradients switched off" in told["no gradients"]
        assert told["not used"].startswith("layers.0.experts (Sequential) runs where its schedule")
        assert told["never begun"].startswith("layers.0 (Layer) is not in use")
        assert told["gradient"].startswith("a gradient of layers.0.experts (Sequential) arrived")
        assert "end was called with no micro-batch under way" in told["over"]
        assert "layers.0 (Layer) is inside another unit" in told["no root"]
        assert "Linear is not sharded" in told["no unit"]
