"""Checkpoints of transformers' models: resuming, export, and conversion of pretrained folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint.exporting import convert
from tests.clients.conftest import Measure, Record
from tests.clients.hf_models import MODELS
from tests.clients.test_hf_training import sharded, training_of
from tests.distributed.checkpoint_trainings import WAYS, torch_load, torch_save
from tests.distributed.wrapping import weight_error
from tests.parity.patterns import Pattern
from tests.ranks import RankPools
from tests.reference.training import (
    Trace,
    built,
    error_of_params,
    run,
    same_bits,
    sharded_access,
    train_reference,
)

SAVED_AFTER = 2
CHECKPOINTED = ("Llama", "Gemma3", "Mixtral", "T5", "Mamba2")


def adamw(params: Any) -> torch.optim.Optimizer:
    # A large eps: for a gradient near zero, Adam's quotient would amplify rounding.
    return torch.optim.AdamW(params, lr=0.003, eps=1e-3)


SAVE, LOAD = WAYS["ours"]
MIXED = {"ours to torch": (SAVE, torch_load), "torch to ours": (torch_save, LOAD)}


def train(training: Pattern, model: Any, optimizer: Any, first: int, end: int) -> Trace:
    """Run the steps from `first` to `end` of a training of a sharded model."""
    part = replace(training, steps=range(first, end))
    return run(part, model, sharded_access(part), dist.get_rank(), optimizer)


def error_from_plain(training: Pattern, trace: Trace) -> float:
    """Return the error of the final parameters, relative to an unsharded training."""
    plain = train_reference(training, dist.get_world_size(), dist.get_rank())
    return error_of_params(trace, plain)


def resumed(name: str, way: str, folder: Path) -> tuple[bool, float]:
    """Return whether resuming changes no bit, and the error relative to unsharded training."""
    training = training_of(name, steps=range(4), optimizer=adamw)
    save, load = (WAYS | MIXED)[way]
    model = sharded(training, built(training))
    optimizer = training.optimizer(model.parameters())
    train(training, model, optimizer, 0, SAVED_AFTER)
    save(folder / "saved", model, optimizer)
    uninterrupted = train(training, model, optimizer, SAVED_AFTER, 4)
    # Other weights, which the checkpoint must replace.
    torch.manual_seed(99)
    model = sharded(training, training.build())
    optimizer = training.optimizer(model.parameters())
    load(folder / "saved", model, optimizer)
    again = train(training, model, optimizer, SAVED_AFTER, 4)
    return same_bits(again, uninterrupted), error_from_plain(training, again)


@pytest.mark.parametrize("way", [*WAYS, *MIXED])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_resumed_training_is_bitwise_identical(
    clients: RankPools, record: Record, tmp_path: Path, name: str, way: str
) -> None:
    for is_same, from_plain in clients(2).run(resumed, name, way, tmp_path):
        assert is_same
        assert from_plain < 1e-6
    record("transformers", "resumed training", 0.0)


def difference_when_loaded_from_pretrained(name: str, folder: Path) -> float:
    training = training_of(name)
    model = sharded(training, built(training))
    optimizer = training.optimizer(model.parameters())
    train(training, model, optimizer, 0, 1)
    checkpoint.save(folder / "saved", model, optimizer)
    whole = {name: param.detach().full_tensor() for name, param in model.state_dict().items()}
    if dist.get_rank() == 0:
        file = folder / "exported" / "model.safetensors"
        # Tied embeddings are exported to several files.
        limit = 8_000 if "tied" in name else 1 << 30
        num_files = len(checkpoint.export(folder / "saved", file, max_shard_bytes=limit).files)
        assert (num_files > 1) == ("tied" in name)
        model.config.save_pretrained(folder / "exported")
    dist.barrier()
    loaded = MODELS[name].cls.from_pretrained(folder / "exported")
    found = loaded.state_dict()
    assert found.keys() == whole.keys()
    return max(float((found[key] - whole[key]).abs().max()) for key in whole)


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_an_export(measure: Measure, tmp_path: Path, name: str) -> None:
    (tmp_path / "exported").mkdir()
    function, compared = difference_when_loaded_from_pretrained, "every tensor of the state dict"
    measure("transformers", compared, 2, function, name, tmp_path, at_most=0.0)


def difference_when_saved_gathered(name: str, folder: Path) -> float:
    """Save with the state dict that the error of `save_pretrained` names, and load it."""
    training = training_of(name)
    model = sharded(training, built(training))
    remedy = r"get_model_state_dict\(model, options=StateDictOptions\(full_state_dict=True\)\)"
    for ranks in (range(1), range(2)):  # one rank alone, then every rank
        if dist.get_rank() in ranks:
            with pytest.raises(RuntimeError, match=remedy):
                model.save_pretrained(folder / "rejected")
        dist.barrier()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.save_pretrained(folder / "gathered", state_dict=dict(whole))
    dist.barrier()
    found = MODELS[name].cls.from_pretrained(folder / "gathered").state_dict()
    assert found.keys() == whole.keys()
    return max(float((found[key] - whole[key]).abs().max()) for key in whole)


@pytest.mark.parametrize("name", MODELS)
def test_save_pretrained_names_the_state_dict_that_it_writes(
    measure: Measure, tmp_path: Path, name: str
) -> None:
    function, compared = difference_when_saved_gathered, "every tensor of the state dict"
    measure("transformers", compared, 2, function, name, tmp_path, at_most=0.0)


def difference_from_meta_device(name: str, source: str, folder: Path) -> float:
    """Return the error of a training that starts from a model built on the meta device.

    Args:
        name: Name of the model.
        source: `state dict`, or `safetensors folder`, which is converted to a checkpoint.
        folder: An empty folder.
    """
    training = training_of(name)
    plain = built(training)
    if dist.get_rank() == 0 and source != "state dict":
        plain.save_pretrained(folder / "pretrained")
        convert(folder / "pretrained", folder / "ours")
    dist.barrier()
    with torch.device("meta"):
        model = training.build()
    # The library also initializes the buffers that it does not save.
    initialized = replace(training, options={"param_init_fn": model._init_weights})
    model = sharded(initialized, model)
    if source == "state dict":
        model.load_state_dict(plain.state_dict())
    else:
        checkpoint.load(folder / "ours", model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    buffers = dict(plain.named_buffers())
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[key]), key
    assert weight_error(model, plain) == 0.0
    trace = run(training, model, sharded_access(training), dist.get_rank())
    return error_from_plain(training, trace)


_SOURCES = [(name, "state dict") for name in MODELS]
# The library saves each expert separately, under names that differ from those of its modules.
_SOURCES += [(name, "safetensors folder") for name in CHECKPOINTED if name != "Mixtral"]


@pytest.mark.parametrize(("name", "source"), _SOURCES)
def test_model_built_on_meta_device_trains_like_unsharded(
    measure: Measure, tmp_path: Path, name: str, source: str
) -> None:
    compared = "parameters after 3 steps"
    measure("transformers", compared, 2, difference_from_meta_device, name, source, tmp_path)
