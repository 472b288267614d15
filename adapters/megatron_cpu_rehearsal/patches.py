"""Patches of torch and Megatron for a CPU, each with its reason."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_cpu_rehearsal.devices import CpuDevices
from megatron_fsdp_v2_patching import Patch


def _without_checks_of_a_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def inprocess_restart(*args: Any) -> Any:
        rank = os.environ.pop("LOCAL_RANK")
        try:
            return original(*args)
        finally:
            os.environ["LOCAL_RANK"] = rank

    return inprocess_restart


def _skip_if_compiled(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    def compile_or_skip() -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            compile_helpers()

    return compile_or_skip


def _without_random_numbers(make_iterator: Callable[..., None]) -> Callable[..., None]:
    def make_iterator_apart(self: Any, loader: Any) -> None:
        state = torch.get_rng_state()
        try:
            make_iterator(self, loader)
        finally:
            torch.set_rng_state(state)

    return make_iterator_apart


def _with_cpu_devices(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward_on_cpu(*args: Any, **kwargs: Any) -> Any:
        with CpuDevices():
            return run_backward(*args, **kwargs)

    return run_backward_on_cpu


def _without_fp8(construct: Callable[..., None]) -> Callable[..., None]:
    def construct_checkpoint(self: Any, fp8: Any = None) -> None:
        del fp8
        construct(self, fp8=None)

    return construct_checkpoint


def _with_grouped_experts(mlp_modules: Callable[..., Any]) -> Callable[..., Any]:
    def modules(self: Any, moe_use_grouped_gemm: bool) -> Any:
        if not moe_use_grouped_gemm:
            return mlp_modules(self, moe_use_grouped_gemm)
        from megatron_cpu_rehearsal.grouped_experts import grouped_mlp

        return grouped_mlp()

    return modules


_MAMBA = "mamba_ssm's kernels need a GPU"
_NORMED = "a linear layer with a fused input norm is part of Transformer Engine"
_LATENT_EXPERTS = "the projections to and from the latent space of experts use Transformer Engine"
_FLA = "flash-linear-attention's kernels need a GPU"
_VARIANT_SPEC = "Megatron specifies experimental attention only with Transformer Engine's layers"
_HYBRID_SPEC = "Megatron specifies hybrid layers only with Transformer Engine's layers"
# Method that c10d calls for a coalesced all-gather; torch 2.15 renamed it.
_COALESCED_GATHER = (
    "all_gather_single_coalesced"
    if hasattr(torch.distributed.ProcessGroup, "all_gather_single_coalesced")
    else "allgather_into_tensor_coalesced"
)


def _with_state_to_fill(describe: Callable[..., Any]) -> Callable[..., Any]:
    def describe_with_state(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any
    ) -> Any:
        if is_loading and not self.ddp_config.use_megatron_fsdp and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return describe(self, model_sharded_state_dict, is_loading, **kwargs)

    return describe_with_state


def _without_steps(fill_state: Callable[..., None]) -> Callable[..., None]:
    def fill_all_but_steps(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        fill_state(self, model_param, {"step": None, **tensors})

    return fill_all_but_steps


def _with_steps_of_their_own(load: Callable[..., None]) -> Callable[..., None]:
    def load_apart(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load_apart


PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.training:pretrain",
        "combinations of flags that would fail inside a layer are rejected before a training",
        wrap="megatron_cpu_rehearsal.combinations:with_checked_flags",
    ),
    Patch(
        "megatron.training.inprocess_restart:inprocess_restart",
        "before a restart, NVIDIA's resiliency extension checks the GPU of LOCAL_RANK through NVML",
        wrap="megatron_cpu_rehearsal.patches:_without_checks_of_a_gpu",
    ),
    Patch(
        "megatron.core.datasets.utils:compile_helpers",
        "the function runs `make`; the wheel contains the compiled helpers, but no Makefile",
        wrap="megatron_cpu_rehearsal.patches:_skip_if_compiled",
    ),
    Patch(
        "megatron.training.initialize:_warmup_jit_function",
        "no function is compiled, so none needs a warm-up; unlike on a GPU, the warm-up would draw "
        "random numbers from the generator that initializes weights",
        replace="megatron_cpu_rehearsal.output:nothing",
    ),
    Patch(
        "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__",
        "a loader seeds its workers from the host's generator, which is also the device's in a "
        "rehearsal; a resumed run would continue with different random numbers",
        wrap="megatron_cpu_rehearsal.patches:_without_random_numbers",
    ),
    Patch(
        "torch.autograd:_engine_run_backward",
        "torch disables a function mode while one of its functions runs, such as a backward within "
        "a backward (activation recompute), and Megatron's own backwards name CUDA devices",
        wrap="megatron_cpu_rehearsal.patches:_with_cpu_devices",
    ),
    Patch(
        "torch:Tensor.record_stream",
        "the method accepts only CUDA streams; the schedule of --overlap-moe-expert-parallel-comm "
        "calls it to prevent an early reuse of memory",
        replace="megatron_cpu_rehearsal.output:nothing",
    ),
    Patch(
        "torch.distributed:init_process_group",
        "a script that creates the process group names nccl, which needs GPUs",
        wrap="megatron_cpu_rehearsal.collectives:over_gloo",
    ),
    Patch(
        "torch.distributed:all_to_all_single",
        "the MoE token dispatcher passes split sizes as arrays; gloo requires lists",
        wrap="megatron_cpu_rehearsal.collectives:lists_for_splits",
    ),
    Patch(
        "torch.distributed:all_gather",
        "expert tensor parallelism gathers parts of unequal length; gloo requires equal lengths",
        wrap="megatron_cpu_rehearsal.collectives:gather_unequal",
    ),
    Patch(
        f"torch.distributed:ProcessGroup.{_COALESCED_GATHER}",
        "Megatron's distributed optimizer gathers FP8 and bf16 weights in one call; gloo "
        "concatenates them into one tensor, which converts FP8 bytes to bf16 numbers",
        wrap="megatron_cpu_rehearsal.collectives:gather_dtypes_apart",
    ),
    Patch(
        "torch.distributed:reduce_scatter",
        "expert tensor parallelism scatters parts of unequal length; gloo requires equal lengths",
        wrap="megatron_cpu_rehearsal.collectives:scatter_unequal",
    ),
    Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        "torch's norm, the only one on a CPU, supports neither --sequence-parallel nor "
        "--apply-layernorm-1p",
        wrap="megatron_cpu_rehearsal.norms:with_every_option",
    ),
    Patch(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        "attention with context parallelism is part of Transformer Engine",
        wrap="megatron_cpu_rehearsal.context_parallel:without_rejection",
    ),
    Patch(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        "under context parallelism queries need the keys of every rank",
        wrap="megatron_cpu_rehearsal.context_parallel:over_the_whole_sequence",
    ),
    Patch(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        "attention with keys and values of different widths is part of Transformer Engine",
        wrap="megatron_cpu_rehearsal.latent_attention:with_head_widths",
    ),
    Patch(
        "megatron.core.transformer.experimental_attention_variant.dsa:rotate_activation",
        "fast_hadamard_transform's kernel needs a GPU and bf16 inputs",
        replace="megatron_cpu_rehearsal.experimental_attention:hadamard_rotation",
    ),
    Patch(
        "megatron.core.ssm.gated_delta_net.common:HAVE_FLA",
        _FLA,
        replace="builtins:True",
    ),
    Patch(
        "megatron.core.ssm.gated_delta_net.common:l2norm",
        _FLA,
        replace="megatron_cpu_rehearsal.experimental_attention:l2norm",
    ),
    Patch(
        "megatron.core.ssm.gated_delta_net.gdn:causal_conv1d",
        _FLA,
        replace="megatron_cpu_rehearsal.experimental_attention:causal_conv1d",
    ),
    Patch(
        "megatron.core.ssm.mamba_mixer:mamba_split_conv1d_scan_combined",
        _MAMBA,
        replace="megatron_cpu_rehearsal.mamba_kernels:split_conv1d_scan",
    ),
    Patch(
        "megatron.core.ssm.gated_delta_net.gdn:chunk_gated_delta_rule",
        _FLA,
        replace="megatron.core.ssm.gated_delta_net.common:torch_chunk_gated_delta_rule",
    ),
    Patch(
        "megatron.core.ssm.mamba_mixer:ExtendedRMSNorm",
        _MAMBA,
        replace="megatron_cpu_rehearsal.hybrid:ShardedGroupedRMSNorm",
    ),
    Patch(
        "megatron.core.ssm.mamba_mixer:HAVE_MAMBA_SSM",
        _MAMBA,
        replace="builtins:True",
    ),
)
"""Patches of every rehearsal."""

WITHOUT_TRANSFORMER_ENGINE: tuple[Patch, ...] = (
    Patch(
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
        "the local specification of multi-latent attention shards the projections to the latents "
        "over tensor-parallel ranks and drops gradients of the shared keys; Transformer Engine's "
        "specification replicates the projections",
        wrap="megatron_cpu_rehearsal.latent_attention:with_latents_on_every_rank",
    ),
    Patch(
        "megatron.core.transformer.multi_latent_attention:TELinear",
        "a linear layer that is replicated on all tensor-parallel ranks is part of Transformer "
        "Engine",
        replace="megatron_cpu_rehearsal.replicated_linear:ReplicatedLinear",
    ),
    Patch(
        "megatron.core.transformer.multi_latent_attention:TELayerNormColumnParallelLinear",
        _NORMED,
        replace="megatron_cpu_rehearsal.replicated_linear:NormedColumnParallelLinear",
    ),
    Patch(
        "megatron.core.models.hybrid.hybrid_block:TELayerNormColumnParallelLinear",
        _NORMED,
        replace="megatron_cpu_rehearsal.replicated_linear:NormedColumnParallelLinear",
    ),
    Patch(
        "megatron.core.transformer.moe.moe_layer:TELinear",
        _LATENT_EXPERTS,
        replace="megatron_cpu_rehearsal.replicated_linear:ReplicatedLinear",
    ),
    Patch(
        "megatron.core.transformer.moe.moe_layer:HAVE_TE",
        _LATENT_EXPERTS,
        replace="builtins:True",
    ),
    Patch(
        "megatron.core.models.backends:LocalSpecProvider.column_parallel_layer_norm_linear",
        _NORMED,
        replace="megatron_cpu_rehearsal.latent_attention:choose_normed_linear",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
        "without an argument the constructor assumes FP8 and calls Transformer Engine, also for "
        "--recompute-modules moe_act",
        wrap="megatron_cpu_rehearsal.patches:_without_fp8",
    ),
    Patch(
        "megatron.core.models.backends:LocalSpecProvider.grouped_mlp_modules",
        "without Transformer Engine's grouped linear layer --moe-grouped-gemm silently builds "
        "sequential experts, which have different modules and parameters",
        wrap="megatron_cpu_rehearsal.patches:_with_grouped_experts",
    ),
    Patch(
        "megatron.core.models.gpt.experimental_attention_variant_module_specs:"
        "_get_backend_spec_provider",
        _VARIANT_SPEC,
        replace="megatron_cpu_rehearsal.experimental_attention:local_backend",
    ),
    Patch(
        "megatron.core.models.gpt.experimental_attention_variant_module_specs:"
        "_get_self_attention_module_spec",
        _VARIANT_SPEC,
        replace="megatron_cpu_rehearsal.experimental_attention:local_attention_spec",
    ),
    Patch(
        "megatron.core.transformer.experimental_attention_variant.absorbed_mla:TELinear",
        _VARIANT_SPEC,
        replace="megatron_cpu_rehearsal.replicated_linear:ReplicatedLinear",
    ),
    Patch(
        "megatron.training.models.gpt:_te_or_local_layer_spec",
        "the local specification of a layer without experts ignores --qk-l2-norm",
        wrap="megatron_cpu_rehearsal.experimental_attention:layer_with_l2_norms",
    ),
    Patch(
        "megatron.core.models.hybrid.hybrid_block:TENorm",
        _HYBRID_SPEC,
        replace="megatron.core.transformer.torch_norm:WrappedTorchNorm",
    ),
    Patch(
        "megatron.core.models.hybrid.hybrid_layer_specs:hybrid_stack_spec",
        _HYBRID_SPEC,
        wrap="megatron_cpu_rehearsal.hybrid:local_stack_spec",
    ),
    Patch(
        "megatron.training.models.hybrid:default_hybrid_stack_spec",
        _HYBRID_SPEC,
        wrap="megatron_cpu_rehearsal.hybrid:local_stack_spec",
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict",
        "before loading a checkpoint, Megatron's optimizer reads its number of steps from state "
        "that torch's Adam, the only one on a CPU, creates in its first step",
        wrap="megatron_cpu_rehearsal.patches:_with_state_to_fill",
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:"
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        "Megatron's optimizer loads step counts with the options of its groups; torch's Adam "
        "stores them as state tensors, which would also be loaded from the checkpoint",
        wrap="megatron_cpu_rehearsal.patches:_without_steps",
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        "Megatron's optimizer assigns one step-count tensor to all parameters, which torch's Adam "
        "then increments once per parameter",
        wrap="megatron_cpu_rehearsal.patches:_with_steps_of_their_own",
    ),
)
"""Patches of rehearsals without Transformer Engine."""


PARSER = Patch(
    "megatron.training.arguments:add_megatron_arguments",
    "a script with its own parser may not accept flags that are added to its command line",
    wrap="megatron_cpu_rehearsal.flags:with_cpu_defaults",
)
"""Patch for scripts with their own command line."""
