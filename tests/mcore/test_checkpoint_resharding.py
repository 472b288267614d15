"""A checkpoint saved at some parallel sizes loads at any other, value by value and loss by loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.mcore.checkpoint_values import digests, together
from tests.mcore.session import MODEL_FLAGS, Training, curves, distance, fsdp, train
from tests.ranks import RankPools

_TRAIN = "--train-iters 4 --global-batch-size 16 --num-layers 4 --use-cpu-initialization"
_PADDED = {
    size: f"--tensor-model-parallel-size {size} --make-vocab-size-divisible-by {512 // size}"
    for size in (1, 2)
}
_PP2 = "--pipeline-model-parallel-size 2"
_VIRTUAL = f"{_PP2} --num-layers-per-virtual-pipeline-stage 1"
_MOE = (
    "--num-experts 4 --disable-bias-linear --swiglu --moe-token-dispatcher-type alltoall "
    "--moe-router-topk 2 --moe-router-load-balancing-type none"
)
_BIASED = (
    f"{_MOE} --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
    " --moe-shared-expert-intermediate-size 32"
)
_MTP = "--mtp-num-layers 1 --position-embedding-type rope"
_GATED = "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2"


def _sizes(
    *, tp: int = 1, pp: str = "", ep: int = 1, etp: int = 1, strategy: str = "optim_grads_params"
) -> list[str]:
    flags = f"{_PADDED[tp]} {pp} --expert-model-parallel-size {ep}".split()
    if etp != tp:
        flags += ["--expert-tensor-parallel-size", str(etp)]
    return fsdp(strategy, *flags)


_HSDP = ["--num-distributed-optimizer-instances", "2"]

# Model, where it is saved, where it is loaded: ranks and parallel sizes.
CASES: dict[str, tuple[str, tuple[int, list[str]], list[tuple[int, list[str]]]]] = {
    "tensor-gated": (
        _GATED,
        (4, _sizes(tp=2, etp=2)),
        [(2, _sizes()), (4, _sizes()), (2, _sizes(tp=2, etp=2))],
    ),
    "pipeline-tied": (
        "",
        (4, _sizes(pp=_PP2)),
        [(2, _sizes()), (2, _sizes(pp=_PP2)), (4, _sizes(tp=2, etp=2, pp=_PP2))],
    ),
    "one-stage": (
        "--untie-embeddings-and-output-weights",
        (2, _sizes()),
        [(2, _sizes(pp=_PP2)), (2, _sizes(pp=_VIRTUAL))],
    ),
    "virtual": (
        "",
        (2, _sizes(pp=_VIRTUAL)),
        [(2, _sizes()), (4, _sizes(pp=_VIRTUAL, strategy="optim"))],
    ),
    "experts": (
        _BIASED,
        (4, _sizes(ep=2)),
        [(2, _sizes()), (4, _sizes(ep=4)), (2, _sizes(pp=_PP2))],
    ),
    "experts-tensor": (
        f"{_MOE} --normalization RMSNorm",
        (4, [*_sizes(tp=2, etp=1, ep=2), "--sequence-parallel"]),
        [(2, _sizes()), (4, [*_sizes(tp=2, etp=2), "--sequence-parallel"])],
    ),
    "multi-token": (_MTP, (2, _sizes(pp=_PP2)), [(1, _sizes()), (2, _sizes(pp=_PP2))]),
    "one-stage-multi-token": (_MTP, (2, _sizes()), [(2, _sizes(pp=_PP2))]),
    "hybrid-sharding": (
        _GATED,
        (4, [*_sizes(), *_HSDP]),
        [(2, _sizes()), (2, _sizes(strategy="no_shard"))],
    ),
    "replicated": (
        "",
        (2, _sizes(strategy="no_shard")),
        [(4, [*_sizes(), *_HSDP]), (1, _sizes(strategy="optim"))],
    ),
}


@pytest.fixture(scope="module")
def saved(
    megatron: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, list[Training]]]:
    """Trains a case with checkpoints at iterations 2 and 4, once."""
    known: dict[str, tuple[Path, list[Training]]] = {}

    def run(case: str) -> tuple[Path, list[Training]]:
        if case not in known:
            model, (world_size, sizes), _ = CASES[case]
            folder = tmp_path_factory.mktemp(case)
            save = ["--save", str(folder), "--save-interval", "2"]
            flags = [*MODEL_FLAGS, *_TRAIN.split(), *model.split(), *sizes, *save]
            known[case] = folder, megatron(world_size).run(train, flags, digests)
        return known[case]

    return run


@pytest.mark.parametrize(
    ("case", "number"),
    [pytest.param(c, n) for c, (_, _, loads) in CASES.items() for n in range(len(loads))],
)
@pytest.mark.functional
def test_values_are_bit_equal_and_losses_go_on_at_other_sizes(
    megatron: RankPools,
    saved: Callable[[str], tuple[Path, list[Training]]],
    case: str,
    number: int,
) -> None:
    folder, uninterrupted = saved(case)
    model, _, loads = CASES[case]
    world_size, sizes = loads[number]
    flags = [*MODEL_FLAGS, *_TRAIN.split(), *model.split(), *sizes, "--load", str(folder)]
    loaded = together(megatron(world_size).run(train, flags, digests))
    assert loaded == together(uninterrupted)
    resumed = curves(megatron(world_size).run(train, [*flags, "--ckpt-step", "2"]))
    assert len(resumed.losses) == 2
    reference = curves(uninterrupted)
    assert distance(resumed.losses, reference.losses[2:]) < 1e-6
    assert distance(resumed.grad_norms, reference.grad_norms[2:]) < 1e-5


def test_frozen_parameters_are_saved_without_optimizer_state(
    megatron: RankPools, tmp_path: Path
) -> None:
    flags = [*MODEL_FLAGS, *_TRAIN.split(), "--swiglu"]
    save = [*_sizes(pp=_PP2), "--save", str(tmp_path), "--save-interval", "2"]
    uninterrupted = megatron(2).run(train, [*flags, *save], digests, ["mlp"])
    metadata = FileSystemReader(tmp_path / "iter_0000004").read_metadata()
    frozen = [key for key in metadata.state_dict_metadata if "mlp" in key]
    assert frozen
    assert all(key.startswith("model.") for key in frozen)
    load = [*_sizes(), "--load", str(tmp_path)]
    loaded = together(megatron(2).run(train, [*flags, *load], digests, ["mlp"]))
    assert loaded == together(uninterrupted)
    resumed = curves(megatron(2).run(train, [*flags, *load, "--ckpt-step", "2"], None, ["mlp"]))
    assert distance(resumed.losses, curves(uninterrupted).losses[2:]) < 1e-6
