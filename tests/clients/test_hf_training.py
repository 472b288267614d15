"""Training of sharded transformers' models equals the same loop without sharding."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch._dynamo.utils import counters
from torch.utils.data import SequentialSampler

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.runtime.module import named_units
from tests.clients.conftest import Measure, Record, forget_accelerators
from tests.clients.differences import STRATEGIES
from tests.clients.hf_models import MODELS, Batch, units
from tests.distributed.wrapping import MESHES, mesh_of, on_mesh
from tests.parity.patterns import Pattern
from tests.ranks import RankPools
from tests.reference.training import (
    ModelAccess,
    Trace,
    built,
    compare,
    distances,
    run,
    same_bits,
    shard_units,
    sharded_access,
    train_reference,
    train_sharded,
)
from tests.sharding import shard

COMPARED = "losses, gradients and parameters of 3 steps of 2 micro-batches"
IN_DETAIL = ("Llama", "Mixtral")
TWO_PARTS = ("T5", "Whisper")


def training_of(
    name: str,
    *,
    loss: Callable[[Any, Batch], Any] = lambda model, batch: model(**batch).loss,
    prepare: Callable[[Any], object] = lambda model: None,
    **changes: Any,
) -> Pattern:
    """Return the pattern of a training of a model.

    Args:
        name: Name of the model.
        loss: Loss of a batch: `(model, batch)`.
        prepare: Called with the model before sharding.
        changes: Other fields of the pattern.
    """
    model = MODELS[name]
    make = changes.pop("build", model.build)

    def build() -> Any:
        made = make()
        prepare(made)
        return made

    def loss_of(module: Any, step: int, micro: int, rank: int) -> Any:
        # Dropout draws the same numbers sharded and unsharded.
        torch.manual_seed(1000 * step + 100 * micro + rank)
        return loss(module, model.batch(100 * step + 10 * micro + rank))

    how = {"num_micro": 2, "sync": "no_sync", "set_to_none": True, "steps": range(3), **changes}
    return Pattern(build, units, loss_of, **how)


def options_of(strategy: str, mesh: str = "2") -> dict[str, Any]:
    """Return arguments of `fully_shard`."""
    return {"sharding_strategy": STRATEGIES[strategy], **on_mesh(mesh)}


def sharded(training: Pattern, model: Any) -> Any:
    """Shard a model with the units and options of its training."""
    return shard_units(training, model, lambda module: shard(module, **training.options))


def difference(training: Pattern) -> float:
    """Train sharded and unsharded; return the largest difference on this rank. Collective."""
    trace = train_sharded(training, lambda module: shard(module, **training.options))
    return compare(trace, train_reference(training, dist.get_world_size(), dist.get_rank()))


def all_hidden_states(model: Any, batch: Batch) -> Any:
    """Return a loss of the outputs of all layers."""
    states = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    assert len(states) == 3
    return sum(state.square().mean() for state in states)


def _recomputes(*, use_reentrant: bool) -> dict[str, Any]:
    arguments = {"use_reentrant": use_reentrant}
    return {"prepare": lambda model: model.gradient_checkpointing_enable(arguments)}


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "reentrant checkpointing": _recomputes(use_reentrant=True),
    "non-reentrant checkpointing": _recomputes(use_reentrant=False),
    "without a head": {"build": lambda: MODELS["Llama"].build().model, "loss": all_hidden_states},
}


def difference_of_a_training(name: str, strategy: str, mesh: str, variant: str) -> float:
    return difference(training_of(name, options=options_of(strategy, mesh), **VARIANTS[variant]))


_DEFAULT, *_RECOMPUTED, _HEADLESS = VARIANTS
_CASES = [
    *((name, "ZeRO-3", mesh, _DEFAULT) for name in MODELS for mesh in ("1", "2")),
    *((n, strategy, "2", _DEFAULT) for n in IN_DETAIL for strategy in list(STRATEGIES)[:3]),
    *((n, "ZeRO-3", mesh, _DEFAULT) for n in IN_DETAIL for mesh in ("3", "HSDP 2x2", "HFSDP 2x2")),
    *((name, "ZeRO-3", "2", variant) for name in MODELS for variant in _RECOMPUTED),
    *(("Llama", strategy, "2", _HEADLESS) for strategy in ("ZeRO-1", "ZeRO-3")),
]


@pytest.mark.parametrize(("name", "strategy", "mesh", "variant"), _CASES)
def test_model_trains_like_unsharded(
    measure: Measure, name: str, strategy: str, mesh: str, variant: str
) -> None:
    # All layers of a decoder add to the gradient of the encoder's output. A unit sums its own
    # contributions first, and the order of a sum of three or more numbers changes its rounding.
    at_most = 0.0 if mesh == "1" and name not in TWO_PARTS else 1e-6
    ranks, case = math.prod(MESHES[mesh][0]), (name, strategy, mesh, variant)
    measure("transformers", COMPARED, ranks, difference_of_a_training, *case, at_most=at_most)


def names_of_units(name: str, code: str) -> list[str]:
    model = built(training_of(name))
    exec(code, {"model": model, "mesh": mesh_of(1), "fully_shard": fully_shard})
    return [unit for unit, _ in named_units(model)]


def test_code_of_the_page_makes_layers_and_experts_units(clients: RankPools) -> None:
    page = Path(__file__).parents[2] / "docs/hugging_face.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    (names,) = clients(1).run(names_of_units, "Mixtral", code)
    layers = [f"model.layers.{i}{part}" for i in range(2) for part in ("", ".mlp.experts")]
    assert names == ["", *layers]


# -- Trainer --------------------------------------------------------------------------------------

STEPS = 3


class InOrder(transformers.Trainer):
    """A Trainer that does not shuffle its data."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def data_of(name: str) -> list[dict[str, torch.Tensor]]:
    batches = [MODELS[name].batch(seed) for seed in range(4 * STEPS)]
    return [{key: value[row] for key, value in b.items()} for b in batches for row in range(2)]


def trainer_arguments(folder: Path) -> dict[str, Any]:
    """Return arguments of a trainer on a CPU that steps on two micro-batches and clips."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "optim": "sgd",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def logged_losses(trainer: Any) -> list[float]:
    """Train, and return the loss of every step."""
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def trainer_losses(name: str, model: Any, folder: Path) -> list[float]:
    arguments = transformers.TrainingArguments(
        **trainer_arguments(folder), optim_args="momentum=0.9", lr_scheduler_type="linear"
    )
    forget_accelerators()
    return logged_losses(InOrder(model=model, args=arguments, train_dataset=data_of(name)))


def difference_with_trainer(name: str, strategy: str, folder: Path) -> float:
    training = training_of(name, options=options_of(strategy))
    plain = built(training)
    losses = trainer_losses(name, plain, folder)
    model = sharded(training, built(training))
    # The library sets this attribute on models that it distributes: Trainer does not wrap them.
    model._is_distributed_loading_by_transformers = True
    sharded_losses = trainer_losses(name, model, folder)
    assert len(losses) == STEPS
    errors = [abs(a - b) / b for a, b in zip(sharded_losses, losses, strict=True)]
    held = {n: (p.local_rows, p.to_local().detach()) for n, p in model.named_parameters()}
    return max(*errors, *distances(held, dict(plain.named_parameters())))


@pytest.mark.parametrize(
    ("name", "strategy"), [("Llama", "ZeRO-1"), ("Llama", "ZeRO-3"), ("Mixtral", "ZeRO-3")]
)
def test_trainer_trains_a_sharded_model_like_a_plain_model(
    measure: Measure, tmp_path: Path, name: str, strategy: str
) -> None:
    compared = "losses and parameters after 3 steps, clipped, accumulated"
    measure("transformers", compared, 2, difference_with_trainer, name, strategy, tmp_path)


# -- compiled layers ------------------------------------------------------------------------------

BEFORE, AFTER, NEVER = "compiled and then sharded", "sharded and then compiled", "not compiled"


def compile_layers(model: Any) -> None:
    """Compile each layer separately."""
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def train(
    training: Pattern, order: str, *, is_sharded: bool = True
) -> tuple[Trace, list[int], list[str]]:
    """Train with layers that are compiled before or after sharding, or not at all.

    Returns:
        The trace, the number of graphs compiled up to each evaluation, and the reasons of graph
        breaks.
    """
    graphs: list[int] = []

    def count(model: Any, step: int, rank: int) -> None:
        graphs.append(counters["stats"]["unique_graphs"])

    torch._dynamo.reset()
    counters.clear()
    training = replace(training, evaluate=count)
    model, hands = built(training), sharded_access(training)
    if order == BEFORE:
        compile_layers(model)
    if is_sharded:
        sharded(training, model)
    else:
        hands = ModelAccess(hands.ranks, 1.0, torch.clone, lambda *_: contextlib.nullcontext())
    if order == AFTER:
        compile_layers(model)
    trace = run(training, model, hands, dist.get_rank())
    return trace, graphs, list(counters["graph_break"])


def compiled_layers_give_same_bits(order: str) -> bool:
    # Only generation uses the cache of keys and values.
    training = training_of("Llama", prepare=lambda m: setattr(m.config, "use_cache", False))
    plain, *_ = train(training, NEVER)
    _, (number, *_), breaks_unsharded = train(training, BEFORE, is_sharded=False)
    compiled, graphs, breaks = train(training, order)
    # Sharding adds no graph, and the first forward and backward compile all graphs.
    assert graphs == [number] * (3 * len(training.steps)) and number > 0
    assert breaks == breaks_unsharded
    return same_bits(compiled, plain)


@pytest.mark.parametrize("order", [BEFORE, AFTER])
def test_llama_with_compiled_layers_trains_like_uncompiled(
    clients: RankPools, record: Record, order: str
) -> None:
    assert clients(2).run(compiled_layers_give_same_bits, order) == [True, True]
    record("transformers", COMPARED, 0.0)
