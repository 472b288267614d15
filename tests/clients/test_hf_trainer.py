"""transformers' Trainer with a sharded model, against its own data parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import SequentialSampler

from tests.clients.conftest import Measure, forget_accelerators
from tests.clients.harness import build, difference_of_parts, parameters_held, shard
from tests.clients.hf_models import MODELS
from tests.clients.test_hf_training import options_of, training_of

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
