"""transformers' models in a loop of one's own, sharded, against the same loop unsharded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch._dynamo.utils import counters
from torch.utils.data import SequentialSampler

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.clients.conftest import Measure, forget_accelerators
from tests.clients.harness import (
    STRATEGIES,
    Batch,
    Part,
    Trace,
    Training,
    build,
    change_of_parts,
    compare,
    difference_of_parts,
    mesh_of,
    parameters_held,
    run,
    shard,
    train_sharded,
)
from tests.clients.hf_models import MODELS, units
from tests.ranks import RankPools

MESHES = {"1 rank": (1,), "2 ranks": (2,), "3 ranks": (3,), "HSDP 2x2": (2, 2), "HFSDP 2x2": (2, 2)}
COMPARED = "losses, gradients and parameters of 3 steps of 2 micro-batches"
IN_DETAIL = ("Llama", "Mixtral")
TWO_PARTS = ("T5", "Whisper")


def training_of(name: str, **changes: Any) -> Training:
    """A training of one of the models, in a process of its own."""
    model = MODELS[name]

    def batch(step: int, micro: int, rank: int) -> Batch:
        return model.batch(100 * step + 10 * micro + rank)

    return Training(**{"build": model.build, "units": units, "batch": batch, **changes})


def options_of(strategy: str, mesh: str) -> dict[str, Any]:
    """Arguments of `fully_shard`."""
    outer = "optim" if mesh == "HFSDP 2x2" else "no_shard"
    return {
        "mesh": mesh_of(*MESHES[mesh]),
        "sharding_strategy": STRATEGIES[strategy],
        "outer_dp_sharding_strategy": outer,
    }


def difference_of_a_training(name: str, strategy: str, mesh: str) -> float:
    return compare(training_of(name, options=options_of(strategy, mesh)))


_CASES = [
    *((name, "ZeRO-3", "2 ranks") for name in MODELS),
    *((name, strategy, "2 ranks") for name in IN_DETAIL for strategy in list(STRATEGIES)[:3]),
    *((name, "ZeRO-3", mesh) for name in IN_DETAIL for mesh in list(MESHES)[2:]),
]


@pytest.mark.parametrize(("name", "strategy", "mesh"), _CASES)
def test_a_model_trains_as_it_does_unsharded(
    measure: Measure, name: str, strategy: str, mesh: str
) -> None:
    ranks = math.prod(MESHES[mesh])
    measure("transformers", COMPARED, ranks, difference_of_a_training, name, strategy, mesh)


@pytest.mark.parametrize("name", MODELS)
def test_on_one_rank_a_model_trains_as_it_does_unsharded(measure: Measure, name: str) -> None:
    # A decoder's layers all add to the gradient of the encoder's output. A unit adds up its own
    # contributions first, and the sum of three or more numbers depends on the order.
    at_most, training = 1e-6 if name in TWO_PARTS else 0.0, (name, "ZeRO-3", "1 rank")
    measure("transformers", COMPARED, 1, difference_of_a_training, *training, at_most=at_most)


def difference_with_recomputation(name: str, use_reentrant: bool) -> float:
    def recompute(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})

    options = options_of("ZeRO-3", "2 ranks")
    return compare(training_of(name, prepare=recompute, options=options))


@pytest.mark.parametrize("recomputation", ["reentrant", "non reentrant"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_gradient_checkpointing_trains_as_it_does_unsharded(
    measure: Measure, name: str, recomputation: str
) -> None:
    reentrant = recomputation == "reentrant"
    measure("transformers", COMPARED, 2, difference_with_recomputation, name, reentrant)


def all_hidden_states(model: Any, batch: Batch) -> Any:
    """A loss that every layer's output is a part of."""
    states = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    assert len(states) == 3
    return sum(state.square().mean() for state in states)


def difference_without_a_head(strategy: str) -> float:
    changes = {"build": lambda: MODELS["Llama"].build().model, "loss": all_hidden_states}
    return compare(training_of("Llama", options=options_of(strategy, "2 ranks"), **changes))


@pytest.mark.parametrize("strategy", ["ZeRO-1", "ZeRO-3"])
def test_a_model_without_a_head_trains_on_all_its_hidden_states_as_unsharded(
    measure: Measure, strategy: str
) -> None:
    measure("transformers", COMPARED, 2, difference_without_a_head, strategy)


def train_by_hand_in_bf16(training: Training) -> dict[str, Part]:
    """Unsharded: computed with bf16 copies of the parameters, summed and stepped in fp32."""
    main, copy = build(training), build(training)
    optimizer = training.optimizer(main.parameters())
    ranks = dist.get_world_size()
    for param in copy.parameters():
        param.data = param.data.bfloat16()
    for step in range(training.num_steps):
        with torch.no_grad():
            for mine, theirs in zip(main.parameters(), copy.parameters(), strict=True):
                theirs.copy_(mine)
                mine.grad = torch.zeros_like(mine)
        for micro in range(training.num_micro):
            sums = [torch.zeros_like(param) for param in main.parameters()]
            for rank in range(ranks):
                training.loss(copy, training.batch(step, micro, rank)).backward()
                for total, theirs in zip(sums, copy.parameters(), strict=True):
                    assert theirs.grad is not None
                    total.add_(theirs.grad.float())
                    theirs.grad = None
            for mine, total in zip(main.parameters(), sums, strict=True):
                assert mine.grad is not None
                mine.grad += total / ranks
        optimizer.step()
    return parameters_held(main)


def difference_in_bf16(name: str) -> float:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {**options_of("ZeRO-3", "2 ranks"), "mp_policy": policy}
    training = training_of(name, options=options)
    return difference_of_parts(train_sharded(training).params, train_by_hand_in_bf16(training))


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_model_trains_in_bf16_as_by_hand_with_copies_of_fp32_weights(
    measure: Measure, name: str
) -> None:
    compared = "parameters after 3 steps of 2 micro-batches"
    measure("transformers", compared, 2, difference_in_bf16, name)


def names_of_units(name: str, code: str) -> list[str]:
    model = build(training_of(name))
    exec(code, {"model": model, "mesh": mesh_of(1), "fully_shard": fully_shard})
    return [unit for unit, _ in named_units(model)]


def test_layers_and_experts_are_units_where_the_page_is_followed(clients: RankPools) -> None:
    page = Path(__file__).parents[2] / "docs/clients.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    (names,) = clients(1).run(names_of_units, "Mixtral", code)
    layers = [f"model.layers.{i}{part}" for i in range(2) for part in ("", ".mlp.experts")]
    assert names == ["", *layers]


# -- the library's Trainer, against its own data parallelism --------------------------------------

STEPS = 3


class InOrder(transformers.Trainer):
    """Sees its data in the order it is in."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        del args, kwargs
        return SequentialSampler(self.train_dataset)


def _data(name: str) -> list[dict[str, torch.Tensor]]:
    batches = [MODELS[name].batch(seed) for seed in range(4 * STEPS)]
    return [{key: value[row] for key, value in b.items()} for b in batches for row in range(2)]


def _train(name: str, model: Any, folder: Path) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        optim="sgd",
        optim_args="momentum=0.9",
        lr_scheduler_type="linear",
        max_grad_norm=0.5,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    forget_accelerators()
    trainer = InOrder(model=model, args=arguments, train_dataset=_data(name))
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def difference_with_trainer(name: str, strategy: str, folder: Path) -> float:
    training = training_of(name, options=options_of(strategy, "2 ranks"))
    plain: Any = build(training)
    losses = _train(name, plain, folder)
    model: Any = shard(training, build(training))
    # As the library marks what it has distributed itself: Trainer wraps nothing around it.
    model._is_distributed_loading_by_transformers = True
    sharded_losses = _train(name, model, folder)
    assert len(losses) == STEPS
    errors = [abs(a - b) / b for a, b in zip(sharded_losses, losses, strict=True)]
    return max(*errors, difference_of_parts(parameters_held(model), parameters_held(plain)))


@pytest.mark.parametrize(
    ("name", "strategy"), [("Llama", "ZeRO-1"), ("Llama", "ZeRO-3"), ("Mixtral", "ZeRO-3")]
)
def test_trainer_trains_a_sharded_model_as_its_own_data_parallelism_does(
    measure: Measure, tmp_path: Path, name: str, strategy: str
) -> None:
    compared = "losses and parameters after 3 steps, clipped, accumulated"
    measure("transformers", compared, 2, difference_with_trainer, name, strategy, tmp_path)


# -- layers that are compiled, and sharded before or after ----------------------------------------

BEFORE, AFTER, NEVER = "compiled and then sharded", "sharded and then compiled", "not compiled"


@dataclass
class Compiled:
    """What a training with compiled layers showed.

    Attributes:
        trace: What was computed.
        graphs: Graphs compiled so far, after the first micro-batch and after each step.
        breaks: Why graphs were broken, where they were.
    """

    trace: Trace
    graphs: list[int]
    breaks: list[str]


def compile_layers(model: Any) -> None:
    """Compile each layer by itself."""
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def train(training: Training, order: str, *, is_sharded: bool = True) -> Compiled:
    """Train with layers that are compiled at some time, or never."""
    graphs: list[int] = []

    def count(model: Any, step: int, rank: int) -> Mapping[str, torch.Tensor]:
        del model, step, rank
        graphs.append(counters["stats"]["unique_graphs"])
        return {}

    torch._dynamo.reset()
    counters.clear()
    training = replace(training, observe=count)
    model = build(training)
    if order == BEFORE:
        compile_layers(model)
    if is_sharded:
        shard(training, model)
    if order == AFTER:
        compile_layers(model)
    optimizer = training.optimizer(model.parameters())
    trace = run(training, model, optimizer, [dist.get_rank()], range(training.num_steps))
    return Compiled(trace, graphs, list(counters["graph_break"]))


def difference_with_compiled_layers(order: str) -> float:
    # Without a cache of keys and values, which only generation has a use for.
    training = training_of("Llama", prepare=lambda m: setattr(m.config, "use_cache", False))
    plain = train(training, NEVER)
    unsharded = train(training, BEFORE, is_sharded=False)
    compiled = train(training, order)
    assert not plain.trace.losses.keys() ^ compiled.trace.losses.keys()
    assert unsharded.graphs[0] > 0
    # What the library's code makes of it, and nothing more for being sharded; all in the first use.
    assert compiled.graphs == [unsharded.graphs[0]] * (2 * training.num_steps)
    assert compiled.breaks == unsharded.breaks
    found = [abs(compiled.trace.losses[key] - loss) for key, loss in plain.trace.losses.items()]
    pairs = zip(compiled.trace.grads, plain.trace.grads, strict=True)
    found += [change_of_parts(mine, theirs) for mine, theirs in pairs]
    found.append(change_of_parts(compiled.trace.params, plain.trace.params))
    return max(found)


@pytest.mark.parametrize("order", [BEFORE, AFTER])
def test_a_llama_whose_layers_are_compiled_trains_as_it_does_uncompiled(
    measure: Measure, order: str
) -> None:
    measure("transformers", COMPARED, 2, difference_with_compiled_layers, order, at_most=0.0)
