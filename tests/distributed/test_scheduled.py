"""Modules that a schedule runs in parts, forwards interleaved with backwards."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.memory.observer import Event, PhaseBegan
from megatron_fsdp_v2.runtime.module import named_units, unit_of
from megatron_fsdp_v2_mcore.model.scheduled_units import ScheduledUnits
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    batch,
    check_error_messages,
    error_message,
    gradient_error,
    on_mesh,
    pair,
    step_all,
    weight_error,
    wrap,
)
from tests.reference.late_product import LateProduct
from tests.reference.models import Stack

WIDTH = 5
MICRO_BATCHES = 3
BLOCKS = 3


class LateLinear(nn.Linear):
    """Defers its weight gradients to `backward_dw`, as Transformer Engine's modules do."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.later: list[Any] | None = None
        self.fuses = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.later is None:
            return super().forward(x)
        product: torch.Tensor = LateProduct.apply(x, self.weight, self._leave)
        return product + self.bias

    def _leave(self, weight: Any, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        main_grad = placeholder = None
        if self.fuses:
            # A kernel that accumulates into the gradient reads its address in the backward.
            main_grad, placeholder = weight.main_grad, torch.empty_like(weight)
            weight.grad_added_to_main_grad = True
        self.later.append((grad.t() @ x, main_grad))
        return placeholder

    def backward_dw(self) -> None:
        """Compute the weight's gradient of the oldest backward."""
        grad, main_grad = self.later.pop(0)
        if main_grad is None:
            self.weight.grad = grad
        else:
            main_grad.add_(grad)


class Layer(nn.Module):
    """A layer with experts in the middle, which are a separate unit."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = LateLinear(WIDTH)
        self.experts = nn.Sequential(LateLinear(WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.experts(torch.tanh(self.attention(x))))


class Model(Stack):
    """A root whose blocks are layers, and whose output layer defers its weight gradients."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, WIDTH, block=lambda _: Layer(), ends=(WIDTH, WIDTH))
        self.output = LateLinear(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).square().mean()


class Node:
    """One scheduled part with a separate autograd graph, as in Megatron's schedule plans."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self.input = x.detach().requires_grad_()
        self.output = run(self.input)

    def backward(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Run its backward; return its input's gradient."""
        torch.autograd.backward(self.output, grad)
        return self.input.grad


class MicroBatch:
    """Forward and backward of a micro-batch, as generators that yield after every node."""

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
        for layer in self.model.blocks:
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
        for layer in reversed(self.model.blocks):
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
    inputs = batch(rank, step, rows=3 * MICRO_BATCHES, dtype=torch.float64)
    return inputs.view(MICRO_BATCHES, 3, WIDTH)


class Trained:
    """A plain model, and a sharded one that a schedule runs."""

    def __init__(
        self, strategy: str, mesh_name: str = "2", *, fuses: bool = False, **options: Any
    ) -> None:
        def parts(model: Any) -> list[nn.Module]:
            return [part for layer in model.blocks for part in (layer.experts, layer)]

        options = {"sharding_strategy": strategy, **on_mesh(mesh_name), **options}
        self.plain, self.model = pair(lambda: Model().double(), parts, **options)
        self.late = [m for m in self.model.modules() if isinstance(m, LateLinear)]
        for module in self.late:
            module.fuses = fuses
        self.drop_late()
        self.units = ScheduledUnits(self.model, parts(self.model))
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.plain, self.model)
        ]
        self.most_gathered = 0

    def drop_late(self) -> None:
        """Defer weight gradients from now on; drop the pending ones."""
        for module in self.late:
            module.later = []

    def _watch(self, *passes: Iterator[None]) -> None:
        """Run forwards and backwards alternately, node by node."""
        for _ in itertools.zip_longest(*passes):
            gathered = [unit for _, unit in named_units(self.model) if unit.is_unsharded]
            self.most_gathered = max(self.most_gathered, len(gathered))

    def run(self, step: int, *, fails: bool = False) -> None:
        """Compute the gradients of a step, with one forward ahead of the backwards."""
        batches = [MicroBatch(self.model, self.units, x) for x in data(step, dist.get_rank())]
        self._watch(batches[0].forward())
        with self.model.no_sync():
            for former, latter in itertools.pairwise(batches):
                self._watch(latter.forward(), former.backward())
                if fails:
                    raise KeyError
        self._watch(batches[-1].backward())

    def step(self, step: int) -> float:
        """Step both models; return the largest difference of weights and gradients."""
        self.run(step)
        for rank in range(dist.get_world_size()):
            for x in data(step, rank):
                (self.plain(x) / dist.get_world_size()).backward()
        worst = gradient_error(self.model, self.plain)
        step_all(*self.optimizers)
        return max(worst, weight_error(self.model, self.plain))

    def evaluate(self) -> float:
        """Difference of the losses in an evaluation, which calls the model."""
        x = data(99, dist.get_rank())[0]
        with torch.no_grad():
            return abs(float(self.model(x) - self.plain(x)))


def _train(*how: str, **options: Any) -> int:
    """Train both models for three steps; return the most units gathered at once."""
    trained, errors = Trained(*how, **options), []
    for step in range(3):
        errors += [trained.step(step), trained.evaluate()]
    at_rest = [unit for _, unit in named_units(trained.model) if unit.is_unsharded]
    assert not at_rest, "something stayed gathered"
    assert max(errors) < 1e-12
    return trained.most_gathered


PLAIN = {"enable_unshard_prefetch": False, "enable_async_reduce_grad": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "synchronous": PLAIN,
    "pool": {"enable_trace_pool": True},
    "fused": {"fuses": True},
}


@on_ranks(2, strategy=STRATEGIES[1::2], options=OPTIONS)
def test_schedule_with_deferred_weight_gradients_trains_like_a_plain_loop(
    strategy: str, options: str
) -> None:
    _train(strategy, **OPTIONS[options])


@on_ranks("mesh_name", mesh_name=["HSDP 2x2", "HFSDP 2x2"])
def test_schedule_trains_with_an_outer_axis(mesh_name: str) -> None:
    _train("optim_grads_params", mesh_name, check_ranks="always")


@on_ranks(2)
def test_units_are_gathered_for_the_parts_that_use_them() -> None:
    # The root, a layer in its forward, one in its backward and the experts of one; one prefetched.
    assert _train("optim_grads_params", **PLAIN) == 4
    assert _train("optim_grads_params") == 5


@on_ranks(2)
def test_part_whose_backward_follows_its_forward_is_gathered_once() -> None:
    model = wrap(Stack())
    parts, gathered = list(model.blocks), []
    units = ScheduledUnits(model, parts)

    def receive(event: Event) -> None:
        if isinstance(event, PhaseBegan) and event.phase == "unshard":
            gathered.append(event.owner)

    unit_of(model).context.observer.subscribe(receive)
    for _ in range(2):
        gathered.clear()
        units.begin()
        for part in parts:
            units.begin_forward(part)
            units.end_forward(part)
        for part in reversed(parts):
            units.begin_backward(part)
            units.end_backward(part)
        units.end()
    assert gathered.count("blocks.2") == 1
    assert gathered.count("blocks.1") == 2


@on_ranks(2, how=["abandon", "evaluate"], strategy=["optim", "optim_grads_params"])
def test_schedule_is_reset_after_an_exception(strategy: str, how: str) -> None:
    trained = Trained(strategy)
    worst = trained.step(0)
    with contextlib.suppress(KeyError):
        trained.run(1, fails=True)
    assert trained.units.is_open
    if how == "abandon":
        trained.units.abandon()
    else:
        worst = max(worst, trained.evaluate())
    assert not trained.units.is_open
    trained.optimizers[1].zero_grad()
    trained.drop_late()
    assert max(worst, trained.step(2)) < 1e-12


@on_ranks(2)
def test_undeclared_uses_in_a_schedule_raise_errors_that_name_the_unit() -> None:
    trained = Trained("optim_grads_params")
    model, units = trained.model, trained.units
    layer = model.blocks[0]
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    not_begun = error_message(RuntimeError, lambda: units.begin_forward(layer))
    with torch.no_grad():
        no_gradients = error_message(RuntimeError, units.begin)
    units.begin()
    not_used = error_message(RuntimeError, lambda: layer.experts(x))
    never_begun = error_message(RuntimeError, lambda: units.end_forward(layer))
    units.begin_forward(layer.experts)
    output = layer.experts(x)
    units.end_forward(layer.experts)
    gradient = error_message(RuntimeError, lambda: output.sum().backward())
    units.abandon()
    assert "end was called with no micro-batch under way" in error_message(RuntimeError, units.end)
    assert "begin_forward was called with no micro-batch under way" in not_begun
    assert "gradients disabled" in no_gradients
    assert not_used.startswith("blocks.0.experts (Sequential) runs outside the uses")
    assert never_begun.startswith("blocks.0 (Layer) is not in use")
    assert gradient.startswith("a gradient of blocks.0.experts (Sequential) arrived")
    no_root: dict[str, Callable[[], Any]] = {
        "blocks.0 (Layer) is inside another unit": lambda: ScheduledUnits(layer, []),
        "Linear is not sharded": lambda: ScheduledUnits(model, [model.input]),
    }
    check_error_messages(ValueError, no_root)
