"""Training with accelerate and this package's `fully_shard` equals an unsharded loop."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path
from typing import Any

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
from tests.processes import ran
from tests.ranks import RankPools

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
    defaults = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
    plugin = FullyShardedDataParallelPlugin(
        **{**defaults, **options}, state_dict_type=f"{files.upper()}_STATE_DICT"
    )
    PartialState(cpu=True).distributed_type = DistributedType.FSDP
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=MICRO_BATCHES
    )
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def prepared(accelerator: Any, strategy: str, *, tied: bool = False) -> tuple[Any, ...]:
    """Prepare a model, optimizer, loader and schedule with this package, as a user does."""
    import megatron_fsdp_v2_for.accelerate as adapter

    model = llama(tied=tied)
    optimizer, schedule = optimizer_of(model)
    loader = DataLoader(texts(), batch_size=BATCH)  # type: ignore[arg-type]
    adapter.install(sharding_strategy=STRATEGIES.get(strategy, strategy))
    try:
        found: tuple[Any, ...] = accelerator.prepare(model, optimizer, loader, schedule)
    finally:
        adapter.uninstall()
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
    # Two layers, and the units that accelerate adds: embeddings, and the norm with the head. The
    # policy by size adds the MLP of each layer.
    units = [unit for _, unit in named_units(model) if unit.groups]
    assert len(units) == (6 if "min_num_params" in options else 3 if tied else 4)
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
_BY_SIZE = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1000}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "tied embeddings": {"tied": True},
    "activation_checkpointing": {"activation_checkpointing": True},
    "weights kept after the forward": {"reshard_after_forward": False},
    "cpu_ram_efficient_loading": _EFFICIENT,
    "cpu_ram_efficient_loading of tied embeddings": {"tied": True, **_EFFICIENT},
    "units by size": _BY_SIZE,
    "units by size, activation_checkpointing": {**_BY_SIZE, "activation_checkpointing": True},
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


CONFIGURATION = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""


def difference_of_launched(results: str) -> float:
    """Return the difference between what the script saved and the unsharded training."""
    return difference_of(torch.load(results), plain())


@pytest.mark.parametrize("strategy", ["ZeRO-2", "ZeRO-3"])
def test_launched_script_with_one_call_trains_like_unsharded(
    measure: Measure, tmp_path: Path, strategy: str
) -> None:
    configuration, results = tmp_path / "configuration.yaml", tmp_path / "results.pt"
    configuration.write_text(CONFIGURATION)
    launch = ("-m", "accelerate.commands.launch", "--config_file", configuration)
    script = ("-m", "tests.clients.accelerated", STRATEGIES[strategy], results)
    # torchrun selects the port.
    done = ran(sys.executable, *launch, "--main_process_port", "0", *script, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    measure("accelerate", COMPARED, 2, difference_of_launched, str(results))


def errors_of_configurations() -> dict[str, str]:
    """Return the errors of requests that accelerate, or this package, cannot shard."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    import megatron_fsdp_v2_for.accelerate as adapter

    found = {}
    with pytest.raises(ValueError, match="accelerate sets mesh of fully_shard") as caught:
        adapter.install(mesh=None)
    found["given twice"] = str(caught.value)
    with pytest.raises(ValueError, match="sharding_strategy") as caught:
        prepared(accelerator_with(), "a typo")
    found["strategy"] = str(caught.value)
    adapter.install()
    try:
        model = llama()
        accelerator = accelerator_with()
        accelerator.state.fsdp_plugin.fsdp_version = 1
        with pytest.raises(RuntimeError) as raised:
            accelerator.prepare(model, optimizer_of(model)[0])
        found["version"] = str(raised.value)
        forget_accelerators()
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)
        )
        with pytest.raises(RuntimeError) as raised:
            accelerator.prepare(model, optimizer_of(model)[0])
        found["device"] = str(raised.value)
    finally:
        adapter.uninstall()
        forget_accelerators()
    Accelerator(cpu=True).prepare(model)
    return found


def test_configuration_that_does_not_shard_is_rejected_by_name(clients: RankPools) -> None:
    for found in clients(2).run(errors_of_configurations):
        assert "do not pass it to install()" in found["given twice"]
        assert "'a typo'" in found["strategy"]
        assert "fsdp_version is 1; set fsdp_version: 2" in found["version"]
        assert (
            "MULTI_CPU on the device type cpu; accelerate shards on accelerators only"
            in (found["device"])
        )
