"""What the tests of Muon run on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.mcore.session import Training, enter_rehearsal, train

SHAPES = ((7, 5), (4, 12), (1, 3), (6, 6))
STEPS = 3


def train_with_whole_adaptive_muon(flags: Sequence[str]) -> Training:
    """Train as Megatron does alone, with an `adaptive_muon` that can make a step.

    Its own scales what Newton-Schulz gives, and then lacks the attributes for scaling it again.
    """
    enter_rehearsal()
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
    from megatron.core.optimizer import emerging_optimizers as registry

    class Mended(registry.TensorParallelAdaptiveMuon):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)
            self.scale_mode = options["scale_mode"]
            self.extra_scale_factor = options["extra_scale_factor"]
            steps, kind = options["num_ns_steps"], options["coefficient_type"]
            self.scaled_orthogonalize_fn = lambda grad, *_: newton_schulz(grad, steps, kind)

    entry = registry._EMERGING_OPTIMIZERS["adaptive_muon"]
    with mock.patch.object(entry, "optimizer_cls", Mended):
        return train(flags)


def whole_matrices(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The matrices of the layers, experts of this rank among them. Collective."""
    del optimizer
    return {
        name.replace("module.", ""): param.detach().full_tensor()
        if isinstance(param, UnevenDTensor)
        else param.detach().clone()
        for chunk in model
        for name, param in chunk.named_parameters()
        if param.dim() == 2 and "layers" in name
    }


def work(model: Any, optimizer: Any) -> int:
    """Operations of this rank's Newton-Schulz in a step."""
    del model
    muon = optimizer.chained_optimizers[0].optimizer
    return sum(work.flops for _, engine in muon._engines for work in engine.works)


def state_of_all(model: Any, optimizer: Any) -> dict[str, Any]:
    """What a checkpoint of the whole chain would hold, by parameter."""
    del model
    state = optimizer.sharded_state_dict({}, metadata=_METADATA)
    assert set(state) == {"state", "param_to_group_meta"}
    options: dict[str, set[str]] = {}
    for name, entry in state["state"].items():
        for option in entry:
            options.setdefault(option, set()).add(name)
    tensors = [
        value
        for entry in state["state"].values()
        for value in entry.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    names = set(state["param_to_group_meta"])
    by_name = {
        part._param_name(param): param.dim()
        for part in optimizer.chained_optimizers
        for param in part.get_parameters()
    }
    return {
        "names": names,
        "options": options,
        "dims": by_name,
        "are_sharded": all(isinstance(tensor, UnevenDTensor) for tensor in tensors),
    }


_METADATA = {"distrib_optim_sharding_type": "fsdp_dtensor"}


def whole_and_sharded(strategy: str = "optim_grads_params") -> tuple[nn.Sequential, nn.Sequential]:
    """Equal models on all ranks: one whole, one sharded."""
    enter_rehearsal()
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(nn.Sequential(*(nn.Linear(n, m, bias=False) for m, n in SHAPES)))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(models[1], mesh=mesh, sharding_strategy=strategy)
    return models[0], models[1]


def give_gradients(whole: nn.Sequential, sharded: nn.Sequential) -> None:
    for theirs, ours in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert isinstance(ours, UnevenDTensor)
        theirs.grad = torch.randn(theirs.shape)
        first, last = ours.local_rows
        rows = theirs.grad[first:last].clone()
        ours.grad = (
            UnevenDTensor.from_rows(rows, ours.device_mesh, ours.row_shards, ours.shape)
            if last > first
            else None
        )
