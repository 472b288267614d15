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
        name.replace("module.", ""): param.full_tensor()
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


def _models(strategy: str = "optim_grads_params") -> tuple[nn.Sequential, nn.Sequential]:
    """Equal models on all ranks: one whole, one sharded."""
    enter_rehearsal()
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(nn.Sequential(*(nn.Linear(n, m, bias=False) for m, n in SHAPES)))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(models[1], mesh=mesh, sharding_strategy=strategy)
    return models[0], models[1]


def _give_gradients(whole: nn.Sequential, sharded: nn.Sequential) -> None:
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


def differences_from_originals() -> dict[str, float]:
    """Largest differences of weights, by optimizer, after some steps on equal gradients."""
    enter_rehearsal()
    from emerging_optimizers.orthogonalized_optimizers import (
        MOP,
        AdaptiveMuon,
        Muon,
        PolarGrad,
        Scion,
    )
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_fsdp_v2_mcore.optim import muon

    exact = {"fp32_matmul_prec": "highest"}
    cases = [
        (Muon, {"weight_decay_method": method, "nesterov": nesterov, **exact})
        for method in ("decoupled", "independent", "l2", "palm")
        for nesterov in (False, True)
    ]
    cases += [(Scion, exact), (PolarGrad, exact), (MOP, {"weight_decay": 0.0, **exact})]
    cases += [(TensorParallelMuon, {"use_decoupled_weight_decay": False, **exact})]
    # With a tiny eps the first update is a sign, and rounding decides that of what is next to zero.
    adaptive = {"momentum": 0.9, "weight_decay": 0.1, "beta2": 0.9, "eps": 0.1, "nesterov": True}
    cases += [(AdaptiveMuon, {**adaptive, "extra_scale_factor": 0.5, **exact})]
    found = {}
    for cls, options in cases:
        for strategy in ("optim_grads_params", "no_shard"):
            whole, sharded = _models(strategy)
            # Rates large enough for every term to show.
            theirs = cls(whole.parameters(), lr=0.05, **options)
            # Megatron's own cannot make a step.
            is_adaptive = cls is AdaptiveMuon
            ours_cls = (
                muon.FSDPZeROTensorParallelAdaptiveMuon if is_adaptive else muon.sharded_class(cls)
            )
            ours = ours_cls(sharded.parameters(), lr=0.05, **options)
            for _ in range(STEPS):
                _give_gradients(whole, sharded)
                theirs.step()
                ours.step()
            name = f"{cls.__name__} {options} {strategy}"
            pairs = zip(whole.parameters(), sharded.parameters(), strict=True)
            found[name] = max(
                float((a.detach() - b.full_tensor()).abs().max() / a.abs().max())  # type: ignore[operator]
                for a, b in pairs
            )
    return found


def what_hooks_see() -> list[str]:
    """Classes of the tensors that hooks of a class of its own are given."""
    whole, sharded = _models()
    from megatron_fsdp_v2_mcore import FSDPZeROTensorParallelMuon

    seen: list[str] = []

    class Watched(FSDPZeROTensorParallelMuon):
        def pre_weight_update_fn_inplace(self, p: torch.Tensor, update: torch.Tensor) -> None:
            assert p.shape == update.shape
            seen.extend([type(p).__name__, type(update).__name__])

        def post_weight_update_fn_inplace(self, p: torch.Tensor) -> None:
            seen.append(type(p).__name__)

    _give_gradients(whole, sharded)
    Watched([next(sharded.parameters())]).step()
    return seen


def step_without_a_gradient() -> tuple[str, str]:
    """The message of a step where a matrix has none on any rank, and the matrix's name."""
    whole, sharded = _models()
    from megatron_fsdp_v2_mcore import FSDPZeROTensorParallelMuon

    optimizer = FSDPZeROTensorParallelMuon(sharded.parameters())
    _give_gradients(whole, sharded)
    name, param = next(
        (name, param)
        for name, param in sharded.named_parameters()
        if all(last > first for first, last in param.row_shards.row_ranges)  # type: ignore[attr-defined]
    )
    param.grad = None
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error), name
    return "", name
