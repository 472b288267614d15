"""`--optimizer muon` on sharded parameters matches Megatron's own on full parameters."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2_mcore.flags.arguments import accepted_by_megatron
from tests.distributed.cut_parameters import set_gradients
from tests.mcore import flags as f
from tests.mcore.flags import fsdp
from tests.mcore.parsing import parsed
from tests.mcore.session import Training, distance, enter_rehearsal
from tests.mcore.trained import on_megatron, trained
from tests.ranks import RankFailure, RankPools

SHAPES = ((7, 5), (4, 12), (1, 3), (6, 6))


def full_matrices(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the full matrices of the layers, including this rank's experts. Collective."""
    return {
        name.replace("module.", ""): param.detach().full_tensor()
        if isinstance(param, UnevenDTensor)
        else param.detach().clone()
        for chunk in model
        for name, param in chunk.named_parameters()
        if param.dim() == 2 and "layers" in name
    }


def unsharded_and_sharded(
    strategy: str = "optim_grads_params",
) -> tuple[nn.Sequential, nn.Sequential]:
    """Return two models with equal weights on all ranks: one unsharded, one sharded."""
    enter_rehearsal()
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(nn.Sequential(*(nn.Linear(n, m, bias=False) for m, n in SHAPES)))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(models[1], mesh=mesh, sharding_strategy=strategy)
    return models[0], models[1]


def give_gradients(whole: nn.Sequential, sharded: nn.Sequential) -> None:
    """Set random gradients, which are the same in both models."""
    grads = [torch.randn(param.shape) for param in whole.parameters()]
    for model in (whole, sharded):
        set_gradients(list(model.parameters()), grads)


Saved = tuple[Path, list[float]]
STEPS = "--global-batch-size 8 --train-iters 8"
# Fused projections of several groups, gated layers, and Newton-Schulz in fp32.
MUON = f"{f.GATED} {f.MUON}"


def _train(pools: RankPools, *flags: f.Flags, **options: Any) -> Training:
    return trained(pools, 2, STEPS, *flags, **options)


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint of iteration 4 at 2 ranks, ZeRO-3, and the losses of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("muon")
    return folder, _train(megatron, MUON, fsdp(), f.saving(folder, 4)).losses


@pytest.mark.functional
def test_state_of_another_optimizer_is_rejected(megatron: RankPools, saved: Saved) -> None:
    folder, uninterrupted = saved
    flags = [f.GATED, fsdp(), f.loading(folder, 4)]
    with pytest.raises(RankFailure, match="--optimizer was muon and is adam: resume with"):
        _train(megatron, *flags)
    afresh = _train(megatron, *flags, "--no-load-optim").losses
    assert afresh[0] == uninterrupted[4]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_bf16_run_starts_from_weights_without_optimizer_state(
    megatron: RankPools, saved: Saved, optimizer: str
) -> None:
    """With bf16 weights, Megatron requests main weights that are rebuilt from loaded weights."""
    folder, uninterrupted = saved
    flags = f"{MUON} --optimizer {optimizer} --no-load-optim --bf16 --train-iters 5"
    losses = _train(megatron, flags, fsdp(), f.loading(folder, 4)).losses
    assert distance(losses[:1], uninterrupted[4:5]) < 1e-2


def test_weights_are_exported_without_optimizer_state(
    megatron: RankPools, saved: Saved, tmp_path: Path
) -> None:
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.export import export

    folder, uninterrupted = saved
    assert export(folder, tmp_path, 4).omitted_optimizer == "muon"
    flags = f"{MUON} --ckpt-format torch_dist --no-load-optim --train-iters 5"
    losses = _train(megatron, flags, f.loading(tmp_path)).losses
    assert distance(losses[:1], uninterrupted[4:5]) < 1e-6


# -- classes --------------------------------------------------------------------------------------


@on_megatron(2, strategy=["optim_grads_params", "no_shard"])
def test_kinds_of_weight_decay_and_momentum_match_the_original(strategy: str) -> None:
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
    cases: list[tuple[Any, dict[str, Any]]] = [
        (Muon, {"weight_decay_method": method, "nesterov": nesterov, **exact})
        for method in ("decoupled", "independent", "l2", "palm")
        for nesterov in (False, True)
    ]
    cases += [(Scion, exact), (PolarGrad, exact), (MOP, {"weight_decay": 0.0, **exact})]
    cases += [(TensorParallelMuon, {"use_decoupled_weight_decay": False, **exact})]
    # With a tiny eps the first update is a sign, which rounding determines for elements near zero.
    adaptive = {"momentum": 0.9, "weight_decay": 0.1, "beta2": 0.9, "eps": 0.1, "nesterov": True}
    cases += [(AdaptiveMuon, {**adaptive, "extra_scale_factor": 0.5, **exact})]
    for cls, options in cases:
        whole, sharded = unsharded_and_sharded(strategy)
        # Rates large enough for every term to show.
        theirs = cls(whole.parameters(), lr=0.05, **options)
        # The first step of Megatron's own adaptive class fails.
        is_adaptive = cls is AdaptiveMuon
        ours_cls = (
            muon.FSDPZeROTensorParallelAdaptiveMuon if is_adaptive else muon.sharded_class(cls)
        )
        ours = ours_cls(sharded.parameters(), lr=0.05, **options)
        for _ in range(3):
            give_gradients(whole, sharded)
            theirs.step()
            ours.step()
        for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
            difference = (a.detach() - b.full_tensor()).abs().max() / a.abs().max()  # type: ignore[operator]
            assert difference < 1e-6, f"{cls.__name__} {options}"


@on_megatron(2)
def test_update_hooks_receive_sharded_tensors() -> None:
    whole, sharded = unsharded_and_sharded()
    from megatron_fsdp_v2_mcore import FSDPZeROTensorParallelMuon

    seen: list[str] = []

    class Watched(FSDPZeROTensorParallelMuon):
        def pre_weight_update_fn_inplace(self, p: torch.Tensor, update: torch.Tensor) -> None:
            assert p.shape == update.shape
            seen.extend([type(p).__name__, type(update).__name__])

        def post_weight_update_fn_inplace(self, p: torch.Tensor) -> None:
            seen.append(type(p).__name__)

    give_gradients(whole, sharded)
    Watched([next(sharded.parameters())]).step()
    assert seen == ["UnevenDTensor"] * 3


def test_optimizer_that_uses_full_weights_is_rejected() -> None:
    from emerging_optimizers.orthogonalized_optimizers import MuonHyperball, Spel
    from emerging_optimizers.soap import SOAP
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_fsdp_v2_mcore.optim.muon import sharded_class

    class Own(TensorParallelMuon):
        pass

    for cls, message in (
        (MuonHyperball, "pre_weight_update_fn_inplace and a post_weight_update_fn_inplace"),
        (Spel, "post_weight_update_fn_inplace of its own"),
        (SOAP, "it is not an OrthogonalizedOptimizer"),
        (Own, "derive it from FSDPZeROTensorParallelMuon"),
    ):
        with pytest.raises(ValueError, match=f"{cls.__name__} cannot step .*{message}"):
            sharded_class(cls)


def test_unsupported_options_and_shapes_are_rejected() -> None:
    from megatron_fsdp_v2_mcore import FSDPZeROTensorParallelMuon as Muon
    from megatron_fsdp_v2_mcore.optim.muon import FSDPZeROTensorParallelAdaptiveMuon as Adaptive

    for cls, shape, options, message in (
        (Muon, (2, 2), {"tp_mode": "rowwise"}, "tp_mode must be one of blockwise, .* 'rowwise'"),
        (Muon, (2, 2), {"num_ns_steps": 0}, "num_ns_steps must be at least 1, got 0"),
        (Muon, (2, 2), {"fp32_matmul_prec": "low"}, "fp32_matmul_prec must be one of .* 'low'"),
        (Muon, (2, 2), {"coefficient_type": "cubic"}, "Invalid coefficient type: cubic"),
        (Muon, (2, 2), {"scale_mode": "none"}, "Invalid mode for Muon update scale factor: none"),
        # This method needs second moments of full matrices.
        (Adaptive, (2, 2), {"moment2_method": "namo"}, "moment2_method 'namo' cannot be used"),
        (Muon, (4,), {}, "parameter 0 of shape .* is 1-D"),
        (Muon, (2, 2, 2), {}, "parameter 0 of shape .* is 3-D"),
    ):
        given: dict[str, Any] = options
        with pytest.raises(ValueError, match=message):
            cls([torch.nn.Parameter(torch.ones(shape))], **given)


def test_indivisible_fused_projection_is_rejected() -> None:
    from megatron_fsdp_v2_mcore import FSDPZeROTensorParallelMuon

    param = torch.nn.Parameter(torch.ones(7, 2))
    param.grad = torch.ones(7, 2)
    options = {"split_qkv": True, "is_qkv_fn": lambda p: True, "qkv_split_shapes": [2, 1, 1]}
    optimizer = FSDPZeROTensorParallelMuon([param], **options)
    with pytest.raises(ValueError, match=r"7 rows cannot be split into groups of 2 \+ 1 \+ 1"):
        optimizer.step()
    assert param.equal(torch.ones(7, 2))


def test_a_closure_is_rejected() -> None:
    from megatron_fsdp_v2_mcore import FSDPZeROTensorParallelMuon

    optimizer = FSDPZeROTensorParallelMuon([torch.nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)


# -- flags ----------------------------------------------------------------------------------------


def test_megatron_validates_muon_as_adam_and_the_name_is_restored(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parsed(parser, *fsdp(), "--optimizer", "muon")
    args.rank = 0
    with accepted_by_megatron(args):
        assert args.optimizer == "adam"
    assert args.optimizer == "muon"
    assert "optimizer: muon" in capsys.readouterr().out
    args.use_fsdp_fully_shard_api = False
    with accepted_by_megatron(args):
        assert args.optimizer == "muon"


TP2 = f"{f.TP2_SP} --muon-tp-mode duplicated"
EP2 = f"{f.ALLTOALL} {f.EP2} --moe-router-load-balancing-type none"
SEQUENCES = 8
SPREAD_STEPS = f"--global-batch-size {SEQUENCES} --train-iters 8 --optimizer muon"


# Ranks, flags and data-parallel ranks: of the compared runs, and of others of Megatron's own.
CASES: dict[str, tuple[tuple[int, str, int], tuple[int, str, int]]] = {
    "DP2": ((2, "", 2), (1, "", 1)),
    "TP2 x DP2": ((4, TP2, 2), (2, TP2, 1)),
    "EP2": ((2, EP2, 2), (4, EP2, 4)),
}


def _relative_distance(one: Training, other: Training) -> float:
    """Return the relative distance of the matrices of the first rank."""
    ours, theirs = one.extras[0], other.extras[0]
    assert set(ours) == set(theirs)
    # A tensor-parallel shard on the first rank is the leading block of the full matrix.
    pairs = [(ours[name][: b.shape[0], : b.shape[1]], b) for name, b in theirs.items()]
    apart = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return (apart / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5


Distances = tuple[list[float], list[float]]


def _distances(pairs: Iterable[tuple[Training, Training]]) -> Distances:
    """Return the relative distances of weights and of losses of pairs of trainings."""
    kept = list(pairs)
    return [_relative_distance(*pair) for pair in kept], [
        distance(a.losses, b.losses) for a, b in kept
    ]


def measure(pools: RankPools, name: str) -> tuple[Distances, Distances]:
    """Return distances between runs of Megatron's own, and of this package's runs from them."""

    def runs(ranks: int, flags: str, copies: int, *more: f.Flags) -> list[Training]:
        batches = [f"--micro-batch-size {n}" for n in (1, 2, 4, 8) if n * copies <= SEQUENCES]
        common = [SPREAD_STEPS, flags, *more]
        return [trained(pools, ranks, *common, size, probe=full_matrices) for size in batches]

    compared, other = CASES[name]
    same = runs(*compared)
    ours = runs(*compared, f.fsdp())
    own = itertools.combinations([*same, *runs(*other)], 2)
    return _distances(own), _distances(zip(ours, same, strict=True))


@pytest.mark.functional
@pytest.mark.parametrize("name", CASES)
def test_distances_at_default_precision_are_within_megatrons_own(
    megatron: RankPools, name: str
) -> None:
    (own_weights, own_losses), (weights, losses) = measure(megatron, name)
    assert statistics.median(own_weights) > 0, "the order of sums changes nothing"
    assert statistics.median(weights) <= 1.1 * statistics.median(own_weights)
    assert statistics.median(losses) <= 2 * max(own_losses)
