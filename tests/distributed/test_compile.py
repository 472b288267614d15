"""torch.compile and sharding, in either order: what is computed, and what is compiled how often."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from megatron_fsdp_v2 import checkpoint, fully_shard, register_fsdp_forward_method
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.cases import quick_only
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, STRATEGIES, batch, said, step_all, wrap
from tests.reference import models

STEPS = 3


@dataclass
class Compiler:
    """A backend of torch.compile that counts.

    Attributes:
        name: The backend that does the work.
        graphs: Graphs it was given since the start.
    """

    name: str = "eager"
    graphs: int = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return lookup_backend(self.name)(graph, inputs)


@contextlib.contextmanager
def compiler(name: str = "eager") -> Iterator[Compiler]:
    """A counting backend, with nothing compiled before or left after."""
    torch._dynamo.reset()
    counters.clear()
    try:
        yield Compiler(name)
    finally:
        torch._dynamo.reset()


@dataclass
class Shown:
    """What a training showed on this rank.

    Attributes:
        tensors: Losses, outputs of evaluations, gradients and parameters.
        graphs: Graphs compiled by the end of each step.
        breaks: Why graphs were broken, where they were.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Of a model's output."""
    return output.square().mean()


def forward_and_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    """What a step computes before its backward."""
    return loss_of(model(x))


def train(
    model: Any,
    step: Callable[[Any, torch.Tensor], torch.Tensor] = forward_and_loss,
    backend: Compiler | None = None,
    *,
    micro: int = 1,
    rows: Callable[[int], int] = lambda number: 4,
    settled: int = 1,
) -> Shown:
    """Steps of training with an evaluation in each; from the step `settled` on nothing recompiles.

    Args:
        model: Sharded.
        step: Makes a loss, whose backward may have run.
        backend: Counts; None where nothing is compiled.
        micro: Backwards in a step, the last of which synchronizes.
        rows: Of a batch, by step.
        settled: The first step in which everything has to be compiled.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
    shown, rank = Shown(), dist.get_rank()
    for number in range(settled + STEPS):
        with torch._dynamo.config.patch(error_on_recompile=number >= settled):
            for part in range(micro):
                model.set_requires_gradient_sync(part == micro - 1)
                loss = step(model, batch(rank, micro * number + part, rows(number)))
                if loss.requires_grad:
                    loss.backward()
                shown.tensors.append(loss.detach())
            with torch.no_grad():
                shown.tensors.append(model(batch(rank, number, rows(number))).clone())
        for param in model.parameters():
            if param.grad is not None:
                shown.tensors.append(param.grad.to_local().clone())
        step_all(optimizer)
        shown.tensors += [param.to_local().detach().clone() for param in model.parameters()]
        shown.graphs.append(0 if backend is None else backend.graphs)
    shown.breaks = list(counters["graph_break"])
    return shown


def check_same(compiled: Shown, plain: Shown, tolerance: float = 0.0) -> None:
    """See that two trainings showed the same."""
    assert len(compiled.tensors) == len(plain.tensors)
    for mine, theirs in zip(compiled.tensors, plain.tensors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def built(make: Callable[[], Any] = models.Stack) -> Any:
    """A model with the same values in every training."""
    torch.manual_seed(0)
    return make()


def compare(
    way: Callable[[Any, Compiler], Any],
    make: Callable[[], Any] = models.Stack,
    how: dict[str, Any] | None = None,
    name: str = "eager",
    **options: Any,
) -> Shown:
    """See that a model trains compiled as it does uncompiled; what the former showed.

    Args:
        way: Compiles some of a sharded model; gives what makes a loss.
        make: Builds the model.
        how: Other arguments of `train`.
        name: The backend.
        options: For `wrap`.
    """
    plain = train(_wrapped(built(make), options), **(how or {}))
    with compiler(name) as backend:
        model = _wrapped(built(make), options)
        found = train(model, way(model, backend), backend, **(how or {}))
    check_same(found, plain, tolerance=1e-6 if name == "inductor" else 0.0)
    assert found.graphs[0] > 0
    return found


def _compile_blocks(model: Any, backend: Compiler) -> Any:
    for block in _units(model):
        block.compile(backend=backend, fullgraph=True)
    return forward_and_loss


def compare_blocks(name: str, strategy: str) -> None:
    """Train with blocks compiled after sharding."""
    found = compare(_compile_blocks, name=name, sharding_strategy=strategy)
    # One for training and one for evaluation, whatever the number of blocks.
    assert found.graphs == [2] * len(found.graphs)
    assert not found.breaks


@on_ranks(2, order=["sharded first", "compiled first"], strategy=STRATEGIES)
def test_compiled_blocks_train_as_they_do_uncompiled(strategy: str, order: str) -> None:
    name = "aot_eager" if strategy == "optim_grads_params" else "eager"
    if order == "sharded first":
        compare_blocks(name, strategy)
        return
    plain = train(wrap(built(), sharding_strategy=strategy))
    with compiler(name) as backend:
        model = built()
        _compile_blocks(model, backend)
        found = train(wrap(model, sharding_strategy=strategy), backend=backend)
    check_same(found, plain)
    assert found.graphs == [2] * len(found.graphs)
    assert not found.breaks


@pytest.mark.functional
@on_ranks(2, timeout_s=300.0)
def test_blocks_compiled_to_machine_code_train_as_they_do_uncompiled() -> None:
    compare_blocks("inductor", "optim_grads_params")


# Models whose blocks differ, and what compiled blocks have to be compiled for.
@dataclass
class Variant:
    """A model, options of `wrap`, and arguments of `train`."""

    make: Callable[[], Any] = models.Stack
    options: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "recomputed": Variant(lambda: models.Checkpointed(use_reentrant=False)),
    "recomputed inside the engine": Variant(lambda: models.Checkpointed(use_reentrant=True)),
    "recomputed together": Variant(lambda: models.CheckpointedRegion(use_reentrant=False)),
    "recomputed in part": Variant(models.Nested),
    "used twice": Variant(models.UsedTwice),
    "with a detached input": Variant(models.Detached),
    "with nested outputs": Variant(models.NestedOutputs),
    "with tied weights": Variant(models.TiedInside),
    "frozen in part": Variant(models.PartlyFrozen),
    "of two dtypes": Variant(models.MixedDtypes),
    "in bf16": Variant(options={"mp_policy": BF16}),
    "kept gathered": Variant(options={"reshard_after_forward": False}),
    "in a traced pool": Variant(options={"enable_trace_pool": True}),
    "with micro-batches": Variant(how={"micro": 3}),
    "with batches of several sizes": Variant(
        how={"rows": lambda number: (4, 3, 4, 2, 6)[number], "settled": 2}
    ),
}


def _units(model: Any) -> Any:
    return model.outer if isinstance(model, models.Nested) else model.blocks


def _wrapped(model: Any, options: dict[str, Any]) -> Any:
    return wrap(model, _units(model), **options)


QUICK = ("recomputed", "with tied weights", "with batches of several sizes")


@on_ranks(2, name=quick_only(VARIANTS, *QUICK))
def test_compiled_blocks_of_all_kinds_train_as_they_do_uncompiled(name: str) -> None:
    case = VARIANTS[name]
    assert not compare(_compile_blocks, case.make, case.how, **case.options).breaks


def _compile_model(model: Any, backend: Compiler) -> Any:
    model.compile(backend=backend)
    return forward_and_loss


def _wrap_model(model: Any, backend: Compiler) -> Any:
    compiled = torch.compile(model, backend=backend)
    return lambda _, x: loss_of(compiled(x))


def _compile_blocks_in_place(model: Any, backend: Compiler) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)
    return forward_and_loss


def _compile_loss(model: Any, backend: Compiler) -> Any:
    loss: Any = torch.compile(loss_of, backend=backend, fullgraph=True)
    return lambda model, x: loss(model(x))


def _forward_and_backward(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(x))
    loss.backward()
    return loss.detach()


WAYS: dict[str, Callable[[Any, Compiler], Any]] = {
    "model.compile()": _compile_model,
    "torch.compile(model)": _wrap_model,
    "torch.compile(block)": _compile_blocks_in_place,
    "the loss": _compile_loss,
    "forward and loss": lambda _, backend: torch.compile(forward_and_loss, backend=backend),
    "forward, loss and backward": lambda _, backend: torch.compile(
        _forward_and_backward, backend=backend
    ),
}


@on_ranks(2, way=WAYS)
def test_graphs_of_models_and_steps_end_where_units_begin_and_at_backwards_only(way: str) -> None:
    found = compare(WAYS[way])
    breaks = found.breaks
    assert found.graphs == found.graphs[:1] * len(found.graphs)
    for reason in breaks:
        assert "megatron_fsdp_v2 gathers weights" in reason or "Tensor.backward()" in reason
    if way in ("torch.compile(block)", "the loss"):
        assert not breaks


@on_ranks(2)
def test_a_model_of_units_as_one_graph_is_rejected_with_what_to_do() -> None:
    with compiler() as backend:
        model = wrap(built())
        compiled = torch.compile(forward_and_loss, backend=backend, fullgraph=True)
        error = torch._dynamo.exc.Unsupported
        message = said(error, lambda: compiled(model, batch(dist.get_rank())))
    assert "megatron_fsdp_v2 gathers weights" in message
    assert "module.compile(fullgraph=True)" in message


class AsksForParameters(models.Block):
    """What a layer of a model library computes in follows from its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(next(self.parameters()).dtype)) * len(list(self.modules()))


@on_ranks(2)
def test_a_compiled_forward_may_ask_for_its_parameters() -> None:
    compare(_compile_blocks, lambda: models.Stack(2, block=AsksForParameters))


@on_ranks(2)
def test_what_the_compiler_made_of_a_module_is_sharded_like_it_and_once() -> None:
    """Train with wrapped blocks sharded inside of a wrapped model."""
    plain = train(wrap(built()))
    with compiler() as backend:
        model = built()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
        wrap(model)
        check_same(train(model, _wrap_model(model, backend), backend), plain)
        again = torch.compile(model, backend=backend)
        message = said(ValueError, lambda: fully_shard(again))
    assert "fully_shard was already called" in message


@on_ranks(2)
def test_a_compiled_step_of_everything_trains_as_it_does_uncompiled() -> None:
    """Compile all of a step: forward, backward, clipping, the optimizer."""

    def trained(compile_it: Callable[[Any], Any]) -> list[torch.Tensor]:
        model = wrap(built())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model(x))
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
    """Compute with sharded parameters in a compiled function, and in one graph."""
    weight = wrap(built()).blocks[0].up.weight.detach()
    with compiler("aot_eager") as backend:
        double = torch.compile(lambda tensor: tensor + tensor, backend=backend)
        doubled = double(weight)
        assert type(doubled) is UnevenDTensor
        assert torch.equal(doubled.full_tensor(), 2 * weight.full_tensor())
        graph: Any = torch.compile(lambda tensor: tensor + tensor, backend=backend, fullgraph=True)
        message = said(torch._dynamo.exc.Unsupported, lambda: graph(weight))
    assert "a sharded tensor of shape (15, 7) is not traced" in message


class Doubling(models.Block):
    """A block with another method that runs as its forward."""

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


@on_ranks(2)
def test_methods_that_run_as_forwards_may_be_called_in_compiled_functions() -> None:
    """Train through a registered method in a compiled function."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return loss_of(model.output(model.blocks[0].doubled(model.input(x))))

    def wrapped() -> Any:
        model = built(lambda: models.Stack(2, block=Doubling))
        wrap(model, [model.blocks[0], model.input, model.output])
        register_fsdp_forward_method(model.blocks[0], "doubled")
        return model

    plain = train(wrapped(), loss)
    with compiler() as backend:
        found = train(wrapped(), torch.compile(loss, backend=backend), backend)
    check_same(found, plain)
    assert all("megatron_fsdp_v2 gathers weights" in reason for reason in found.breaks)


@on_ranks(2)
def test_compiled_autograd_is_rejected() -> None:
    with compiler() as backend:
        model = wrap(built())
        with torch._dynamo.config.patch(compiled_autograd=True):
            step = torch.compile(_forward_and_backward, backend=backend)
            message = said(RuntimeError, lambda: step(model, batch(dist.get_rank())))
    assert "the root (Stack) runs in compiled autograd" in message


@on_ranks(2)
def test_a_checkpoint_of_a_compiled_model_is_one_of_the_model(tmp_path: Path) -> None:
    """Save a compiled model and its optimizer, load them into one that is not."""
    folder = str(tmp_path / "k")
    with compiler() as backend:
        model = built()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
        compiled: Any = torch.compile(wrap(model), backend=backend)
        optimizer = torch.optim.Adam(compiled.parameters())
        loss_of(compiled(batch(dist.get_rank()))).backward()
        optimizer.step()
        checkpoint.save(folder, compiled, optimizer)
    loaded = wrap(built())
    other = torch.optim.Adam(loaded.parameters())
    checkpoint.load(folder, loaded, other)
    for mine, theirs in zip(loaded.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
        if mine.to_local().numel():
            moments = (other.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
            assert torch.equal(*(moment.to_local() for moment in moments))
