"""A trainer of trl with a model that transformers shards by this package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Measure, forget_accelerators
from tests.clients.hf_models import MODELS, VOCABULARY
from tests.clients.test_hf_distributed import loaded, saved_plain
from tests.distributed.wrapping import whole
from tests.ranks import RankPools, rank_pools


@pytest.fixture
def clients() -> Iterator[RankPools]:
    """Yield rank pools by world size, forked from a process that has imported the library."""
    with rank_pools(["tests.clients.preloaded"]) as pools:
        yield pools


def tokenizer() -> Any:
    """Return a tokenizer whose tokens are numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="1", pad_token="0")


def losses(model: Any, folder: Path) -> list[float]:
    """Train three steps of two micro-batches, with recomputation, which is trl's default."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        optim="sgd",
        max_grad_norm=0.5,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = [MODELS["Llama"].batch(seed)["input_ids"][0].tolist() for seed in range(24)]
    forget_accelerators()
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        processing_class=tokenizer(),
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def difference(folder: Path) -> float:
    plain = saved_plain("Llama", folder / "plain")
    model = loaded(MODELS["Llama"].cls, folder / "plain")
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    expected, found = losses(plain, folder), losses(model, folder)
    assert len(expected) == 3
    final = {key: whole(value.detach()) for key, value in model.state_dict().items()}
    assert any((before[k] - value).abs().max() > 1e-3 for k, value in final.items())
    errors = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    errors += [float((final[k] - value).abs().max()) for k, value in plain.state_dict().items()]
    return max(errors)


def test_sft_trainer_trains_a_model_of_distributed_config_like_a_plain_one(
    measure: Measure, tmp_path: Path
) -> None:
    compared = "losses and parameters after 3 steps, clipped, accumulated"
    measure("trl", compared, 2, difference, tmp_path)
