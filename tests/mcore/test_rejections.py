"""Unsupported flags, fields and options are rejected by name, before a training starts."""

from __future__ import annotations

import argparse
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_cpu_rehearsal import RehearsalError
from megatron_cpu_rehearsal.combinations import check_combinations
from megatron_cpu_rehearsal.flags import GPU_FLAGS, with_cpu_flags
from megatron_fsdp_v2_mcore import FlagError, Options
from megatron_fsdp_v2_mcore.flags.arguments import check_arguments, check_no_yaml, supported_on_cpu
from megatron_fsdp_v2_mcore.flags.precision import DTYPE_OPTIONS, check_has_fused_adam
from megatron_fsdp_v2_mcore.flags.settings import sharding_settings
from megatron_fsdp_v2_mcore.flags.table import NO_FLAG, REJECTED
from tests.mcore.command_line import PRETRAIN, run_each
from tests.mcore.flags import LOCAL, MODEL_FLAGS, fsdp, words
from tests.mcore.parsing import parsed
from tests.mcore.trained import trained
from tests.ranks import RankFailure, RankPools


def _table(text: str) -> list[list[str]]:
    """Parse lines of flags and, after ` : `, the expected error."""
    return [line.split(" : ") for line in text.strip().splitlines()]


VALUES = {
    "--optimizer": "sgd",
    "--cuda-graph-impl": "local",
    "--fp8-format": "e4m3",
    "--te-precision-config-file": "layers.yaml",
    "--dump-param-to-param-group-map": "map",
    "--ddp-param-name-patterns-for-fp32-local-accumulation": "*.bias",
    "--non-persistent-ckpt-type": "global",
    "--ckpt-convert-format": "torch_dist",
}


def test_every_rejected_flag_of_the_table_is_named(parser: argparse.ArgumentParser) -> None:
    for flag in [row.flag.split(" ")[0] for row in REJECTED if row.flag != NO_FLAG]:
        (action,) = (action for action in parser._actions if flag in action.option_strings)
        value = [] if action.nargs == 0 else [VALUES.get(flag, "2")]
        said = f"^{flag} .*cannot be used with --use-fsdp-fully-shard-api"
        with pytest.raises(FlagError, match=said):
            check_arguments(parsed(parser, *fsdp(), flag, *value))


SELECTED = r"""
--ckpt-format torch_dist : --ckpt-format torch_dist
--load no/such/folder : --load no/such/folder does not
--num-experts 3 --expert-model-parallel-size 2 : --num-experts 3 cannot be divided by --expert-model-parallel-size 2
--expert-model-parallel-size 2 : --expert-model-parallel-size 2 needs --num-experts
--num-experts 6 --expert-model-parallel-size 3 : 4 ranks cannot be divided by --expert-model-parallel-size 3 x --expert-tensor-parallel-size 1 x --pipeline-model-parallel-size 1
--num-experts 4 --expert-model-parallel-size 2 --tensor-model-parallel-size 4 : 4 ranks cannot be divided by --expert-model-parallel-size 2 x --expert-tensor-parallel-size 4 x --pipeline-model-parallel-size 1
--tensor-model-parallel-size 2 --context-parallel-size 3 : 4 ranks cannot be divided by --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 x --context-parallel-size 3
--num-experts 4 --expert-model-parallel-size 4 --num-distributed-optimizer-instances 2 : 4 ranks cannot be divided by --expert-model-parallel-size 4 x --expert-tensor-parallel-size 1 x --pipeline-model-parallel-size 1 x --num-distributed-optimizer-instances 2
--tensor-model-parallel-size 4 --num-distributed-optimizer-instances 2 : 4 ranks cannot be divided by --tensor-model-parallel-size 4 .* x --num-distributed-optimizer-instances 2
--tensor-model-parallel-size 2 --experimental-attention-variant gated_delta_net : gated_delta_net\) cannot be used with --tensor-model-parallel-size 2
--tensor-model-parallel-size 2 --hybrid-layer-pattern M*G- : --hybrid-layer-pattern M\*G-\) cannot be used with --tensor-model-parallel-size 2
--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --num-experts 4 --expert-model-parallel-size 2 : --use-tp-pp-dp-mapping cannot be used with --pipeline-model-parallel-size 2
--hybrid-layer-pattern M*-M --mtp-num-layers 1 --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2 : --mtp-num-layers 1 cannot be used with --hybrid-layer-pattern M\*-M, which has no layers
--transformer-impl transformer_engine --mlp-chunks-for-training 2 : --mlp-chunks-for-training needs --no-gradient-accumulation-fusion
--transformer-impl transformer_engine --mtp-num-layers 2 --mtp-use-repeated-layer : --mtp-use-repeated-layer needs --no-gradient-accumulation-fusion
--delay-wgrad-compute : --delay-wgrad-compute needs --overlap-moe-expert-parallel-comm
--overlap-moe-expert-parallel-comm --moe-latent-size 32 : --moe-latent-size cannot be used with --overlap-moe-expert-parallel-comm
--optimizer-cpu-offload --optimizer-offload-fraction 1.5 : --optimizer-offload-fraction 1.5 is out of range
--optimizer-offload-fraction -0.1 : --optimizer-offload-fraction -0.1 is out of range
--optimizer-cpu-offload --optimizer lion : --optimizer lion cannot be used with --optimizer-cpu-offload: no optimizer on the CPU
--optimizer-cpu-offload --optimizer muon --muon-scalar-optimizer lion : --muon-scalar-optimizer lion cannot be used with --optimizer-cpu-offload
--optimizer-cpu-offload --use-precision-aware-optimizer --exp-avg-dtype bf16 : --exp-avg-dtype .*bf.* cannot be used with --optimizer-cpu-offload
--optimizer-cpu-offload --optimizer sgd : --optimizer sgd cannot be used with
--optimizer sgd : ^--optimizer sgd cannot be used .*sgd
--optimizer soap : ^--optimizer soap cannot be used .*soap
--optimizer dist_muon : ^--optimizer dist_muon cannot be used .*dist_muon
--optimizer muon --fp16 : --fp16 cannot be used with --optimizer muon
--optimizer adaptive_muon --fp16 : --fp16 cannot be used with --optimizer adaptive_muon
--optimizer lion --fp16 : --fp16 cannot be used with --optimizer lion
--exp-avg-sq-dtype fp8 : --exp-avg-sq-dtype fp8 needs --use-precision-aware-optimizer; add it
--use-precision-aware-optimizer --optimizer muon : --use-precision-aware-optimizer cannot be used with --optimizer muon: only Transf
--use-precision-aware-optimizer --main-params-dtype fp16 : --main-params-dtype fp16 requests .* leave it out \(--megatron-fsdp-main-params-dtype
--use-precision-aware-optimizer --main-grads-dtype bf16 --megatron-fsdp-main-grads-dtype fp32 : --main-grads-dtype bf16 and --megatron-fsdp-main-grads-dtype fp32 set different
--outer-dp-sharding-strategy optim : optim shards between optimizer instances, and there is one; add --num-distributed-optimizer-instances
--outer-dp-sharding-strategy optim --num-distributed-optimizer-instances 2 --expert-data-parallel-sharding-strategy no_shard : optim needs a sharded optimizer on the inner axis, and --expert-data-parallel-sharding-strategy is no_shard
--init-model-with-meta-device --data-parallel-sharding-strategy no_shard : --init-model-with-meta-device cannot be used with --data-parallel-sharding-strategy
--save-activations-interval 2 : --save-activations-interval cannot be used with .* tied embedding
--fp8-param-gather --megatron-fsdp-main-params-dtype bf16 : ^--fp8-param-gather quantizes .* use --megatron-fsdp-main-params-dtype fp32
--fp4-param-gather --megatron-fsdp-main-params-dtype fp16 : ^--fp4-param-gather quantizes .* use --megatron-fsdp-main-params-dtype fp32
--fp8-param-gather --use-cpu-initialization : ^--use-cpu-initialization cannot be used with --fp8-param-gather
--fp4-param-gather --use-cpu-initialization : ^--use-cpu-initialization cannot be used with --fp4-param-gather
--fsdp-unshard-prefetch-depth 2 : --fsdp-unshard-prefetch-depth needs --overlap-param-gather
--fsdp-max-live-grad-buffers 3 : --fsdp-max-live-grad-buffers needs --overlap-grad-reduce
--overlap-param-gather --fsdp-unshard-prefetch-bytes 2GiB --suggested-communication-unit-size 1000 : --suggested-communication-unit-size and --fsdp-unshard-prefetch-bytes both limit
--ddp-reduce-scatter-with-fp32-accumulation --data-parallel-sharding-strategy no_shard : no_shard all-reduces gradients, and --ddp-reduce-scatter-with-fp32-accumulation applies
"""  # noqa: E501 - a row is a line


def test_incompatible_flags_are_named(parser: argparse.ArgumentParser) -> None:
    for flags, said in _table(SELECTED):
        with pytest.raises(FlagError, match=said):
            check_arguments(parsed(parser, *fsdp(), *flags.split()))


KEPT = "--save kept --load kept --non-persistent-ckpt-type local"
LOCAL_CHECKPOINTS = rf"""
--non-persistent-save-interval 2 : --non-persistent-save-interval needs --non-persistent-ckpt-type local
--replication : --replication needs --non-persistent-ckpt-type local
{KEPT} : --non-persistent-ckpt-type local needs --non-persistent-local-ckpt-dir
--save kept --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir d : local needs --save and --load
{KEPT} --non-persistent-local-ckpt-dir d --ckpt-step 2 : --ckpt-step cannot be used with --non-persistent-ckpt-type local
{KEPT} --non-persistent-local-ckpt-dir d --pretrained-checkpoint p : --pretrained-checkpoint cannot be used with --non-persistent-ckpt-type local
{KEPT} --non-persistent-local-ckpt-dir d --finetune : --finetune cannot be used with --non-persistent-ckpt-type local
{KEPT} --non-persistent-local-ckpt-dir d --override-ckpt-iteration 2 : --override-ckpt-iteration cannot be used with
{KEPT} --non-persistent-local-ckpt-dir d --replication : --replication needs --replication-jump
{KEPT} --non-persistent-local-ckpt-dir d --replication --replication-jump 3 : 4 ranks cannot be divided by --replication-jump 3 x --replication-factor 2
{KEPT} --non-persistent-local-ckpt-dir d --replication --replication-jump 0 : cannot be divided by --replication-jump 0
{KEPT} --non-persistent-local-ckpt-dir d --replication --replication-jump 2 --replication-factor 1 : must be at least 2
{KEPT} --non-persistent-local-ckpt-dir d --replication --replication-jump 2 --optimizer-cpu-offload : --replication cannot be used with --optimizer-cpu-offload
"""  # noqa: E501 - a row is a line


def test_flags_of_local_checkpoints_are_checked(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = f"{KEPT} --non-persistent-local-ckpt-dir d --non-persistent-save-interval 2"
    flags = words(fsdp(), f"{local} --replication --replication-jump 2")
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    said = "needs NVIDIA's resiliency extension; install nvidia-resiliency-ext"
    with pytest.raises(FlagError, match=said):
        check_arguments(parsed(parser, *flags))
    extension = ModuleType("nvidia_resiliency_ext")
    extension.__spec__ = ModuleSpec("nvidia_resiliency_ext", None)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", extension)
    check_arguments(parsed(parser, *flags))
    for rejected, said in _table(LOCAL_CHECKPOINTS):
        with pytest.raises(FlagError, match=said):
            check_arguments(parsed(parser, *fsdp(), *rejected.split()))


def test_compatible_flags_pass(parser: argparse.ArgumentParser) -> None:
    for flags in (
        "",
        "--num-experts 4 --expert-model-parallel-size 2 --tensor-model-parallel-size 2",
        "--use-precision-aware-optimizer --main-grads-dtype bf16 "
        "--megatron-fsdp-main-grads-dtype bf16",
        "--optimizer muon",
        "--mlp-chunks-for-training 2 --mtp-num-layers 2 --mtp-use-repeated-layer",
        "--transformer-impl transformer_engine --mlp-chunks-for-training 2 "
        "--no-gradient-accumulation-fusion",
        "--hybrid-layer-pattern M*-M/M --mtp-num-layers 1 --untie-embeddings-and-output-weights "
        "--pipeline-model-parallel-size 2",
        "--fp8-param-gather --megatron-fsdp-main-params-dtype fp32",
    ):
        check_arguments(parsed(parser, *fsdp(), *flags.split()))


UNSELECTED = """
--use-fsdp-fully-shard-api : --use-fsdp-fully-shard-api needs --use-megatron-fsdp
--log-per-param-norm : --log-per-param-norm needs --use-fsdp-fully-shard-api
--fsdp-trace-pool : --fsdp-trace-pool needs --use-fsdp-fully-shard-api
--fsdp-unshard-prefetch-depth 2 : --fsdp-unshard-prefetch-depth needs --use-fsdp-fully-shard-api
--no-fsdp-flat-optimizer : --no-fsdp-flat-optimizer needs --use-fsdp-fully-shard-api
"""


def test_flags_of_this_package_need_it_to_be_selected(parser: argparse.ArgumentParser) -> None:
    for flags, said in _table(UNSELECTED):
        with pytest.raises(FlagError, match=said):
            check_arguments(parsed(parser, *flags.split()))


def test_without_our_flag_nothing_is_checked(parser: argparse.ArgumentParser) -> None:
    check_arguments(parsed(parser, "--qk-clip", "--use-torch-fsdp2"))


@pytest.mark.parametrize("place", ["command line", "file"])
def test_file_of_arguments_is_rejected_with_this_package(place: str) -> None:
    api = "--use-fsdp-fully-shard-api"
    argv = ["pretrain", "--yaml-cfg", "run.yaml", *([api] if place == "command line" else [])]
    args = argparse.Namespace(use_fsdp_fully_shard_api=place == "file")
    with pytest.raises(FlagError, match=f"--yaml-cfg cannot be used with {api}"):
        check_no_yaml(args, argv)
    check_no_yaml(argparse.Namespace(), argv[:3])


@pytest.mark.parametrize("flag", ["--sft", "--fim-data", "--dataloader-inter-document-masking"])
def test_data_that_pretrain_gpt_does_not_build_is_rejected(flag: str) -> None:
    from megatron_fsdp_v2_mcore.pretrain_gpt.data import check_data

    check_data(["--mock-data"])
    with pytest.raises(FlagError, match=f"{flag} requests data"):
        check_data(["--mock-data", flag])


def test_adam_without_state_in_other_dtypes_is_named(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import optimizer

    monkeypatch.setattr(optimizer, "Adam", torch.optim.AdamW)
    with pytest.raises(FlagError, match=r"Megatron uses torch\.optim\.adamw\.AdamW; inst"):
        check_has_fused_adam(parsed(parser, *fsdp(), "--use-precision-aware-optimizer"))
    check_has_fused_adam(parsed(parser, *fsdp()))


# -- command lines --------------------------------------------------------------------------------

# Added to the flags of a small model and --cpu-rehearsal.
TYPED = f"""
{" ".join(fsdp("optim_gradients"))} : invalid choice: 'optim_gradients'
{" ".join(fsdp())} --qk-clip : --qk-clip cannot be used with
{" ".join(fsdp())} --fsdp-max-live-grad-buffers 0 : expected a whole number of at least 1, got '0'
--attention-backend flash : cannot be used on a CPU
--fim-data : --fim-data requests data that this pretrain_gpt does not
--mtp-num-layers 1 : Megatron rejects these flags: Multi-Token Prediction (MTP) is not supported
"""
START = words(MODEL_FLAGS, "--train-iters 2 --cpu-rehearsal")


@pytest.mark.slow
def test_invalid_command_line_prints_one_sentence() -> None:
    rows = _table(TYPED)
    runs = run_each(PRETRAIN, [words(START, flags) for flags, _ in rows])
    for run, (_, said) in zip(runs, rows, strict=True):
        assert run.code == 2, run.output[-3000:]
        assert said in run.output
        assert "Traceback" not in run.output


TRAINED = r"""
--num-experts 2 --moe-router-topk 2 : --num-experts 2 without --disable-bias-linear cannot be used on a CPU
--num-experts 2 --moe-router-topk 2 --disable-bias-linear --tensor-model-parallel-size 2 : --num-experts 2 with --tensor-model-parallel-size 2 needs --sequence-parallel
--recompute-granularity selective --recompute-modules mlp : --recompute-modules mlp without --disable-bias-linear cannot be used
--num-experts 2 --moe-router-topk 2 --disable-bias-linear --recompute-granularity selective --recompute-modules moe_act : Megatron rejects these flags: moe_act in recompute_modules is only supported
--num-experts 2 --moe-router-topk 2 --moe-grouped-gemm --moe-shared-expert-intermediate-size 8 : Megatron cannot build the model that these flags describe: bias is not supported
--experimental-attention-variant gated_delta_net --linear-attention-freq 2 : gated_delta_net\) need --swiglu
--multi-latent-attention --position-embedding-type yarn : --position-embedding-type yarn cannot be used with --multi-latent-attention
FSDP --bf16 --megatron-fsdp-main-params-dtype bf16 : AdamW cannot step main weights in bf16 with gradients in fp32.*--megatron-fsdp-main-grads-dtype bf16
FSDP --bf16 --megatron-fsdp-main-grads-dtype bf16 --optimizer lion : cannot step main weights in fp32 with gradients in bf16
FSDP --fp16 --megatron-fsdp-main-params-dtype fp16 --megatron-fsdp-main-grads-dtype fp16 : --clip-grad 1.0 cannot be used with gradients in fp16
"""  # noqa: E501 - a row is a line


@pytest.mark.parametrize(("flags", "said"), _table(TRAINED), ids=str)
def test_flags_that_fail_in_training_are_rejected_before_the_first_step(
    megatron: RankPools, flags: str, said: str
) -> None:
    line = flags.replace("FSDP", " ".join(fsdp()))
    with pytest.raises(RankFailure, match=f"(Flag|Rehearsal)Error: .*{said}"):
        trained(megatron, 2, "--global-batch-size 8 --train-iters 1", line)


# -- rehearsals -----------------------------------------------------------------------------------


def test_a_flag_that_needs_a_gpu_is_rejected_by_name() -> None:
    for name, *others in (
        ("--transformer-impl", "inference_optimized"),
        ("--distributed-backend=nccl", *LOCAL),
        ("--attention-backend", "flash", *LOCAL),
        ("--cpu-offloading-num-layers", "2", *LOCAL),
        ("--use-precision-aware-optimizer", *fsdp(), *LOCAL),
        *((flag.name, *flag.values[:1], *LOCAL) for flag in GPU_FLAGS),
    ):
        said = f"{name.split('=')[0]}.* cannot be used on a CPU"
        with pytest.raises(RehearsalError, match=said):
            with_cpu_flags([name, *others])


def test_flags_that_this_package_supports_on_a_cpu_are_accepted() -> None:
    flags = [*LOCAL, *fsdp("optim", "--use-precision-aware-optimizer --optimizer-cpu-offload")]
    with_cpu_flags(flags, supported_on_cpu(flags))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8", "fp4": None}, "--fp8-recipe mxfp8"),
        ({"fp8": None, "fp8_recipe": "delayed", "fp4": "e2m1"}, "--fp4-format"),
    ],
    ids=["MXFP8", "NVFP4"],
)
def test_gathers_of_block_scaled_activations_are_rejected_on_a_cpu(
    given: dict[str, Any], said: str
) -> None:
    args = SimpleNamespace(**given, num_experts=None, sequence_parallel=True)
    with pytest.raises(FlagError, match=f"^{said} with --sequence-parallel cannot be used"):
        check_combinations(args)


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_recomputation_without_end_is_rejected(implementation: str) -> None:
    args = SimpleNamespace(
        **dict.fromkeys(("fp8", "fp4", "num_experts", "hybrid_layer_pattern"), None),
        **dict.fromkeys(("multi_latent_attention", "experimental_attention_variant"), None),
        **dict.fromkeys(("expert_model_parallel_size", "tensor_model_parallel_size"), 1),
        expert_tensor_parallel_size=1,
        recompute_granularity="selective",
        recompute_modules=["mlp"],
        add_bias_linear=True,
        moe_grouped_gemm=False,
        transformer_impl=implementation,
    )
    with pytest.raises(RehearsalError, match="--recompute-modules mlp without --disable-bias"):
        check_combinations(args)


# -- scripts without a command line ---------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [row for row in REJECTED if row.name in DistributedDataParallelConfig.__dataclass_fields__],
    ids=lambda rule: rule.name,
)
def test_a_rejected_field_names_its_flag(rule: Any) -> None:
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    patterns = rule.name == "param_name_patterns_for_fp32_local_accumulation"
    setattr(config, rule.name, ("*",) if patterns else True)
    with pytest.raises(FlagError, match=rule.flag):
        sharding_settings(config, Options(), torch.bfloat16, torch.bfloat16)


OFFLOADS, AWARE = {"optimizer_cpu_offload": True}, {"use_precision_aware_optimizer": True}
MUON = {"optimizer": "muon"}
BF16 = torch.bfloat16
# Fields of Megatron's `OptimizerConfig`, and the expected error.
CONFIGS: tuple[tuple[dict[str, Any], str], ...] = (
    (OFFLOADS | {"optimizer_offload_fraction": 2.0}, r"offload_fraction = 2\.0 is out of range"),
    (OFFLOADS | {"optimizer": "lion"}, "OptimizerConfig.optimizer = 'lion' cannot be used with"),
    (OFFLOADS | MUON | {"muon_scalar_optimizer": "lion"}, "muon_scalar_optimizer = 'lion'"),
    (OFFLOADS | AWARE | {"exp_avg_dtype": BF16}, "exp_avg_dtype = torch.* cannot .*optimizer_cpu"),
    (AWARE | {"main_params_dtype": torch.float16}, "main_params_dtype = torch.float16 requests"),
    (AWARE | {"main_grads_dtype": BF16}, "gradients of sharded parameters are in torch.flo"),
)


@pytest.mark.parametrize(("options", "said"), CONFIGS)
def test_unsupported_field_of_an_optimizer_configuration_is_named(
    options: dict[str, Any], said: str
) -> None:
    from megatron_fsdp_v2_mcore.optim.config import check_config

    default = dict.fromkeys((*OFFLOADS, *AWARE), False) | dict.fromkeys(
        DTYPE_OPTIONS, torch.float32
    )
    common = {"optimizer": "adam", "optimizer_offload_fraction": 1.0, **default}
    params = [torch.nn.Parameter(torch.ones(2))]
    for switch in (OFFLOADS, AWARE):
        check_config(argparse.Namespace(**common | switch), params)
    with pytest.raises(ValueError, match=said):
        check_config(argparse.Namespace(**common | options), params)


def test_invalid_option_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match=r"expert_strategy is one of no_shard, .* got 'zero3'"):
        Options(expert_strategy="zero3")
