"""Megatron's distributed optimizer over sharded parameters, and norms over the whole model.

Megatron sums squares of gradients over a process group and assumes that every rank holds different
elements. Replicated elements (`no_shard`, replicas of hybrid sharding) would count several times,
and the correct group would depend on the strategy and on the experts. Here each rank counts the
elements whose first replica it owns, and one all-reduce sums over all ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_fsdp_v2.diagnostics.corruption import Auditor, audit, corrupted
from megatron_fsdp_v2.dtensor.optimizer_state import (
    hide_empty_gradients,
    restore_gradients,
    wrap_foreign_state,
)
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.optim import step_flat
from megatron_fsdp_v2_mcore.checkpoint.names import canonical_parameter_names
from megatron_fsdp_v2_mcore.flags.options import Options
from megatron_fsdp_v2_mcore.flags.settings import reject
from megatron_fsdp_v2_mcore.model.replicas import check_before_step, note_after_step
from megatron_fsdp_v2_mcore.optim.config import (
    check_config,
    check_gradients,
    clipping_config,
    factory_config,
)
from megatron_fsdp_v2_mcore.optim.offload import ShardedHybridOptimizer, offloaded
from megatron_fsdp_v2_mcore.optim.optimizer_state import (
    load_scaled,
    reset_zero_scales_after_steps,
    scaled_names,
    state_after_a_step,
    unscaled,
    unscaled_zeros,
)

STATE, META = "state", "param_to_group_meta"
_RUN_OPTIONS = ("is_expert_parallel",)
"""Options of a parameter group that a checkpoint does not set: this run's parallelism."""


class ShardedOptimizer(DistributedOptimizer):
    """Steps sharded main weights; statistics count every element of the model once.

    A patch replaces Megatron's class with this class. For models that this package has not sharded,
    the constructor returns an instance of Megatron's class.
    """

    _checkpoint_names: dict[torch.nn.Parameter, str] | None = None
    grad_norms_by_group: dict[str, float]
    has_stepped = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an optimizer of this class, or of Megatron's class for an unsharded model."""
        params = (p for chunk in kwargs.get("model_chunks", ()) for p in chunk.parameters())
        if cls is ShardedOptimizer and not any(isinstance(p, UnevenDTensor) for p in params):
            return DistributedOptimizer(*args, **kwargs)
        return super().__new__(cls)

    @override
    def get_grad_stats_parallel_group(self) -> Any:
        """Return the group whose ranks together hold the whole model: all ranks."""
        has_instances = self.ddp_config.num_distributed_optimizer_instances > 1
        # A script that passes its own process groups does not initialize Megatron's.
        if has_instances or not parallel_state.model_parallel_is_initialized():
            return dist.group.WORLD
        return parallel_state.get_intra_distributed_optimizer_instance_group()

    @override
    def _filter_grads_for_norm(
        self, params: list[Any], param_filter: Callable[[Any], bool] | None = None
    ) -> list[torch.Tensor]:
        kept = [p for p in params if param_filter is None or param_filter(p)]
        groups = getattr(self, "tp_group", None), getattr(self, "expert_tp_group", None)
        return [
            local_of(param.grad)
            for param in params_counted_on_rank(kept, *groups)
            if param.grad is not None
        ]

    @override
    def count_zeros(self) -> float:
        """Return the number of zeros in all gradients. Collective."""
        grads = self._filter_grads_for_norm(self.get_parameters())
        device = torch.device(torch.cuda.current_device()) if not grads else grads[0].device
        zeros = torch.zeros(1, dtype=torch.int64, device=device)
        for grad in grads:
            zeros += grad.numel() - torch.count_nonzero(grad)
        dist.all_reduce(zeros, group=self.get_grad_stats_parallel_group())
        return float(zeros.item())

    @override
    @torch.no_grad()
    def step(self) -> tuple[bool, Any, Any]:
        """Step as the only optimizer of a chain.

        Megatron always chains its optimizers, except with `--use-megatron-fsdp`. The step of an
        optimizer outside a chain computes the gradient norm only for clipping, and ignores
        `grad_norm_skip_threshold`.

        Returns:
            Whether parameters were updated; the gradient norm; the number of zeros in gradients.
            The last two are None if they are not computed.
        """
        chain = ShardedChain([self])
        result: tuple[bool, Any, Any] = chain.step()
        self.grad_norms_by_group = chain.grad_norms_by_group
        return result

    # -- state dicts ---------------------------------------------------------------------------

    @override
    def sharded_param_state_fsdp_dtensor(self, is_loading: bool = False) -> dict[str, Any]:
        """Return the state by canonical parameter names, with the state of the loss scale.

        Args:
            is_loading: Whether the result will be filled from a checkpoint. New state tensors are
                allocated for it; the optimizer's own state does not change until it is loaded.
        """
        self._checkpoint_names = None
        state: dict[Any, Any] = self.optimizer.state
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        if is_loading:
            state, groups = self._state_to_load_into()
        else:
            state = {p: unscaled(self.optimizer, p, entry) for p, entry in state.items()}
        for param, entry in state.items():
            wrap_foreign_state(param, entry)
        state_dict: dict[str, Any] = {
            "state": {
                key if isinstance(key, str) else self._param_name(key): entry
                for key, entry in state.items()
            },
            "param_to_group_meta": self._param_groups_to_param2group_meta(groups),
        }
        if self.grad_scaler is not None:
            state_dict["grad_scaler"] = self.grad_scaler.state_dict()
        return state_dict

    def _state_to_load_into(self) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
        """Return zeros for the state that a step creates, and groups with the options it adds.

        Megatron creates this state by a step with zero gradients, which increments the step count
        and decays weights, even if no checkpoint is found afterwards.
        """
        if isinstance(self.optimizer, ShardedHybridOptimizer):
            return self.optimizer.state_to_fill()
        scaled = scaled_names(self.optimizer)
        state: dict[Any, Any] = {}
        groups = []
        for group in self.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            stepped = options
            # One parameter at a time, to limit the additional memory to one parameter.
            for param in group["params"]:
                zero_param = torch.zeros_like(param, requires_grad=False)
                made, stepped = state_after_a_step(self.optimizer, options, zero_param)
                if made is not None:
                    state[param] = made | unscaled_zeros(param, scaled)
            groups.append({**stepped, "params": group["params"]})
        return state, groups

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `sharded_param_state_fsdp_dtensor` that was filled from a checkpoint."""
        state_dict = dict(state_dict)
        scale = state_dict.pop("grad_scaler", None)
        if scaled_names(self.optimizer):
            groups = self.optimizer.param_groups
            meta = state_dict.pop("param_to_group_meta")
            options = self._param2group_meta_to_param_groups(meta, groups)
            load_scaled(self.optimizer, {**state_dict, "param_groups": options})
        else:
            super().load_state_dict(state_dict)
        if self.grad_scaler is not None and scale:
            self.grad_scaler.load_state_dict(scale)

    @override
    def _param_name(self, param: torch.nn.Parameter) -> str:
        if self._checkpoint_names is None:
            names = canonical_parameter_names(self.model_chunks)
            self._checkpoint_names = {known: name.fqn for known, name in names.items()}
        return self._checkpoint_names[param]

    @override
    def _param2group_meta_to_param_groups(
        self,
        param_to_group_meta: dict[str, Any],
        param_groups: list[dict[str, Any]],
        strict: bool = True,
    ) -> list[dict[str, Any]]:
        """Return the groups of this run with the saved options of their parameters.

        Raises:
            RuntimeError: Parameters of one group were saved in groups with different options.
        """
        del strict
        saved, found = param_to_group_meta, []
        for group in param_groups:
            names = [self._param_name(param) for param in group["params"]]
            run_options = {key: group[key] for key in _RUN_OPTIONS if key in group}
            # Parameters that Megatron creates and does not use are not in a checkpoint.
            metas = {name: saved[name] | run_options for name in names if name in saved}
            first = next(iter(metas), None)
            meta = {k: v for k, v in group.items() if k != "params"}
            meta = meta if first is None else metas[first]
            for name, other in metas.items():
                if other != meta:
                    options = sorted(k for k in meta if other.get(k) != meta[k])
                    raise RuntimeError(
                        f"the checkpoint has different optimizer options ({', '.join(options)}) "
                        f"for {name} and {first}, which are in one parameter group of this run; "
                        "use the flags of the run that saved it, or --no-load-optim"
                    )
            found.append({**meta, "params": names})
        return found

    @override
    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Do nothing: weights loaded without optimizer state are the main weights."""

    @override
    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [local_of(p.grad) for p in self.get_parameters() if p.grad is not None]


class ShardedChain(ChainedOptimizer):
    """A chain of `ShardedOptimizer`s."""

    @override
    def step(self) -> tuple[bool, Any, Any]:
        """Clip and step; see `ChainedOptimizer.step`."""
        owner = self.chained_optimizers[0]
        is_first, owner.has_stepped = not owner.has_stepped, True
        replicas = owner.model_chunks, owner.model_chunks[0].embedding_group
        if is_first:
            check_before_step(*replicas)
            self._begin_audits()
        params = (p for each in self.chained_optimizers for p in each.get_parameters())
        # Megatron clips gradients with the multi-tensor kernels of Transformer Engine.
        hidden = hide_empty_gradients(params)
        try:
            result: tuple[bool, Any, Any] = super().step()
        finally:
            restore_gradients(hidden)
        if is_first:
            note_after_step(*replicas)
        return result

    def _begin_audits(self) -> None:
        """Audit what was built or loaded, and from then on every few steps, as `--fsdp-audit` says.

        Raises:
            RuntimeError: Something differs.
        """
        chunks: list[Any] = self.chained_optimizers[0].model_chunks
        every = chunks[0].options.audit
        used = [each for each in self.chained_optimizers if not each.is_stub_optimizer]
        if every is None or not used:
            return
        optimizers = [each.optimizer for each in used]
        model = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
        if found := audit(model, *optimizers, before_step=True):
            raise RuntimeError(corrupted(found))
        Auditor(model, *optimizers, every=every)

    @override
    def count_zeros(self) -> float:
        """Return the number of zeros in all gradients. Collective."""
        return float(sum(optimizer.count_zeros() for optimizer in self.chained_optimizers))


class ShardedEmergingOptimizer(ShardedOptimizer):
    """A `ShardedOptimizer` of an optimizer that can create its state without a step."""

    @override
    def _state_to_load_into(self) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
        own = self.optimizer.state
        self.optimizer.state = defaultdict(dict)
        try:
            # A step would issue all its collectives.
            self.init_state_fn(self.optimizer, self.config)
            return dict(self.optimizer.state), self.optimizer.param_groups
        finally:
            self.optimizer.state = own


class FSDPMuonChainedOptimizer(ShardedChain):
    """Muon for matrices and another optimizer for all other parameters, stepped together.

    Megatron's loop reduces the gradients before the step (`finish_grad_sync`). A step computes one
    norm of all gradients, clips them, steps each optimizer, and updates the weights of the model
    chunks. Checkpoints contain the state of all optimizers by parameter name, without a record of
    which optimizer stepped which parameter.

    Args:
        chained_optimizers: `ShardedOptimizer`s of the same model chunks and configuration.
    """

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, through the first optimizer: all have the same model chunks."""
        for optimizer in self.chained_optimizers[:1]:
            optimizer.zero_grad(set_to_none)

    @override
    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any] | None = None,
        is_loading: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the state of all optimizers merged into one state dict.

        Args:
            model_sharded_state_dict: Megatron's argument; not used.
            is_loading: Whether the result will be filled from a checkpoint. New state tensors are
                allocated for it.
            **kwargs: `metadata`, which names the format.
        """
        merged: dict[str, Any] = {STATE: {}, META: {}}
        for optimizer in self.chained_optimizers:
            part = optimizer.sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
            for key, value in part.items():
                if key in (STATE, META):
                    merged[key].update(value)
                else:
                    merged.setdefault(key, value)
        return merged

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a filled result of `sharded_state_dict`; each optimizer loads its own entries."""
        common = {key: value for key, value in state_dict.items() if key not in (STATE, META)}
        for optimizer in self.chained_optimizers:
            names = {optimizer._param_name(param) for param in optimizer.get_parameters()}
            own = {
                key: {name: value for name, value in state_dict[key].items() if name in names}
                for key in (STATE, META)
            }
            optimizer.load_state_dict({**common, **own})


def with_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's factory to reject options that do not support sharded parameters.

    Megatron's other optimizers would treat shards as whole tensors.
    """

    def build(config: Any, model_chunks: Any, param_groups: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = [param for group in param_groups for param in group["params"]]
        if not any(isinstance(param, UnevenDTensor) for param in sharded):
            return original(config, model_chunks, param_groups, *args, **kwargs)
        reject(config)
        if not config.use_distributed_optimizer:
            raise ValueError(
                "OptimizerConfig.use_distributed_optimizer = False cannot be used with sharded "
                "parameters: ranks step shards of the main weights; set it to True"
            )
        check_config(config, sharded)
        built = original(factory_config(config), model_chunks, param_groups, *args, **kwargs)
        if built.optimizer is not None:
            check_gradients(built.optimizer, sharded)
            reset_zero_scales_after_steps(built.optimizer)
            if config.optimizer_cpu_offload:
                built.optimizer = offloaded(built.optimizer, config)
            elif _can_be_flat(config, model_chunks):
                # Adam is that of torch, Transformer Engine or apex; all are elementwise.
                step_flat(built.optimizer, elementwise=True)
        built.config = clipping_config(built.config, sharded)
        return built

    return build


def _can_be_flat(config: Any, model_chunks: Iterable[Any]) -> bool:
    """Whether an optimizer can step flat tensors and no option disables it.

    Only Adam is known to be elementwise. With a precision-aware optimizer, state in fp16 and fp8
    has one scale per parameter and cannot be flat.
    """
    options = [getattr(chunk, "options", None) for chunk in model_chunks]
    if any(isinstance(each, Options) and each.steps_each_parameter for each in options):
        return False
    return config.optimizer == "adam" and not config.use_precision_aware_optimizer


def params_counted_on_rank(
    params: Iterable[Any], tp_group: Any = None, expert_tp_group: Any = None
) -> Iterator[Any]:
    """Yield the parameters that this rank adds to a sum over ranks, to count each element once.

    Args:
        params: Sharded parameters.
        tp_group: Tensor-parallel group; Megatron's group if None.
        expert_tp_group: Expert-tensor-parallel group; Megatron's group if both are None.
    """
    if tp_group is None and expert_tp_group is None:
        tp_group = parallel_state.get_tensor_model_parallel_group()
        expert_tp_group = parallel_state.get_expert_tensor_parallel_group()
    for param in params:
        if (
            param.owns_replica
            and param_is_not_shared(param)
            and param_is_not_tensor_parallel_duplicate(param, tp_group, expert_tp_group)
        ):
            yield param


def params_l2_norm(original: Callable[..., float]) -> Callable[..., float]:
    """Replace Megatron's norm of all parameters.

    Megatron sums over the meshes of DTensors only: pipeline stages and expert-parallel ranks would
    each report the norm of their own parameters, and tensor-parallel replicas would count more than
    once.
    """

    def norm(model: Any, *args: Any, **kwargs: Any) -> float:
        chunks = model if isinstance(model, list) else [model]
        params = [param for chunk in chunks for param in chunk.parameters()]
        if not any(isinstance(param, UnevenDTensor) for param in params):
            return original(model, *args, **kwargs)
        total = torch.zeros(1, dtype=torch.float64, device=local_of(params[0]).device)
        for param in params_counted_on_rank(params):
            total += torch.linalg.vector_norm(local_of(param).detach(), dtype=torch.float64) ** 2
        dist.all_reduce(total)
        return math.sqrt(float(total.item()))

    return norm
