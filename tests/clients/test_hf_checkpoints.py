"""Checkpoints of transformers' models: resumed, exported, and made of what the library saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint.exporting import convert
from tests.clients.conftest import Measure, Record
from tests.clients.harness import (
    build,
    change_of_parts,
    difference_of_parts,
    parameters_held,
    run,
    shard,
    train_plain,
)
from tests.clients.hf_models import MODELS
from tests.clients.test_hf_training import training_of
from tests.distributed.checkpoint_trainings import WAYS, torch_loads, torch_saves
from tests.ranks import RankPools

SAVED_AFTER = 2
CHECKPOINTED = ("Llama", "Gemma3", "Mixtral", "T5", "Mamba2")


def adamw(params: Any) -> torch.optim.Optimizer:
    # A large eps: where a gradient is almost zero, Adam's quotient makes steps of its rounding.
    return torch.optim.AdamW(params, lr=0.003, eps=1e-3)


SAVE, LOAD = WAYS["ours"]
MIXED = {"ours to torch": (SAVE, torch_loads), "torch to ours": (torch_saves, LOAD)}


def difference_when_resumed(name: str, way: str, folder: Path) -> tuple[float, float]:
    """How far a resumed training is from one that went on, and that from an unsharded one."""
    training = training_of(name, num_steps=4, optimizer=adamw)
    save, load = (WAYS | MIXED)[way]
    ranks, later = [dist.get_rank()], range(SAVED_AFTER, training.num_steps)
    model = shard(training, build(training))
    optimizer = training.optimizer(model.parameters())
    run(training, model, optimizer, ranks, range(SAVED_AFTER))
    save(folder / "saved", model, optimizer)
    went_on = run(training, model, optimizer, ranks, later)
    # With values that the checkpoint has to replace.
    torch.manual_seed(99)
    resumed = shard(training, training.build())
    optimizer = training.optimizer(resumed.parameters())
    load(folder / "saved", resumed, optimizer)
    again = run(training, resumed, optimizer, ranks, later)
    assert again.losses == went_on.losses
    from_plain = difference_of_parts(again.params, train_plain(training).params)
    return change_of_parts(again.params, went_on.params), from_plain


@pytest.mark.parametrize("way", [*WAYS, *MIXED])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_resumed_training_goes_on_bit_by_bit(
    clients: RankPools, record: Record, tmp_path: Path, name: str, way: str
) -> None:
    found = clients(2).run(difference_when_resumed, name, way, tmp_path)
    assert max(from_plain for _, from_plain in found) < 1e-6
    record("transformers", "resumed training", max(same for same, _ in found), at_most=0.0)


def difference_when_loaded_from_pretrained(name: str, folder: Path) -> float:
    training = training_of(name)
    model: Any = shard(training, build(training))
    optimizer = training.optimizer(model.parameters())
    run(training, model, optimizer, [dist.get_rank()], range(1))
    checkpoint.save(folder / "saved", model, optimizer)
    whole = {name: param.detach().full_tensor() for name, param in model.state_dict().items()}
    if dist.get_rank() == 0:
        checkpoint.export(folder / "saved", folder / "exported" / "model.safetensors")
        model.config.save_pretrained(folder / "exported")
    dist.barrier()
    loaded = MODELS[name].cls.from_pretrained(folder / "exported")
    found = loaded.state_dict()
    assert found.keys() == whole.keys()
    return max(float((found[key] - whole[key]).abs().max()) for key in whole)


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_loaded_with_from_pretrained(
    measure: Measure, tmp_path: Path, name: str
) -> None:
    (tmp_path / "exported").mkdir()
    function, compared = difference_when_loaded_from_pretrained, "every tensor of the state dict"
    measure("transformers", compared, 2, function, name, tmp_path, at_most=0.0)


def difference_when_made_on_meta(name: str, source: str, folder: Path) -> float:
    """Of a training that starts from a model on the meta device, filled from a folder."""
    training = training_of(name)
    plain: Any = build(training)
    if dist.get_rank() == 0 and source != "state dict":
        plain.save_pretrained(folder / "pretrained")
        convert(folder / "pretrained", folder / "ours")
    dist.barrier()
    with torch.device("meta"):
        model = training.build()
    # The library gives values, also to buffers it never saves.
    initialized = replace(training, options={"param_init_fn": model._init_weights})
    model = shard(initialized, model)
    if source == "state dict":
        model.load_state_dict(plain.state_dict())
    else:
        checkpoint.load(folder / "ours", model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    buffers = dict(plain.named_buffers())
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[key]), key
    held = parameters_held(model)
    for key, param in plain.named_parameters():
        part = held[key]
        assert part.tensor is not None
        assert torch.equal(part.tensor, param[part.start : part.end]), key
    optimizer = training.optimizer(model.parameters())
    trace = run(training, model, optimizer, [dist.get_rank()], range(training.num_steps))
    return difference_of_parts(trace.params, train_plain(training).params)


_SOURCES = [(name, "state dict") for name in MODELS]
# The library saves experts one by one, under other names than its own modules have.
_SOURCES += [(name, "safetensors folder") for name in CHECKPOINTED if name != "Mixtral"]


@pytest.mark.parametrize(("name", "source"), _SOURCES)
def test_a_model_made_on_the_meta_device_is_filled_and_trains_as_unsharded(
    measure: Measure, tmp_path: Path, name: str, source: str
) -> None:
    compared = "parameters after 3 steps"
    measure("transformers", compared, 2, difference_when_made_on_meta, name, source, tmp_path)
