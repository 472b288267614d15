"""A trainer of trl with a model that transformers shards by this package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Measure, forget_accelerators
from tests.clients.hf_models import MODELS, VOCABULARY
from tests.clients.test_hf_distributed import difference_with_trainer
from tests.clients.test_hf_training import logged_losses, trainer_arguments
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

    arguments = SFTConfig(**trainer_arguments(folder), bf16=False)
    rows = [MODELS["Llama"].batch(seed)["input_ids"][0].tolist() for seed in range(24)]
    forget_accelerators()
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        processing_class=tokenizer(),
    )
    return logged_losses(trainer)


def test_sft_trainer_trains_a_model_of_distributed_config_like_a_plain_one(
    measure: Measure, tmp_path: Path
) -> None:
    compared = "losses and parameters after 3 steps, clipped, accumulated"
    measure("trl", compared, 2, difference_with_trainer, tmp_path, losses)
