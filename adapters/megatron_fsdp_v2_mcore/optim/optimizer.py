"""Megatron's distributed optimizer over sharded parameters, and numbers over all of a model.

Megatron adds up squares of gradients over a process group in which every rank is taken to hold
another part. What is replicated (below ZeRO, between hybrid replicas) would count several times,
and which group is right would depend on the strategy and on what experts do. Here a rank counts
what it holds as the first of its replicas, and one sum goes over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_fsdp_v2.dtensor.optimizer_state import wrap_foreign_state
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from megatron_fsdp_v2.optim import step_flat
from megatron_fsdp_v2_mcore.checkpoint.names import canonical_parameter_names
from megatron_fsdp_v2_mcore.flags.errors import optimizer_field
from megatron_fsdp_v2_mcore.flags.flat_optimizer import flat_optimizer_problem
from megatron_fsdp_v2_mcore.flags.options import Options
from megatron_fsdp_v2_mcore.optim.offload import ShardedHybridOptimizer, build_offloaded
from megatron_fsdp_v2_mcore.optim.precision import (
    check_gradients,
    check_precision,
    clipping_any,
    over_main_weights,
)
from megatron_fsdp_v2_mcore.optim.probes import state_after_a_step
from megatron_fsdp_v2_mcore.optim.scaled_states import (
    load_scaled,
    scaled_names,
    unscaled,
    unscaled_zeros,
    watch_scales,
)

__all__ = ["ShardedChain", "ShardedOptimizer", "params_l2_norm", "with_checks"]

_OF_THIS_RUN = ("is_expert_parallel",)
"""What a group of parameters says of how this run is spread, which no checkpoint changes."""


class ShardedOptimizer(DistributedOptimizer):
    """Steps sharded main weights; counts every element of the model once.

    Megatron makes it under the name of its own class, also of models that are not sharded here;
    those get Megatron's.
    """

    _checkpoint_names: dict[torch.nn.Parameter, str] | None = None
    grad_norms_by_group: dict[str, float]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An optimizer of this class, or Megatron's own."""
        params = (p for chunk in kwargs.get("model_chunks", ()) for p in chunk.parameters())
        if cls is ShardedOptimizer and not any(isinstance(p, UnevenDTensor) for p in params):
            return DistributedOptimizer(*args, **kwargs)
        return super().__new__(cls)

    @override
    def get_grad_stats_parallel_group(self) -> Any:
        """The group whose ranks hold the whole model between them: everyone."""
        if self.ddp_config.num_distributed_optimizer_instances > 1:
            return dist.group.WORLD
        if not parallel_state.model_parallel_is_initialized():
            # Megatron was given groups of the script's own.
            return dist.group.WORLD
        return parallel_state.get_intra_distributed_optimizer_instance_group()

    @override
    def _filter_grads_for_norm(
        self, params: list[Any], param_filter: Callable[[Any], bool] | None = None
    ) -> list[torch.Tensor]:
        kept = [p for p in params if param_filter is None or param_filter(p)]
        groups = getattr(self, "tp_group", None), getattr(self, "expert_tp_group", None)
        return [
            local_of(param.grad) for param in counted_here(kept, *groups) if param.grad is not None
        ]

    @override
    def count_zeros(self) -> float:
        """Zeros in all gradients. Collective."""
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

        Megatron chains its optimizers always, except under `--use-megatron-fsdp`. The step of a
        single one computes the gradient norm only to clip, and ignores `grad_norm_skip_threshold`.

        Returns:
            Whether parameters were updated; the gradient norm; the number of zeros in gradients.
            The last two are None where they were not computed.
        """
        chain = ShardedChain([self])
        result: tuple[bool, Any, Any] = chain.step()
        self.grad_norms_by_group = chain.grad_norms_by_group
        return result

    # -- state dicts ---------------------------------------------------------------------------

    @override
    def sharded_param_state_fsdp_dtensor(self, is_loading: bool = False) -> dict[str, Any]:
        """State under the names of `checkpoint_names`, with that of the loss scale.

        Args:
            is_loading: Whether it is to be filled from a file. State is made for that, apart from
                the optimizer's own, which stays as it is until something is loaded.
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
        """State as this optimizer's steps make it, and its groups with the options steps add.

        Megatron makes a step with gradients of zeros for this. It counts, and decays weights, also
        where no file is found afterwards.
        """
        if isinstance(self.optimizer, ShardedHybridOptimizer):
            return self.optimizer.state_to_fill()
        scaled = scaled_names(self.optimizer)
        state: dict[Any, Any] = {}
        groups = []
        for group in self.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            stepped = options
            # One by one, so that this takes no more memory than one parameter.
            for param in group["params"]:
                mold = torch.zeros_like(param, requires_grad=False)
                made, stepped = state_after_a_step(self.optimizer, options, mold)
                if made is not None:
                    state[param] = made | unscaled_zeros(param, scaled)
            groups.append({**stepped, "params": group["params"]})
        return state, groups

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `sharded_param_state_fsdp_dtensor` made, once it was filled."""
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
        """Groups of this run with the options of those the parameters were saved in.

        Raises:
            RuntimeError: Parameters of one group were saved in groups with other options.
        """
        del strict
        found = []
        for group in param_groups:
            names = [self._param_name(param) for param in group["params"]]
            mine = {key: group[key] for key in _OF_THIS_RUN if key in group}
            # What Megatron made and does not use is in no checkpoint.
            metas = {n: param_to_group_meta[n] | mine for n in names if n in param_to_group_meta}
            first = next(iter(metas), None)
            meta = {k: v for k, v in group.items() if k != "params"}
            meta = meta if first is None else metas[first]
            for name, other in metas.items():
                if other != meta:
                    options = sorted(k for k in meta if other.get(k) != meta[k])
                    raise RuntimeError(
                        f"the checkpoint has other optimizer options ({', '.join(options)}) for "
                        f"{name} than for {first}, and here both are in one group; use the flags "
                        "it was saved with, or --no-load-optim"
                    )
            found.append({**meta, "params": names})
        return found

    @override
    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Weights that were loaded without an optimizer's state are the main weights already."""

    @override
    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [
            local_of(param.grad)
            for group in self.optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]


class ShardedChain(ChainedOptimizer):
    """A chain of `ShardedOptimizer`s."""

    @override
    def count_zeros(self) -> float:
        """Zeros in all gradients. Collective."""
        return float(sum(optimizer.count_zeros() for optimizer in self.chained_optimizers))


_UNFIT: tuple[tuple[str, Any, str], ...] = (
    ("use_distributed_optimizer", True, "ranks step shards of the main weights"),
    (
        "overlap_param_gather_with_optimizer_step",
        False,
        "gathers are issued by the units, during the forward",
    ),
)
"""Fields of `OptimizerConfig`, what they have to be, and why."""


def with_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have Megatron's factory reject options that cannot step sharded parameters.

    A command line is checked before; a script on `megatron.core` alone makes its configuration
    itself, and Megatron's other optimizers would take shards for whole tensors.
    """

    def build(config: Any, model_chunks: Any, param_groups: Any, *args: Any, **kwargs: Any) -> Any:
        params = (param for group in param_groups for param in group["params"])
        if any(isinstance(param, UnevenDTensor) for param in params):
            is_flat = _are_flat(config, model_chunks)
            if config.optimizer_cpu_offload:
                return build_offloaded(build, config, model_chunks, param_groups, *args, **kwargs)
            for name, needed, reason in _UNFIT:
                if bool(getattr(config, name)) is not needed:
                    raise ValueError(
                        f"OptimizerConfig.{name} = {getattr(config, name)} cannot be used with "
                        f"sharded parameters: {reason}; set it to {needed}"
                    )
            if config.optimizer not in ("adam", "lion"):
                raise ValueError(
                    f"OptimizerConfig.optimizer = {config.optimizer!r} cannot step sharded "
                    "parameters: Megatron's distributed optimizer keeps no state of it; use "
                    "'adam', 'muon', 'adaptive_muon' or 'lion'"
                )
            sharded = [param for group in param_groups for param in group["params"]]
            check_precision(config, sharded)
            config = over_main_weights(config)
            built = original(config, model_chunks, param_groups, *args, **kwargs)
            if built.optimizer is not None:
                check_gradients(built.optimizer, sharded)
                watch_scales(built.optimizer)
                if is_flat:
                    # Its Adam is torch's, or Transformer Engine's or apex's of the same arithmetic.
                    step_flat(built.optimizer, elementwise=True)
            built.config = clipping_any(built.config, sharded)
            return built
        return original(config, model_chunks, param_groups, *args, **kwargs)

    return build


def _are_flat(config: Any, model_chunks: Iterable[Any]) -> bool:
    """Whether an optimizer is to step flat tensors, as the wrapper of its parameters was told.

    Raises:
        ValueError: It cannot.
    """
    options = [getattr(chunk, "options", None) for chunk in model_chunks]
    if not any(isinstance(each, Options) and each.steps_flat_tensors for each in options):
        return False
    problem = flat_optimizer_problem(config, optimizer_field)
    if problem:
        raise ValueError(f"Options.steps_flat_tensors {problem}")
    return True


def counted_here(
    params: Iterable[Any], tp_group: Any = None, expert_tp_group: Any = None
) -> Iterator[Any]:
    """Parameters whose elements on this rank count in a sum over all ranks, so that each does once.

    Args:
        params: Sharded parameters.
        tp_group: Tensor-parallel group; Megatron's when None.
        expert_tp_group: That of experts.
    """
    for param in params:
        if (
            param.owns_replica
            and param_is_not_shared(param)
            and param_is_not_tensor_parallel_duplicate(param, tp_group, expert_tp_group)
        ):
            yield param


def params_l2_norm(original: Callable[..., float]) -> Callable[..., float]:
    """Replace Megatron's norm of all parameters.

    Its sum for DTensors goes over their meshes only: pipeline stages and expert-parallel ranks
    would each report a norm of their own part, and tensor-parallel copies would count again.
    """

    def norm(model: Any, *args: Any, **kwargs: Any) -> float:
        chunks = model if isinstance(model, list) else [model]
        params = [param for chunk in chunks for param in chunk.parameters()]
        if not any(isinstance(param, UnevenDTensor) for param in params):
            return original(model, *args, **kwargs)
        expert_tp_group = parallel_state.get_expert_tensor_parallel_group()
        tp_group = parallel_state.get_tensor_model_parallel_group()
        total = torch.zeros(1, dtype=torch.float64, device=local_of(params[0]).device)
        for param in counted_here(params, tp_group, expert_tp_group):
            total += torch.linalg.vector_norm(local_of(param).detach(), dtype=torch.float64) ** 2
        dist.all_reduce(total)
        return math.sqrt(float(total.item()))

    return norm
