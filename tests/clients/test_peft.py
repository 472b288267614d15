"""peft's LoRA: frozen weights and adapters in one unit, and the same training unsharded."""

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
    Shown,
    difference_of,
    trained_plainly,
    whole,
    whole_parameters,
)
from tests.clients.test_accelerate import COMPARED, llama
from tests.distributed.wrapping import wrap
from tests.ranks import RankPools

BATCH = 2
STEPS = 4
MICRO_BATCHES = 2


def with_adapters() -> Any:
    """A Llama with frozen weights and LoRA adapters, the same ones in every process."""
    import peft

    config = peft.LoraConfig(
        r=3,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        # Trained as a whole, beside adapters.
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    model = llama()
    torch.manual_seed(5)
    return peft.get_peft_model(model, config)


def shard(model: Any, strategy: str) -> Any:
    """Make every layer a unit, and the rest of the model."""
    layers = model.base_model.model.model.layers
    return wrap(model, layers, sharding_strategy=STRATEGIES[strategy])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of what is trained."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=0.02, eps=1e-3)


def tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    """A batch of one rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, 61, (BATCH, 7), generator=generator)


def train(model: Any, optimizer: Any, ranks: list[int], steps: range) -> Shown:
    """What some steps show, with losses that are means over all ranks, of data of some ranks."""

    def loss_of(step: int, micro: int) -> torch.Tensor:
        batches = [tokens(step, micro, rank) for rank in ranks]
        loss = torch.stack([model(input_ids=t, labels=t).loss for t in batches]).mean()
        if len(ranks) < dist.get_world_size():
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            # With the gradient of this rank's.
            loss = loss + (mean / dist.get_world_size() - loss.detach())
        return loss

    micro_batches = range(MICRO_BATCHES)
    losses = [
        [functools.partial(loss_of, step, micro) for micro in micro_batches] for step in steps
    ]
    return trained_plainly(model, losses, optimizer, max_norm=0.5)


def trained_unsharded() -> Shown:
    """What a training on this rank alone shows."""
    model = with_adapters()
    return train(model, optimizer_of(model), list(range(dist.get_world_size())), range(STEPS))


def sharded() -> Any:
    """The model sharded at ZeRO-3, and its optimizer."""
    model = shard(with_adapters(), "ZeRO-3")
    return model, optimizer_of(model)


def difference(strategy: str) -> float:
    """Between a training sharded and unsharded; frozen weights have to keep their bits."""
    before = whole_parameters(with_adapters())
    model = shard(with_adapters(), strategy)
    layer = model.base_model.model.model.layers[0]
    kinds = {group.spec.requires_grad for group in unit_of(layer).groups}
    assert kinds == {True, False}
    mine = train(model, optimizer_of(model), [dist.get_rank()], range(STEPS))
    for name, param in model.named_parameters():
        same = torch.equal(whole(param), before[name])
        assert same is not param.requires_grad, name
    return difference_of(mine, trained_unsharded())


@pytest.mark.parametrize(
    ("strategy", "ranks"), [(name, 2) for name in STRATEGIES] + [("ZeRO-3", 1), ("ZeRO-3", 4)]
)
def test_adapters_beside_frozen_weights_train_as_they_do_unsharded(
    measure: Measure, strategy: str, ranks: int
) -> None:
    measure("peft", COMPARED, ranks, difference, strategy)


def difference_after_resuming(folder: str) -> float:
    """The same where all is rebuilt in the middle and loaded from a checkpoint."""
    model, optimizer = sharded()
    ranks = [dist.get_rank()]
    first = train(model, optimizer, ranks, range(STEPS // 2))
    checkpoint.save(folder, model, optimizer)
    model, optimizer = sharded()
    checkpoint.load(folder, model, optimizer)
    rest = train(model, optimizer, ranks, range(STEPS // 2, STEPS))
    curves = {name: torch.cat([first[name], rest[name]]) for name in ("losses", "norms")}
    return difference_of({**rest, **curves}, trained_unsharded())


def test_training_of_adapters_goes_on_from_a_checkpoint(measure: Measure, tmp_path: Path) -> None:
    measure("peft", COMPARED, 2, difference_after_resuming, str(tmp_path / "checkpoint"))


def difference_of_saved_adapters(folder: str) -> tuple[float, float]:
    """Of adapters that peft saves and loads, and of a model they are merged into.

    From the trained ones; and of its outputs from those of the sharded model.
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
    mine, theirs = whole_parameters(model), whole_parameters(loaded)
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


def test_saved_adapters_are_what_was_trained_and_can_be_merged(
    clients: RankPools, record: Record, tmp_path: Path
) -> None:
    found = clients(2).run(difference_of_saved_adapters, str(tmp_path))
    assert [apart for apart, _ in found] == [0.0, 0.0]
    record("peft", "outputs of the merged model", max(outputs for _, outputs in found))
