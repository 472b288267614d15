"""Training of peft's LoRA adapters and frozen weights in one unit equals unsharded training."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.runtime.module import unit_of
from tests.clients.conftest import Measure, Record
from tests.clients.differences import (
    STRATEGIES,
    Results,
    difference_of,
    full_copy,
    full_parameters,
    train_plain,
)
from tests.clients.test_accelerate import COMPARED, llama
from tests.distributed.wrapping import wrap
from tests.ranks import RankPools

BATCH = 2
STEPS = 4
MICRO_BATCHES = 2


def with_adapters() -> Any:
    """Return a Llama with frozen weights and LoRA adapters, identical in every process."""
    import peft

    config = peft.LoraConfig(
        r=3,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        # The head is trained in full, in addition to the adapters.
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    model = llama()
    torch.manual_seed(5)
    return peft.get_peft_model(model, config)


def shard(model: Any, strategy: str) -> Any:
    """Make every layer a unit, and then the model."""
    layers = model.base_model.model.model.layers
    return wrap(model, layers, sharding_strategy=STRATEGIES[strategy])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the trainable parameters."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=0.02, eps=1e-3)


def tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    """Return a batch of one rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, 61, (BATCH, 7), generator=generator)


def train(model: Any, optimizer: Any, ranks: list[int], steps: range) -> Results:
    """Train some steps on the data of some ranks; return losses averaged over all ranks."""

    def loss_of(step: int, micro: int) -> torch.Tensor:
        batches = [tokens(step, micro, rank) for rank in ranks]
        loss = torch.stack([model(input_ids=t, labels=t).loss for t in batches]).mean()
        if len(ranks) < dist.get_world_size():
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            # The value is the mean; the gradient is that of this rank's loss.
            loss = loss + (mean / dist.get_world_size() - loss.detach())
        return loss

    micro_batches = range(MICRO_BATCHES)
    losses = [
        [functools.partial(loss_of, step, micro) for micro in micro_batches] for step in steps
    ]
    return train_plain(model, losses, optimizer, max_norm=0.5)


def trained_unsharded() -> Results:
    """Run an unsharded training on this rank alone; return its results."""
    model = with_adapters()
    return train(model, optimizer_of(model), list(range(dist.get_world_size())), range(STEPS))


def sharded() -> Any:
    """Return the model, sharded at ZeRO-3, and its optimizer."""
    model = shard(with_adapters(), "ZeRO-3")
    return model, optimizer_of(model)


def difference(strategy: str) -> float:
    """Return the difference to unsharded training; assert that frozen weights do not change."""
    before = full_parameters(with_adapters())
    model = shard(with_adapters(), strategy)
    layer = model.base_model.model.model.layers[0]
    kinds = {group.spec.requires_grad for group in unit_of(layer).groups}
    assert kinds == {True, False}
    mine = train(model, optimizer_of(model), [dist.get_rank()], range(STEPS))
    for name, param in model.named_parameters():
        same = torch.equal(full_copy(param), before[name])
        assert same is not param.requires_grad, name
    return difference_of(mine, trained_unsharded())


@pytest.mark.parametrize(
    ("strategy", "ranks"), [(name, 2) for name in STRATEGIES] + [("ZeRO-3", 1), ("ZeRO-3", 4)]
)
def test_adapters_with_frozen_weights_train_like_unsharded(
    measure: Measure, strategy: str, ranks: int
) -> None:
    measure("peft", COMPARED, ranks, difference, strategy)


def difference_after_resuming(folder: str) -> float:
    """Return the difference to unsharded training after saving, rebuilding and loading."""
    model, optimizer = sharded()
    ranks = [dist.get_rank()]
    first = train(model, optimizer, ranks, range(STEPS // 2))
    checkpoint.save(folder, model, optimizer)
    model, optimizer = sharded()
    checkpoint.load(folder, model, optimizer)
    rest = train(model, optimizer, ranks, range(STEPS // 2, STEPS))
    curves = {name: torch.cat([first[name], rest[name]]) for name in ("losses", "norms")}
    return difference_of({**rest, **curves}, trained_unsharded())


def test_training_of_adapters_resumes_from_a_checkpoint(measure: Measure, tmp_path: Path) -> None:
    measure("peft", COMPARED, 2, difference_after_resuming, str(tmp_path / "checkpoint"))


def difference_of_saved_adapters(folder: str) -> tuple[float, float]:
    """Save adapters with peft, load them, and merge them into the model.

    Returns:
        The difference between loaded and trained parameters, and between the outputs of the merged
        and the sharded model.
    """
    import peft

    model, optimizer = sharded()
    train(model, optimizer, [dist.get_rank()], range(STEPS))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    loaded = peft.PeftModel.from_pretrained(llama(), folder)
    mine, theirs = full_parameters(model), full_parameters(loaded)
    saved = peft.get_peft_model_state_dict(loaded)
    assert len(saved) == 2 * 3 * 2 + 1, saved.keys()
    apart = difference_of({"parameters": theirs}, {"parameters": mine})
    merged = loaded.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    batch = tokens(9, 0, 0)
    with torch.no_grad():
        ours = model.eval()(input_ids=batch).logits
        logits = merged.eval()(input_ids=batch).logits
    return apart, difference_of({"logits": ours}, {"logits": logits})


def test_saved_adapters_equal_the_trained_ones_and_can_be_merged(
    clients: RankPools, record: Record, tmp_path: Path
) -> None:
    found = clients(2).run(difference_of_saved_adapters, str(tmp_path))
    assert [apart for apart, _ in found] == [0.0, 0.0]
    record("peft", "outputs of the merged model", max(outputs for _, outputs in found))
