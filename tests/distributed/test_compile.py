"""torch.compile and sharding, in either order: results, graph breaks and recompilations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from megatron_fsdp_v2 import fully_shard, register_fsdp_forward_method
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.cases import quick_only, quick_strategies
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, STRATEGIES, batch, error_message, wrap
from tests.parity.patterns import Pattern
from tests.parity.patterns import batch as inputs
from tests.parity.test_parity import ALL
from tests.reference import models
from tests.reference.training import Trace, error_of_params, same_bits, train_sharded


class Compiler:
    """A backend of torch.compile that counts the graphs that it compiles.

    Args:
        name: Name of the backend that compiles the graphs.
    """

    def __init__(self, name: str = "eager") -> None:
        self.name, self.graphs = name, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return lookup_backend(self.name)(graph, inputs)


@contextlib.contextmanager
def compiler(name: str = "eager") -> Iterator[Compiler]:
    """Yield a counting backend; reset dynamo before and after."""
    torch._dynamo.reset()
    counters.clear()
    try:
        yield Compiler(name)
    finally:
        torch._dynamo.reset()


def built(make: Callable[[], Any] = models.Stack) -> Any:
    """A model with the same initial values in every training."""
    torch.manual_seed(0)
    return make()


def _trained(
    pattern: Pattern,
    of_unit: Any = None,
    of_root: Any = None,
    *,
    first: bool = False,
    settled: int = 5,
    **options: Any,
) -> Trace:
    """Train a pattern.

    Args:
        pattern: The pattern to train.
        of_unit: Compiles a unit other than the root.
        of_root: Compiles the root.
        first: Whether modules are compiled before they are sharded.
        settled: The first step in which a recompilation is an error.
        options: For `fully_shard`.
    """
    roots: list[Any] = []

    def build() -> Any:
        roots.append(pattern.build())
        return roots[-1]

    def compile_it(module: Any) -> None:
        how = of_root if module is roots[-1] else of_unit
        if how is not None:
            how(module)

    def shard(module: Any) -> None:
        if first:
            compile_it(module)
        fully_shard(module, **pattern.options, **options)
        if not first:
            compile_it(module)

    def loss(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
        with torch._dynamo.config.patch(error_on_recompile=step >= settled):
            return pattern.loss(model, step, micro, rank)

    return train_sharded(dataclasses.replace(pattern, build=build, loss=loss), shard)


def compare(name: str, pattern: Pattern, **how: Any) -> int:
    """Check that compiled units train as uncompiled ones without graph breaks; count graphs."""
    options = {key: value for key, value in how.items() if key not in ("first", "settled")}
    plain = _trained(pattern, **options)
    with compiler(name) as backend:
        of_unit = functools.partial(nn.Module.compile, backend=backend, fullgraph=True)
        found = _trained(pattern, of_unit, **{"settled": 1, **how})
    if name == "inductor":
        # Compare the rows of this rank.
        found.rows = {name: (0, len(rows)) for name, rows in found.params.items()}
        assert error_of_params(found, plain) < 1e-6
    else:
        assert same_bits(plain, found)
    assert not counters["graph_break"]
    return backend.graphs


BETWEEN = ALL["evaluation between"]


@pytest.mark.slow
@on_ranks(2, order=["sharded first", "compiled first"], strategy=quick_strategies(STRATEGIES))
def test_compiled_blocks_train_as_they_do_uncompiled(strategy: str, order: str) -> None:
    name = "aot_eager" if strategy == "optim_grads_params" else "eager"
    graphs = compare(name, BETWEEN, first=order == "compiled first", sharding_strategy=strategy)
    # One graph for training and one for evaluation, for any number of blocks.
    assert graphs == 2


@pytest.mark.functional
@on_ranks(2, timeout_s=300.0)
def test_blocks_compiled_by_inductor_train_as_they_do_uncompiled() -> None:
    compare("inductor", BETWEEN)


# Patterns, and further options, that must not affect compiled blocks.
VARIANTS: dict[str, dict[str, Any]] = {
    "checkpointing, non-reentrant": {},
    "checkpointing, reentrant": {},
    "checkpointed region of units, non-reentrant": {},
    "module used twice in a forward": {},
    "nested outputs, keyword inputs": {},
    "tied parameters in one unit": {},
    "frozen parameters": {},
    "two dtypes in one unit": {},
    "plain": {"mp_policy": BF16},
    "accumulation, every backward synchronized": {"reshard_after_forward": False},
    "accumulation under no_sync": {"enable_trace_pool": True},
    # A second size recompiles once, for dynamic shapes.
    "batches of several sizes": {"settled": 2},
}
QUICK = ("checkpointing, non-reentrant", "tied parameters in one unit", "batches of several sizes")


@on_ranks(2, name=quick_only(VARIANTS, *QUICK))
def test_compiled_blocks_of_all_kinds_train_as_they_do_uncompiled(name: str) -> None:
    assert compare("eager", ALL[name], **VARIANTS[name]) > 0


def _loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _same_numbers(first: Trace, second: Trace) -> bool:
    """Whether losses and parameters are equal, regardless of parameter names."""
    pairs = zip(first.params.values(), second.params.values(), strict=True)
    return first.losses == second.losses and all(torch.equal(a, b) for a, b in pairs)


def _replace_blocks(model: Any, backend: Compiler) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)


# Ways to compute a loss with a backend, and ways to compile the sharded model before.
LOSSES: dict[str, Callable[[Any, Any, torch.Tensor], torch.Tensor]] = {
    "torch.compile(model)": lambda b, m, x: _loss_of(torch.compile(m, backend=b), x),
    "the loss": lambda b, m, x: torch.compile(
        lambda y: y.square().mean(), backend=b, fullgraph=True
    )(m(x)),
    "forward and loss": lambda b, m, x: torch.compile(_loss_of, backend=b)(m, x),
}
ON_ROOT: dict[str, Callable[[Any, Any], Any]] = {
    "model.compile()": lambda model, backend: model.compile(backend=backend),
    "torch.compile(block)": _replace_blocks,
}


@pytest.mark.slow
@on_ranks(2, way=[*LOSSES, *ON_ROOT])
def test_compiled_graphs_break_only_at_units(way: str) -> None:
    pattern, on_root, expected = ALL["plain"], ON_ROOT.get(way), _trained(ALL["plain"])
    with compiler() as backend:
        if way in LOSSES:
            pattern = dataclasses.replace(
                pattern, loss=lambda m, *where: LOSSES[way](backend, m, inputs(*where))
            )
        of_root = None if on_root is None else lambda model: on_root(model, backend)
        found = _trained(pattern, of_root=of_root, settled=1)
    breaks = list(counters["graph_break"])
    assert _same_numbers(expected, found) and backend.graphs > 0
    assert all("megatron_fsdp_v2 gathers weights" in reason for reason in breaks)
    assert not breaks or way not in ("torch.compile(block)", "the loss")


@on_ranks(2)
def test_fullgraph_compile_of_a_sharded_model_is_rejected_with_advice() -> None:
    with compiler() as backend:
        model = wrap(built())
        compiled = torch.compile(_loss_of, backend=backend, fullgraph=True)
        error = torch._dynamo.exc.Unsupported
        message = error_message(error, lambda: compiled(model, batch(dist.get_rank())))
    assert "megatron_fsdp_v2 gathers weights" in message
    assert "module.compile(fullgraph=True)" in message


class ReadsParameters(models.Block):
    """Computes in the dtype of its parameters, as layers of model libraries do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(next(self.parameters()).dtype)) * len(list(self.modules()))


@on_ranks(2)
def test_compiled_forward_can_read_its_parameters() -> None:
    build = functools.partial(models.Stack, 2, block=ReadsParameters)
    assert compare("eager", Pattern(build)) > 0


@on_ranks(2)
def test_compiled_module_is_sharded_like_its_original_and_only_once() -> None:
    """Shard compiled blocks inside a compiled model, and train it."""
    expected = _trained(ALL["plain"])
    with compiler() as backend:

        def build() -> Any:
            model = models.Stack()
            _replace_blocks(model, backend)
            return model

        pattern = Pattern(
            build, loss=lambda m, *where: LOSSES["torch.compile(model)"](backend, m, inputs(*where))
        )
        assert _same_numbers(expected, _trained(pattern))
        again = torch.compile(wrap(built()), backend=backend)
        message = error_message(ValueError, lambda: fully_shard(again))
    assert "fully_shard was already called" in message


class Mixing(torch.optim.SGD):
    """Combines gradients with plain tensors, which is allowed in the step of an optimizer alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * torch.full(param.shape, 2.0), alpha=group["lr"])


@on_ranks(2, kind=[torch.optim.SGD, Mixing])
def test_compiled_training_step_trains_as_it_does_uncompiled(kind: Any) -> None:
    """Compile a whole step: forward, backward, clipping and the optimizer."""

    def trained(compile_it: Callable[[Any], Any]) -> list[torch.Tensor]:
        model = wrap(built())
        optimizer = kind(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = _loss_of(model, x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = compile_it(step)
        losses = [step(batch(dist.get_rank(), number)) for number in range(3)]
        return losses + [param.to_local().detach() for param in model.parameters()]

    plain = trained(lambda step: step)
    with compiler() as backend:
        found = trained(lambda step: torch.compile(step, backend=backend))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@on_ranks(2)
def test_sharded_parameters_keep_their_rows_in_compiled_functions() -> None:
    """Compute with sharded parameters in a compiled function, with and without `fullgraph`."""
    weight = wrap(built()).blocks[0].up.weight.detach()
    with compiler("aot_eager") as backend:
        double = torch.compile(lambda tensor: tensor + tensor, backend=backend)
        doubled = double(weight)
        assert type(doubled) is UnevenDTensor
        assert torch.equal(doubled.full_tensor(), 2 * weight.full_tensor())
        graph: Any = torch.compile(lambda tensor: tensor + tensor, backend=backend, fullgraph=True)
        message = error_message(torch._dynamo.exc.Unsupported, lambda: graph(weight))
    assert "a sharded tensor of shape (15, 7) is not traced" in message


class _Compiled(torch.optim.Optimizer):
    """SGD whose step of each parameter is compiled, as in the optimizers of torchao."""

    def __init__(self, params: Any, *, fullgraph: bool) -> None:
        super().__init__(params, {})
        self.fullgraph = fullgraph

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        def update(param: torch.Tensor, grad: torch.Tensor) -> None:
            param.copy_(param.float() - 0.1 * grad.float())

        compiled = torch.compile(update, backend="eager", fullgraph=self.fullgraph, dynamic=False)
        for group in self.param_groups:
            for param in group["params"]:
                compiled(param.detach(), param.grad)


@on_ranks(2)
def test_optimizer_whose_step_is_compiled_whole_is_rejected_by_name() -> None:
    torch._dynamo.reset()
    model, plain = wrap(nn.Linear(5, 3), []), nn.Linear(5, 3)
    plain.load_state_dict({n: p.full_tensor() for n, p in model.state_dict().items()})
    for each in (model, plain):
        each(torch.ones(2, 5)).square().mean().backward()
    whole = _Compiled(model.parameters(), fullgraph=True)
    message = error_message(torch._dynamo.exc.Unsupported, whole.step)
    _Compiled(model.parameters(), fullgraph=False).step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    weight = model.weight.full_tensor()
    assert "test_compile._Compiled cannot step sharded parameters: its step is compiled" in message
    assert "a sharded tensor of shape (3, 5) is not traced" in message
    torch.testing.assert_close(weight, plain.weight)


class Doubling(models.Block):
    """A block with a second forward method."""

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


@on_ranks(2)
def test_registered_forward_methods_run_in_compiled_functions() -> None:
    """Train through a registered method in a compiled function."""

    def call(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.output(model.blocks[0].doubled(model.input(x))).square().mean()

    def trained(call: Any) -> Trace:
        return _trained(
            Pattern(
                functools.partial(models.Stack, 2, block=Doubling),
                lambda m: [m.blocks[0], m.input, m.output],
                lambda m, *where: call(m, inputs(*where)),
            ),
            of_root=lambda m: register_fsdp_forward_method(m.blocks[0], "doubled"),
        )

    expected = trained(call)
    with compiler() as backend:
        found = trained(torch.compile(call, backend=backend))
    assert same_bits(expected, found)
    assert all("megatron_fsdp_v2 gathers weights" in reason for reason in counters["graph_break"])


@pytest.mark.slow
@on_ranks(2)
def test_compiled_autograd_is_rejected() -> None:
    with compiler() as backend:
        model = wrap(built())
        with torch._dynamo.config.patch(compiled_autograd=True):
            step = torch.compile(lambda m, x: _loss_of(m, x).backward(), backend=backend)
            message = error_message(RuntimeError, lambda: step(model, batch(dist.get_rank())))
    assert "the root (Stack) runs in compiled autograd" in message
