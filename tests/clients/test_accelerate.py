"""Training with accelerate and this package's `fully_shard` equals an unsharded loop."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.runtime.module import named_units
from tests.clients.conftest import Measure, forget_accelerators
from tests.clients.differences import (
    STRATEGIES,
    Results,
    difference_of,
    full_copy,
    full_parameters,
    results_of,
    train_plain,
)
from tests.ranks import RankPools
from tests.sharding import arguments

COMPARED = "losses, norms, parameters of 4 steps of 2 micro-batches"
BATCH = 2
STEPS = 4
MICRO_BATCHES = 2
MAX_NORM = 0.5
GAMMA = 0.95
_WRAPPED = "._checkpoint_wrapped_module"


def llama(*, tied: bool = False) -> Any:
    """Return a model with the same weights in every process."""
    import transformers

    torch.manual_seed(1)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def texts() -> torch.Tensor:
    """Return the data of all ranks for half of the steps."""
    torch.manual_seed(2)
    number = STEPS // 2 * MICRO_BATCHES * BATCH * dist.get_world_size()
    return torch.randint(0, 61, (number, 7))


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Return an optimizer of a model, and its learning rate schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=GAMMA)


def accelerator_with(files: str = "sharded", **options: Any) -> Any:
    """Return an accelerator with FSDP2 on a CPU.

    accelerate enables FSDP on accelerators only, so this function sets it in the state.
    """
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState

    forget_accelerators()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type=f"{files.upper()}_STATE_DICT",
        **options,
    )
    PartialState(cpu=True).distributed_type = DistributedType.FSDP
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=MICRO_BATCHES
    )
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    return accelerator


def prepared(accelerator: Any, strategy: str, *, tied: bool = False) -> tuple[Any, ...]:
    """Prepare a model, optimizer, loader and schedule with `fully_shard` of this package."""
    model = llama(tied=tied)
    optimizer, schedule = optimizer_of(model)
    loader = DataLoader(texts(), batch_size=BATCH)  # type: ignore[arg-type]
    options: dict[str, Any] = {"sharding_strategy": STRATEGIES[strategy]}
    if accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
        options["param_init_fn"] = lambda m: m.to_empty(device=accelerator.device, recurse=False)
    ours = functools.partial(fully_shard, **arguments(**options))
    with mock.patch("torch.distributed.fsdp.fully_shard", ours):
        found: tuple[Any, ...] = accelerator.prepare(model, optimizer, loader, schedule)
    return found


def epoch(accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any) -> Any:
    """Train one epoch; return the mean losses over all ranks, and the gradient norms."""
    losses, norms = [], []
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(full_copy(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    return losses, norms


def accelerated(
    strategy: str, folder: Path | None = None, *, tied: bool = False, **options: Any
) -> Results:
    """Train two epochs; with a folder, save after the first one, rebuild all objects and load."""
    accelerator = accelerator_with(**options)
    parts = prepared(accelerator, strategy, tied=tied)
    losses, norms = epoch(accelerator, *parts)
    if folder is not None:
        accelerator.save_state(folder)
        accelerator = accelerator_with(**options)
        parts = prepared(accelerator, strategy, tied=tied)
        accelerator.load_state(folder)
    more_losses, more_norms = epoch(accelerator, *parts)
    model = parts[0]
    # Two layers, and the units that accelerate adds: embeddings, and the norm with the head.
    units = [unit for _, unit in named_units(model) if unit.groups]
    assert len(units) == (3 if tied else 4)
    assert {unit.groups[0].spec.mesh.size() for unit in units} == {dist.get_world_size()}
    parameters = full_parameters(model)
    saved = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, param in model.named_parameters():
            assert torch.equal(saved[name.replace(_WRAPPED, "")], parameters[name]), param
    unwrapped = {name.replace(_WRAPPED, ""): value for name, value in parameters.items()}
    return results_of(losses + more_losses, norms + more_norms, unwrapped)


def plain(*, tied: bool = False) -> Results:
    """Run the same training without accelerate and without sharding, on this rank alone."""
    model = llama(tied=tied)
    optimizer, schedule = optimizer_of(model)
    size = dist.get_world_size()

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(input_ids=t, labels=t).loss for t in tokens.split(BATCH)]).mean()

    batches = 2 * texts().split(BATCH * size)
    losses = [functools.partial(loss_of, tokens) for tokens in batches]
    steps = itertools.batched(losses, MICRO_BATCHES)

    def step_schedule() -> None:
        # A prepared schedule steps once per rank.
        for _ in range(size):
            schedule.step()

    return train_plain(model, steps, optimizer, MAX_NORM, step_schedule)


def difference(strategy: str, folder: str | None = None, **options: Any) -> float:
    """Return the difference between the sharded and the unsharded training."""
    tied = options.get("tied", False)
    path = None if folder is None else Path(folder)
    return difference_of(accelerated(strategy, path, **options), plain(tied=tied))


_EFFICIENT = {"cpu_ram_efficient_loading": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "tied embeddings": {"tied": True},
    "activation_checkpointing": {"activation_checkpointing": True},
    "weights kept after the forward": {"reshard_after_forward": False},
    "cpu_ram_efficient_loading": _EFFICIENT,
    "cpu_ram_efficient_loading of tied embeddings": {"tied": True, **_EFFICIENT},
    "continued from sharded files": {"files": "sharded"},
    "continued from full files": {"files": "full"},
}
_DEFAULT, *_OF_ZERO3 = list(OPTIONS)[:-2]


@pytest.mark.parametrize(
    ("strategy", "ranks", "option"),
    [
        *((strategy, 2, _DEFAULT) for strategy in STRATEGIES),
        *(("ZeRO-3", ranks, _DEFAULT) for ranks in (1, 4)),
        *(("ZeRO-3", 2, option) for option in _OF_ZERO3),
        *((s, 2, option) for s in list(STRATEGIES)[1:] for option in list(OPTIONS)[-2:]),
    ],
)
def test_prepared_model_trains_like_unsharded(
    measure: Measure, tmp_path: Path, strategy: str, ranks: int, option: str
) -> None:
    folder = str(tmp_path) if "files" in OPTIONS[option] else None
    measure("accelerate", COMPARED, ranks, difference, strategy, folder, **OPTIONS[option])


def saves_trained_weights(folder: str) -> bool:
    """Return whether the file that `save_model` writes holds the trained weights."""
    from safetensors.torch import load_file

    accelerator = accelerator_with()
    parts = prepared(accelerator, "ZeRO-3")
    epoch(accelerator, *parts)
    accelerator.save_model(parts[0], folder)
    parameters = full_parameters(parts[0])
    accelerator.wait_for_everyone()
    saved = load_file(Path(folder) / "model.safetensors")
    return all(torch.equal(saved[name], tensor) for name, tensor in parameters.items())


def test_save_model_writes_full_plain_tensors(clients: RankPools, tmp_path: Path) -> None:
    assert clients(2).run(saves_trained_weights, str(tmp_path)) == [True, True]


def error_for_sharded_parameters() -> str:
    """Return accelerate's error for an optimizer of parameters that are already sharded."""
    accelerator = accelerator_with()
    accelerator.state.fsdp_plugin.auto_wrap_policy = None
    model = fully_shard(llama())
    with pytest.raises(KeyError) as raised:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(raised.value)


def test_accelerate_rejects_optimizers_of_sharded_parameters(clients: RankPools) -> None:
    for message in clients(2).run(error_for_sharded_parameters):
        assert "couldn't be switched to its sharded version" in message
