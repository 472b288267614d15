"""`offload()` and `reload()`: all memory of a model moves to host memory and back, bit by bit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import FSDPModule, checkpoint
from megatron_fsdp_v2.memory.host_memory import is_in_host_memory, storages_in_host_memory
from megatron_fsdp_v2.runtime.module import unit_of
from tests.cases import quick_only
from tests.distributed.checkpoint_trainings import block_muon, digests
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    STRATEGIES,
    batch,
    check_error_messages,
    mesh_of,
    on_mesh,
    own_loss,
    strategies_on,
    train_losses,
    wrap,
)
from tests.reference.models import Stack


def _live() -> dict[int, int]:
    """Bytes of the storages of this process that are not registered as host memory."""
    gc.collect()
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor and not is_in_host_memory(each) and each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def _made(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap(Stack(), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


POOL: dict[str, Any] = {"enable_trace_pool": True}


@pytest.mark.parametrize(
    "more", quick_only([POOL, {}, {"mp_policy": BF16}], POOL), ids=["pool", "plain", "bf16"]
)
@on_ranks("name", name=quick_only(["1", "3", "HFSDP 2x2"], "3"))
def test_training_goes_on_after_reload_as_if_it_had_not_been_offloaded(
    name: str, more: dict[str, Any]
) -> None:
    for strategy in strategies_on(name):
        options = {**on_mesh(name), "sharding_strategy": strategy, **more}
        model, optimizer = _made(**options)
        expected = train_losses(model, optimizer, range(4))
        digest = digests(model, optimizer)
        model, optimizer = _made(**options)
        losses = train_losses(model, optimizer, range(1))
        model.offload()
        model.reload()
        # Gradients move too, and no optimizer has to be given.
        losses += train_losses(model, optimizer, range(1, 2))
        for _ in range(2):
            assert model.offload(optimizer) > 0
        for _ in range(2):
            model.reload()
        with torch.no_grad():
            own_loss(model, 7)
        losses += train_losses(model, optimizer, range(2, 4))
        assert losses == expected, options
        assert digests(model, optimizer) == digest, options


@on_ranks(2, strategy=STRATEGIES)
def test_no_memory_stays_on_the_device(strategy: str) -> None:
    mesh_of(2)
    # Other tests of this process may free tensors meanwhile, so that only new ones count.
    before, host = _live(), len(storages_in_host_memory())

    def nbytes() -> int:
        return sum(size for storage, size in _live().items() if storage not in before)

    model, optimizer = _made(sharding_strategy=strategy, enable_trace_pool=True, mp_policy=BF16)
    train_losses(model, optimizer, range(6))
    trained = nbytes()
    moved = model.offload(optimizer)
    assert moved > 4_000
    assert trained > moved  # The block of the pool is freed.
    assert nbytes() == 0
    model.reload()
    assert nbytes() >= moved
    assert len(storages_in_host_memory()) == host


@on_ranks(2)
def test_uses_between_offload_and_reload_raise(tmp_path: Path) -> None:
    model, optimizer = _made()
    train_losses(model, optimizer, range(1))
    loss = own_loss(model, 1)
    model.offload(optimizer)
    param = next(model.parameters())
    assert param.grad is not None
    assert repr(param).startswith("OffloadedTensor(shape="), repr(param)
    exp_avg = optimizer.state[param]["exp_avg"]
    check_error_messages(
        RuntimeError,
        {
            "(Stack) was moved to host memory by offload(); call reload() on it first": (
                lambda: own_loss(model, 2)
            ),
            "call reload() on it first": model.unshard,
            "(Stack) was moved to host memory by offload()": optimizer.step,
            "(Stack) was moved to host memory by offload(); call": (
                lambda: checkpoint.save(tmp_path / "k", model, optimizer)
            ),
            "(Stack) was moved to host memory by offload(); call reload": (
                lambda: checkpoint.load(tmp_path / "k", model, optimizer)
            ),
            "(Stack) was moved to host memory by": loss.backward,
            "was moved to host memory by offload(); call reload() on its model first": (
                lambda: param.sum()
            ),
            "moved to host memory by offload(); call reload() on its model": param.to_local,
            "moved to host memory by offload(); call reload() on its": exp_avg.full_tensor,
            "moved to host memory by offload(); call reload() on": param.grad.norm,
            "moved to host memory by offload(); call reload()": model.state_dict,
            "moved to host memory by offload(); call": (
                lambda: torch.save(param, tmp_path / "param.pt")
            ),
            "moved to host memory by offload();": (
                lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            ),
        },
    )
    model.reload()
    expected, expecting = _made()
    train_losses(expected, expecting, range(1))
    assert train_losses(model, optimizer, range(2, 4)) == train_losses(
        expected, expecting, range(2, 4)
    )
    assert digests(model, optimizer) == digests(expected, expecting)


@on_ranks(2)
def test_offload_is_rejected_within_a_step() -> None:
    model, _ = _made(sharding_strategy="optim")
    errors: list[str] = []

    def offload(_: torch.Tensor) -> None:
        try:
            model.offload()
        except RuntimeError as error:
            errors.append(str(error))

    output = model(batch(0))
    output.register_hook(offload)
    output.sum().backward()
    assert errors == ["a backward is under way; do this between two steps"]
    with model.no_sync():
        own_loss(model).backward()
    check_error_messages(
        RuntimeError,
        {
            "gradients that are not synchronized yet; call offload between steps": model.offload,
            "is not the root; call offload on the root": model.blocks[0].offload,
        },
    )
    own_loss(model).backward()
    unit_of(model).state.root.has_graph = True
    check_error_messages(RuntimeError, {"was captured in a CUDA graph": model.offload})
    assert next(model.parameters()).sum() is not None


@on_ranks(2)
def test_failures_of_either_memory_change_nothing() -> None:
    model, optimizer = _made()
    expected, expecting = _made()
    wanted = train_losses(expected, expecting, range(2))
    assert train_losses(model, optimizer, range(1)) == wanted[:1]
    real, calls = torch.Tensor.copy_, []

    def fails(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 3:
            raise RuntimeError("no host memory")
        return real(tensor, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "copy_", fails), pytest.raises(RuntimeError):
        model.offload(optimizer)
    assert len(calls) == 3
    moved = model.offload(optimizer)
    resize = torch.UntypedStorage.resize_
    sizes: list[int] = []

    def exhausted(storage: torch.UntypedStorage, nbytes: int) -> None:
        if nbytes:
            sizes.append(nbytes)
            if len(sizes) == 3:
                raise torch.OutOfMemoryError("no device memory")
        resize(storage, nbytes)

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", exhausted),
        pytest.raises(torch.OutOfMemoryError),
    ):
        model.reload()
    assert model.offload(optimizer) == moved
    model.reload()
    assert train_losses(model, optimizer, range(1, 2)) == wanted[1:]


@on_ranks(2)
def test_states_of_muon_move_too() -> None:
    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = wrap(Stack())
        return model, block_muon(model, lr=0.05)

    model, muon = made()
    expected = train_losses(model, muon, range(3))
    again, optimizer = made()
    losses = train_losses(again, optimizer, range(2))
    again.offload(optimizer)
    again.reload()
    assert losses + train_losses(again, optimizer, range(2, 3)) == expected


@on_ranks(2, strategy=STRATEGIES)
def test_whole_parameters_are_yielded_unit_by_unit(strategy: str) -> None:
    torch.manual_seed(0)
    plain = Stack()
    expected = {name: param.detach().clone() for name, param in plain.named_parameters()}
    model = wrap(plain, sharding_strategy=strategy, mp_policy=BF16)
    gathered = []

    def look() -> None:
        gathered.append(sum(unit.is_unsharded for unit in unit_of(model).context.units()))

    found = {}
    for name, whole in model.named_full_parameters():
        look()
        found[name] = whole.clone()
    assert found.keys() == expected.keys()
    for name, whole in found.items():
        assert torch.equal(whole, expected[name].bfloat16()), name
    assert max(gathered) <= 2 < len(unit_of(model).context.units())
    assert not any(unit.is_unsharded for unit in unit_of(model).context.units())
    rest = model.blocks[1].named_full_parameters()
    assert next(rest)[0] in dict(model.blocks[1].named_parameters())
    rest.close()  # Weights are freed also if the rest is not read.
    assert not any(unit.is_unsharded for unit in unit_of(model).context.units())
    own_loss(model).backward()


@on_ranks(2, strategy=STRATEGIES)
def test_models_of_one_optimizer_and_of_one_unit_move_in_any_order(strategy: str) -> None:
    losses = []
    for moves in (False, True):
        torch.manual_seed(0)
        first, second = Stack(), Stack()
        if strategy != STRATEGIES[3]:
            second.blocks[1] = first.blocks[1]
        models: list[Any] = []
        for model in (first, second):
            units = [block for block in model.blocks if not isinstance(block, FSDPModule)]
            models.append(wrap(model, units, sharding_strategy=strategy))
        params = dict.fromkeys(param for model in models for param in model.parameters())
        optimizer = torch.optim.AdamW(params, lr=0.05)
        found = [train_losses(model, optimizer, range(2)) for model in models]
        if moves:
            assert all(model.offload(optimizer, pin_memory=False) for model in models)
            for model in models[::-1]:
                model.reload()
        losses.append(found + [train_losses(model, optimizer, range(2, 4)) for model in models])
    assert losses[0] == losses[1]
