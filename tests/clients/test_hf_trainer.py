"""Trainer with a model of `distributed_config`: adapters, and checkpoints with the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from tests.clients.conftest import Measure, forget_accelerators
from tests.clients.differences import STRATEGIES
from tests.clients.hf_models import MODELS
from tests.clients.test_hf_distributed import saved_plain
from tests.clients.test_hf_training import InOrder, data_of, trainer_arguments
from tests.distributed.wrapping import whole
from tests.ranks import RankPools

STEPS = 4
HALF = STEPS // 2


@contextmanager
def installed(strategy: str) -> Iterator[None]:
    """Shard with this package inside the context."""
    import megatron_fsdp_v2_for.transformers as adapter

    adapter.install(sharding_strategy=STRATEGIES[strategy])
    try:
        yield
    finally:
        adapter.uninstall()


def with_adapters(model: Any) -> Any:
    """Add LoRA adapters, of which each rank draws other values."""
    import peft

    torch.manual_seed(5 + dist.get_rank())
    modules = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=modules, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def loaded(folder: Path, *, has_adapters: bool) -> Any:
    """Load a sharded model of the folder of `saved_plain`, and add adapters."""
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    model = MODELS["Llama"].cls.from_pretrained(folder / "plain", distributed_config=config)
    return with_adapters(model) if has_adapters else model


def trainer_of(model: Any, folder: Path, **options: Any) -> Any:
    """Return a trainer that saves a checkpoint after half of the steps."""
    defaults = {
        **trainer_arguments(folder),
        "optim": "adamw_torch",
        "adam_epsilon": 1e-3,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": HALF,
    }
    arguments = transformers.TrainingArguments(**{**defaults, **options})
    forget_accelerators()
    return InOrder(model=model, args=arguments, train_dataset=2 * data_of("Llama"))


def trained(model: Any, folder: Path, resumed: Path | None = None) -> dict[str, torch.Tensor]:
    """Train; return the losses of all steps and the final parameters."""
    trainer = trainer_of(model, folder)
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == STEPS
    dist.barrier()
    state = {key: whole(value.detach()).clone() for key, value in model.state_dict().items()}
    return {"losses": torch.tensor(losses), **state}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[key] - value).abs().max()) for key, value in other.items())


def difference_of_a_resumed_run(
    strategy: str, folder: Path, *, has_adapters: bool
) -> tuple[float, float]:
    """Train without and with an interruption.

    Returns:
        The difference to a plain model, and of the resumed to the uninterrupted run.
    """
    plain = saved_plain("Llama", folder / "plain")
    expected = trained(with_adapters(plain) if has_adapters else plain, folder / "of plain")
    with installed(strategy):
        model = loaded(folder, has_adapters=has_adapters)
        before = {key: whole(value.detach()).clone() for key, value in model.state_dict().items()}
        found = trained(model, folder / "whole")
        again = loaded(folder, has_adapters=has_adapters)
        resumed = trained(again, folder / "half", folder / f"whole/checkpoint-{HALF}")
    for key, value in before.items():
        is_trained = "lora" in key or not has_adapters
        assert is_trained is not torch.equal(value, found[key]), key
    return distance(found, expected), distance(resumed, found)


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumed_run_equals_the_uninterrupted_and_the_plain_one(
    measure: Measure, tmp_path: Path, strategy: str, has_adapters: bool
) -> None:
    options = {"has_adapters": has_adapters}
    compared = "losses and parameters of 4 steps, resumed after 2"
    measure("transformers", compared, 2, largest, strategy, tmp_path, **options)


def largest(strategy: str, folder: Path, *, has_adapters: bool) -> float:
    to_plain, of_resumed = difference_of_a_resumed_run(strategy, folder, has_adapters=has_adapters)
    assert of_resumed == 0.0
    return to_plain


def errors(folder: Path) -> list[str]:
    """Return the errors of a folder without an optimizer, and of adapters without Trainer."""
    saved_plain("Llama", folder / "plain")
    found = []
    with installed("ZeRO-3"):
        trainer_of(loaded(folder, has_adapters=False), folder, save_only_model=True).train()
        dist.barrier()
        trainer = trainer_of(loaded(folder, has_adapters=False), folder)
        with pytest.raises(FileNotFoundError) as caught:
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
        found.append(str(caught.value))
        model = loaded(folder, has_adapters=True)
        with pytest.raises(RuntimeError) as late:
            model(**MODELS["Llama"].batch(0))
        found.append(str(late.value))
    return found


def test_checkpoint_without_the_optimizer_and_adapters_without_trainer_are_errors(
    clients: RankPools, tmp_path: Path
) -> None:
    for without_optimizer, without_trainer in clients(2).run(errors, tmp_path):
        assert "has no folder 'optimizer' with the optimizer state" in without_optimizer
        assert "lora_A.default.weight was registered after fully_shard" in without_trainer
