"""`prove` proves good configurations, and finds and names planted faults."""

from __future__ import annotations

import functools
import re
import sys

import pytest

from functional_tests import prove_faults
from functional_tests.prove_step_faults import STEP_FAULTS
from megatron_fsdp_v2_mcore.prove import sides
from megatron_fsdp_v2_mcore.prove.proof import Prover
from megatron_fsdp_v2_mcore.prove.report import (
    DIFFERS,
    PROVEN,
    SAME_MEMORY,
    ProofReport,
    lines,
)
from megatron_fsdp_v2_mcore.prove.shrink import covering_runs, parse_words
from megatron_fsdp_v2_mcore.prove.worker import train
from tests.mcore import flags as f
from tests.mcore.te_pools import pools_for
from tests.processes import ran

pytestmark = pytest.mark.functional

JOB = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 "
    "--train-iters 1000 --attention-dropout 0 --hidden-dropout 0"
)
SHARDED = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"
FSDP = f"{JOB} {SHARDED}"
FP8 = (
    "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather "
    "--transformer-impl transformer_engine"
)
MOE = "--num-experts 64 --moe-router-topk 2 --expert-model-parallel-size 8 --moe-grouped-gemm"
EXPERTS = f"{MOE} --disable-bias-linear --moe-token-dispatcher-type alltoall"

UNUSUAL_JOBS = [
    (
        f"{SHARDED} optim_grads_params --bf16 --use-precision-aware-optimizer --exp-avg-dtype "
        "bf16 --exp-avg-sq-dtype fp16"
    ),
    "--bf16 --weight-decay 0 --adam-eps 1e-15 --adam-beta2 0.95",
    (
        "--clip-grad 0 --start-weight-decay 0.001 --end-weight-decay 0.01 "
        "--weight-decay-incr-style cosine"
    ),
    "--fp16 --lr-warmup-iters 100 --lr-decay-style cosine --min-lr 1e-5",
    (
        "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4 --lr-decay-style WSD "
        "--lr-wsd-decay-iters 100 --lr-decay-iters 1000"
    ),
    "--use-mup --mup-base-hidden-size 128 --bf16",
    "--qk-layernorm --apply-wd-to-qk-layernorm --optimizer lion --weight-decay 1e-4",
    (
        f"{SHARDED} optim --bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
        "--use-precision-aware-optimizer"
    ),
    (
        f"{SHARDED} optim_grads_params --num-distributed-optimizer-instances 2 "
        "--outer-dp-sharding-strategy optim --bf16"
    ),
    f"{SHARDED} no_shard --bf16 --grad-reduce-in-bf16",
    (
        "--optimizer muon --bf16 --num-experts 8 --moe-router-topk 2 "
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall "
        "--disable-bias-linear --transformer-impl local"
    ),
    (
        "--optimizer muon --tensor-model-parallel-size 8 --swiglu --group-query-attention "
        "--num-query-groups 8 --sequence-parallel"
    ),
    "--attention-dropout 0.1 --hidden-dropout 0.1 --tensor-model-parallel-size 2",
    (
        "--pipeline-model-parallel-size 4 --mtp-num-layers 1 --position-embedding-type rope "
        "--calculate-per-token-loss --bf16"
    ),
    "--hybrid-layer-pattern M*-M --untie-embeddings-and-output-weights",
    "--context-parallel-size 2 --calculate-per-token-loss --bf16",
    (
        "--no-bias-gelu-fusion --normalization RMSNorm --adam-beta1 0.5 --adam-beta2 0.5 "
        "--weight-decay 1.0"
    ),
    (
        "--bf16 --transformer-impl local --accumulate-allreduce-grads-in-fp32 "
        "--lr-decay-style inverse-square-root --lr-warmup-iters 10 --clip-grad 0.01"
    ),
    (
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 "
        "--qk-pos-emb-head-dim 8 --v-head-dim 12 --bf16"
    ),
    (
        f"{SHARDED} optim_grads_params --bf16 --megatron-fsdp-main-grads-dtype bf16 "
        "--megatron-fsdp-grad-comm-dtype bf16"
    ),
]
"""Flags of jobs that train right, and that a comparison of steps may call different."""


def prove(request: pytest.FixtureRequest, job: str, fault: str | None = None) -> ProofReport:
    """Return the report of a job whose sharded trainings have a fault."""
    flags = parse_words(job.split())
    impl, _ = sides.layers_of(flags)
    trains = train if fault is None else functools.partial(prove_faults.train, fault=fault)
    pools = pools_for(request, [*job.split(), "--transformer-impl", impl])
    prover = Prover(pools, impl, trains)
    return ProofReport(flags, impl, (), [prover.prove(run) for run in covering_runs(flags)], 0.0)


@pytest.mark.parametrize(
    ("fault", "job", "said"),
    [
        (
            "wrong_divisor_for_experts",
            f"{JOB} {EXPERTS}",
            r"in fp32: gradient of \S*experts\S* of iteration 1: .* 2 times all its values",
        ),
        (
            "lost_gradient_of_tied_weights",
            JOB,
            r"in fp32: gradient of embedding.word_embeddings.weight of iteration 1",
        ),
        (
            "stale_weight_after_a_load",
            f"{FSDP} optim",
            r"resumed at the same size: loaded weight of \S+ of iteration 2",
        ),
        (
            "wrong_scale_with_per_token_loss",
            f"{JOB} --calculate-per-token-loss",
            r"in fp32: gradient of \S+ of iteration 1: .* 2 times all its values",
        ),
        (
            "skipped_refresh_under_fp8",
            f"{FSDP} optim_grads_params {FP8}",
            r"in its own precision: loss of iteration 2",
        ),
        (
            "momentum_advanced_twice",
            f"{JOB} {f.OVERLAP_GRADS}",
            r"steps with equal gradients: weight of \S+ of iteration 2",
        ),
        (
            "swapped_halves_in_a_reshard",
            f"{JOB} --swiglu --tensor-model-parallel-size 8",
            r"resumed on one rank: loaded weight of \S*linear_fc1.weight",
        ),
        (
            "norm_without_replicated_parameters",
            f"{JOB} --tensor-model-parallel-size 8",
            r"steps with equal gradients: gradient norm of iteration 1",
        ),
    ],
)
def test_planted_fault_is_found_and_named(
    request: pytest.FixtureRequest, fault: str, job: str, said: str
) -> None:
    report = prove(request, job, fault)
    assert report.exit_code == DIFFERS
    assert re.search(said, report.verdict), report.verdict


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_fault_of_a_step_or_a_resume_is_found_and_named(
    request: pytest.FixtureRequest, fault: str
) -> None:
    report = prove(request, f"{JOB} {STEP_FAULTS[fault].flags}", fault)
    assert report.exit_code == DIFFERS
    assert re.search(STEP_FAULTS[fault].said, report.verdict), report.verdict


@pytest.mark.parametrize("options", UNUSUAL_JOBS)
def test_unusual_job_is_proven(request: pytest.FixtureRequest, options: str) -> None:
    report = prove(request, f"{JOB} {options}")
    assert report.exit_code == PROVEN, report.verdict


@pytest.mark.parametrize(
    "job",
    [
        f"{JOB} --bf16",
        f"{JOB} {EXPERTS} --bf16",
        f"{FSDP} optim_grads_params {FP8}",
        f"{FSDP} optim --swiglu --tensor-model-parallel-size 8 --sequence-parallel",
        f"{JOB} {f.MTP} --calculate-per-token-loss --optimizer muon",
    ],
)
def test_good_configuration_is_proven(request: pytest.FixtureRequest, job: str) -> None:
    report = prove(request, job)
    assert report.exit_code == PROVEN, report.verdict
    for result in report.results:
        assert len(result.memory) == 3, result.unplanned
        for kind, (measured, planned) in result.memory.items():
            assert measured == pytest.approx(planned, rel=SAME_MEMORY), kind


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (
            f"{JOB} --context-parallel-size 4 --eod-mask-loss",
            r"on one rank: gradient norm of iteration 3: .* difference of 9\.\de-02",
        ),
        (
            f"{JOB} {f.MTP} --context-parallel-size 4 --calculate-per-token-loss",
            r"on one rank: gradient norm of iteration 3: .* difference of \d\.\de-04",
        ),
        (
            f"{JOB} {f.LATENT} --tensor-model-parallel-size 8",
            r"replicas of tensor-parallel ranks: replica of \S+ of iteration 1",
        ),
        (
            f"{JOB} --softmax-type learnable --tensor-model-parallel-size 8",
            r"replicas of tensor-parallel ranks: replica of \S*softmax_offset of iteration 1",
        ),
    ],
)
def test_fault_of_megatron_itself_is_named(
    request: pytest.FixtureRequest, job: str, said: str
) -> None:
    report = prove(request, job)
    assert report.exit_code == PROVEN, report.verdict
    assert re.search(rf"Megatron itself: run 1, {said}", "\n".join(lines(report)))


@pytest.mark.parametrize("options", ["--bf16", f"--bf16 {FP8} --use-megatron-fsdp"])
def test_command_proves_a_job_with_its_own_layers(options: str) -> None:
    call = "import sys; from megatron_fsdp_v2_cli import main; sys.exit(main(sys.argv[1:]))"
    done = ran(sys.executable, "-c", call, "prove", "--", *f"{JOB} {options}".split())
    assert done.returncode == PROVEN, done.stderr
    assert "layers: Transformer Engine's, over reference kernels" in done.stdout
