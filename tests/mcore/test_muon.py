"""`--optimizer muon` on sharded parameters trains as Megatron's own does on whole ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp_v2_mcore import FlagError
from megatron_fsdp_v2_mcore.flags.arguments import accepted_by_megatron, check_before
from tests.mcore import flags as f
from tests.mcore import matrix_optimizers
from tests.mcore.flags import ZERO3, fsdp
from tests.mcore.session import Training, distance, enter_rehearsal
from tests.mcore.trained import assert_close, on_megatron, trained
from tests.ranks import RankFailure, RankPools

STEPS = "--global-batch-size 8 --train-iters 8"
# Fused projections of several groups, gated layers, and Newton-Schulz in fp32.
MUON = f"{f.GATED} {f.MUON}"
# Words that do not occur have gradients of zeros.
NORMS = (
    "--log-num-zeros-in-grad --log-params-norm --clip-grad 0.5 "
    f"{f.UNTIED} --make-vocab-size-divisible-by 512"
)
ZEROS_BY_CHANCE = 8


def _train(pools: RankPools, *flags: f.Flags, **options: Any) -> Training:
    return trained(pools, 2, STEPS, *flags, **options)


@pytest.fixture(scope="module")
def whole(megatron: RankPools) -> Training:
    """Megatron's own Muon on whole parameters, under plain data parallelism."""
    return _train(megatron, MUON, NORMS)


@pytest.mark.parametrize("strategy", f.STRATEGIES)
def test_it_trains_like_megatrons_own_on_whole_parameters(
    megatron: RankPools, whole: Training, strategy: str
) -> None:
    ours = _train(megatron, MUON, NORMS, fsdp(strategy))
    assert_close(ours, whole)
    assert ours.params_norms
    assert min(whole.num_zeros) > 1000
    for mine, theirs in zip(ours.num_zeros, whole.num_zeros, strict=True):
        assert abs(mine - theirs) <= ZEROS_BY_CHANCE


@pytest.mark.parametrize("strategy", [f.NO_SHARD, ZERO3])
def test_it_is_megatrons_own_to_the_bit_where_sums_are_in_one_order(
    megatron: RankPools, strategy: str
) -> None:
    """At its default precision: gradients of one micro-batch, summed over two ranks, unclipped."""
    flags = "--optimizer muon --global-batch-size 4 --clip-grad 0"
    ours = _train(megatron, flags, fsdp(strategy), probe=matrix_optimizers.whole_matrices)
    theirs = _train(megatron, flags, probe=matrix_optimizers.whole_matrices, once=True)
    assert ours.losses == theirs.losses
    assert len(theirs.extras[0]) == 8
    for mine, other in zip(ours.extras, theirs.extras, strict=True):
        assert mine.keys() == other.keys()
        assert [name for name in other if not torch.equal(mine[name], other[name])] == []


def test_options_reach_the_optimizer(megatron: RankPools, whole: Training) -> None:
    options = "--muon-nesterov --muon-momentum 0.8 --muon-scale-mode unit_rms_norm --lion-beta1 0.8"
    options += " --muon-num-ns-steps 3 --muon-extra-scale-factor 0.5 --muon-coefficient-type simple"
    flags = f"{MUON} {options} --muon-no-split-qkv --weight-decay 0.2"
    theirs = _train(megatron, flags)
    assert distance(_train(megatron, flags, fsdp()).losses, theirs.losses) < 1e-6
    assert distance(theirs.losses, whole.losses) > 1e-3


def test_adaptive_muon_is_that_of_emerging_optimizers(megatron: RankPools) -> None:
    """Megatron's own class fails in its first step; the reference is patched."""
    flags = f"{MUON} --optimizer adaptive_muon --weight-decay 0.1"
    reference = _train(megatron, flags, by=matrix_optimizers.train_with_whole_adaptive_muon)
    ours = _train(megatron, flags, fsdp())
    # Its first updates are signs, and rounding decides those of what is next to zero.
    assert distance(ours.losses, reference.losses) < 1e-3
    assert distance(ours.losses, _train(megatron, MUON, fsdp()).losses) > 1e-2


def test_matrices_are_spread_over_the_ranks(megatron: RankPools) -> None:
    """Of the work, not of the time: each of two ranks has about half of the operations."""
    short = f"{MUON} --train-iters 1"
    seen = _train(megatron, short, fsdp(), probe=matrix_optimizers.work).extras
    alone = _train(megatron, short, fsdp(f.NO_SHARD), probe=matrix_optimizers.work).extras
    total = alone[0]
    assert alone == [total, total]
    assert sum(seen) == total
    assert max(seen) < 0.6 * total


def test_state_is_sharded_and_one_to_a_checkpoint(megatron: RankPools) -> None:
    short = f"{MUON} --train-iters 1"
    found = _train(megatron, short, fsdp(), probe=matrix_optimizers.state_of_all).extras
    assert [rank["names"] for rank in found] == [found[0]["names"]] * 2
    muon = found[0]["options"]["momentum_buffer"]
    # Without rows Adam keeps no state, and Muon does.
    assert found[1]["options"]["momentum_buffer"] == muon
    adam = found[0]["options"]["exp_avg"] | found[1]["options"]["exp_avg"]
    assert not muon & adam
    assert muon | adam == found[0]["names"]
    assert "embedding.word_embeddings.weight" in adam
    assert {name.rpartition(".")[0] for name in muon} >= {"decoder.layers.0.mlp.linear_fc1"}
    # Megatron's Muon takes every other matrix, positions included.
    assert all(found[0]["dims"][name] == 2 for name in muon)
    assert all(rank["are_sharded"] for rank in found)


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(
    megatron: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """A checkpoint of iteration 4 at 2 ranks, ZeRO-3, and the losses of the run that went on."""
    folder = tmp_path_factory.mktemp("muon")
    return folder, _train(megatron, MUON, fsdp(), f.saving(folder, 4)).losses


@pytest.mark.parametrize("strategy", [ZERO3, f.ZERO1])
def test_a_resumed_run_continues_to_the_bit_and_under_another_strategy_but_for_rounding(
    megatron: RankPools, saved: tuple[Path, list[float]], strategy: str
) -> None:
    folder, uninterrupted = saved
    resumed = _train(megatron, MUON, fsdp(strategy), f.loading(folder, 4)).losses
    assert distance(resumed, uninterrupted[4:]) < 1e-6
    assert strategy != ZERO3 or resumed == uninterrupted[4:]


@pytest.mark.functional
def test_another_optimizers_state_is_not_loaded(
    megatron: RankPools, saved: tuple[Path, list[float]]
) -> None:
    folder, uninterrupted = saved
    flags = [f.GATED, fsdp(), f.loading(folder, 4)]
    with pytest.raises(RankFailure, match="--optimizer was muon and is adam: resume with"):
        _train(megatron, *flags)
    afresh = _train(megatron, *flags, "--no-load-optim").losses
    assert afresh[0] == uninterrupted[4]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_bf16_run_starts_from_weights_alone(
    megatron: RankPools, saved: tuple[Path, list[float]], optimizer: str
) -> None:
    """Where weights are rounded, Megatron asks for main weights to be made of what was loaded."""
    folder, uninterrupted = saved
    flags = f"{MUON} --optimizer {optimizer} --no-load-optim --bf16 --train-iters 5"
    losses = _train(megatron, flags, fsdp(), f.loading(folder, 4)).losses
    assert distance(losses[:1], uninterrupted[4:5]) < 1e-2


def test_weights_are_exported_without_the_state(
    megatron: RankPools, saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.export import export

    folder, uninterrupted = saved
    assert export(folder, tmp_path, 4).left_out == "muon"
    flags = f"{MUON} --ckpt-format torch_dist --no-load-optim --train-iters 5"
    losses = _train(megatron, flags, f.loading(tmp_path)).losses
    assert distance(losses[:1], uninterrupted[4:5]) < 1e-6


# -- classes --------------------------------------------------------------------------------------


@on_megatron(2, strategy=["optim_grads_params", "no_shard"])
def test_every_kind_of_weight_decay_and_momentum_equals_the_original(strategy: str) -> None:
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
    # With a tiny eps the first update is a sign, and rounding decides that of what is next to zero.
    adaptive = {"momentum": 0.9, "weight_decay": 0.1, "beta2": 0.9, "eps": 0.1, "nesterov": True}
    cases += [(AdaptiveMuon, {**adaptive, "extra_scale_factor": 0.5, **exact})]
    for cls, options in cases:
        whole, sharded = matrix_optimizers.whole_and_sharded(strategy)
        # Rates large enough for every term to show.
        theirs = cls(whole.parameters(), lr=0.05, **options)
        # Megatron's own cannot make a step.
        is_adaptive = cls is AdaptiveMuon
        ours_cls = (
            muon.FSDPZeROTensorParallelAdaptiveMuon if is_adaptive else muon.sharded_class(cls)
        )
        ours = ours_cls(sharded.parameters(), lr=0.05, **options)
        for _ in range(3):
            matrix_optimizers.give_gradients(whole, sharded)
            theirs.step()
            ours.step()
        for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
            difference = (a.detach() - b.full_tensor()).abs().max() / a.abs().max()  # type: ignore[operator]
            assert difference < 1e-6, f"{cls.__name__} {options}"


@on_megatron(2)
def test_hooks_around_the_update_are_given_sharded_tensors() -> None:
    whole, sharded = matrix_optimizers.whole_and_sharded()
    from megatron_fsdp_v2_mcore import FSDPZeROTensorParallelMuon

    seen: list[str] = []

    class Watched(FSDPZeROTensorParallelMuon):
        def pre_weight_update_fn_inplace(self, p: torch.Tensor, update: torch.Tensor) -> None:
            assert p.shape == update.shape
            seen.extend([type(p).__name__, type(update).__name__])

        def post_weight_update_fn_inplace(self, p: torch.Tensor) -> None:
            seen.append(type(p).__name__)

    matrix_optimizers.give_gradients(whole, sharded)
    Watched([next(sharded.parameters())]).step()
    assert seen == ["UnevenDTensor"] * 3


@on_megatron(2)
def test_a_missing_gradient_is_named() -> None:
    whole, sharded = matrix_optimizers.whole_and_sharded()
    from megatron_fsdp_v2_mcore import FSDPZeROTensorParallelMuon

    optimizer = FSDPZeROTensorParallelMuon(sharded.parameters())
    matrix_optimizers.give_gradients(whole, sharded)
    # Of which every rank has rows.
    name, param = next(
        (name, param)
        for name, param in sharded.named_parameters()
        if all(last > first for first, last in param.row_shards.row_ranges)  # type: ignore[attr-defined]
    )
    param.grad = None
    with pytest.raises(RuntimeError, match=f"no gradient for {name} "):
        optimizer.step()


def test_an_optimizer_that_touches_whole_weights_is_rejected() -> None:
    from emerging_optimizers.orthogonalized_optimizers import MuonHyperball, Spel
    from emerging_optimizers.soap import SOAP
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_fsdp_v2_mcore.optim.muon import sharded_class

    class Own(TensorParallelMuon):
        pass

    for cls, message in (
        (MuonHyperball, "pre_weight_update_fn_inplace and a post_weight_update_fn_inplace"),
        (Spel, "post_weight_update_fn_inplace of its own"),
        (SOAP, "no OrthogonalizedOptimizer"),
        (Own, "derive it from FSDPZeROTensorParallelMuon"),
    ):
        with pytest.raises(ValueError, match=f"{cls.__name__} cannot step .*{message}"):
            sharded_class(cls)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 2), {"tp_mode": "rowwise"}, "tp_mode must be one of blockwise, .* got 'rowwise'"),
        ((2, 2), {"num_ns_steps": 0}, "num_ns_steps must be at least 1, got 0"),
        ((2, 2), {"fp32_matmul_prec": "low"}, "fp32_matmul_prec must be one of .*, got 'low'"),
        ((2, 2), {"coefficient_type": "cubic"}, "Invalid coefficient type: cubic"),
        ((2, 2), {"scale_mode": "none"}, "Invalid mode for Muon update scale factor: none"),
        # Second moments of whole matrices.
        ((2, 2), {"moment2_method": "normuon"}, "moment2_method 'normuon' cannot be used"),
        ((2, 2), {"moment2_method": "namo"}, "moment2_method 'namo' cannot be used"),
        ((4,), {}, "parameter 0 of shape .* is 1-D"),
        ((2, 2, 2), {}, "parameter 0 of shape .* is 3-D"),
    ],
)
def test_what_cannot_be_stepped_is_rejected(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    from megatron_fsdp_v2_mcore import FSDPZeROTensorParallelMuon
    from megatron_fsdp_v2_mcore.optim.muon import FSDPZeROTensorParallelAdaptiveMuon

    is_adaptive = "moment2_method" in options
    make = FSDPZeROTensorParallelAdaptiveMuon if is_adaptive else FSDPZeROTensorParallelMuon
    with pytest.raises(ValueError, match=message):
        make([torch.nn.Parameter(torch.ones(shape))], **options)


def test_a_fused_projection_that_does_not_divide_is_rejected() -> None:
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


def _parsed(*flags: str) -> argparse.Namespace:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_fsdp_v2_mcore.flags.arguments import add_arguments

    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    args = parser.parse_args(f.words(f.MODEL_FLAGS, fsdp(), *flags))
    args.world_size, args.rank = 2, 0
    return args


@pytest.mark.parametrize("name", ["sgd", "soap", "dist_muon"])
def test_other_optimizers_are_rejected_with_the_reason(name: str) -> None:
    with pytest.raises(FlagError, match=f"^--optimizer {name} cannot be used .*{name}"):
        check_before(_parsed("--optimizer", name))


@pytest.mark.parametrize("name", ["muon", "adaptive_muon", "lion"])
def test_fp16_is_rejected_as_megatron_does(name: str) -> None:
    check_before(_parsed("--optimizer", name))
    with pytest.raises(FlagError, match=f"--fp16 cannot be used with --optimizer {name}"):
        check_before(_parsed("--optimizer", name, "--fp16"))


def test_megatron_validates_as_for_adam_and_the_name_comes_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = _parsed("--optimizer", "muon")
    with accepted_by_megatron(args):
        assert args.optimizer == "adam"
    assert args.optimizer == "muon"
    assert "optimizer: muon" in capsys.readouterr().out
    args.use_fsdp_fully_shard_api = False
    with accepted_by_megatron(args):
        assert args.optimizer == "muon"
