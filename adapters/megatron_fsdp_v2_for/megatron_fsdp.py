"""NVIDIA's `megatron-fsdp` (Megatron-FSDP v1): its names and arguments, with this package.

    from megatron_fsdp_v2_for.megatron_fsdp import fully_shard_model, fully_shard_optimizer

A program that imports these names from `megatron_fsdp` runs with this import instead.
docs/hugging_face.md lists the arguments and the differences.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, override

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import megatron_fsdp_v2
from megatron_fsdp_v2 import FSDPModule, ShardPlacementResult, UnitOptions
from megatron_fsdp_v2.dtensor.optimizer_kinds import finds_no_empty_gradients
from megatron_fsdp_v2.dtensor.optimizer_state import has_no_rows
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.runtime.construct import outermost
from megatron_fsdp_v2.runtime.machine import events
from megatron_fsdp_v2.runtime.module import make_idle, unit_of
from megatron_fsdp_v2_mcore.formats import register_formats
from megatron_fsdp_v2_mcore.model.fp8_weights import limit_weight_caches
from megatron_fsdp_v2_mcore.optim.optimizer_state import optimizer_like

__all__ = [
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]

NO_OP = (
    "average_in_collective",
    "disable_bucketing",
    "disable_symmetric_registration",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "maxpool_double_buffer",
)
"""Further arguments of `fully_shard_model`, which change nothing here."""

REJECTED = {
    "cuda_graph_mode": "docs/gpu.md describes the capture of a step",
    "enable_fine_grained_param_gather": "give classes of smaller modules as fsdp_unit_modules",
    "expt_fsdp_group_ag": "experts are gathered in the group of expt_device_mesh",
    "nccl_ub": "give fsdp_double_buffer=True, and pass the module of the result to "
    "megatron_fsdp_v2.runtime.registered_pool.register_pool",
    "use_decoupled_grad": "optimizers read param.grad",
}
"""Further arguments of `fully_shard_model`, which must be false, with their alternatives."""

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of main weights and gradients.

    Attributes:
        main_params_dtype: Dtype of the weights that the optimizer steps. None: that of the model.
        main_grads_dtype: Default of `grad_comm_dtype`. Gradients are accumulated in the dtype of
            the main weights, which must hold it. None: the dtype of the model, or the widest one.
        grad_comm_dtype: Communication dtype of gradients.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None


class MegatronFSDP(nn.Module):
    """A sharded model, made by `fully_shard_model`.

    Args:
        module: The model, whose root is sharded by this package.
        sync_model_each_microbatch: See `fully_shard_model`.
    """

    def __init__(self, module: nn.Module, *, sync_model_each_microbatch: bool = False) -> None:
        super().__init__()
        unit_of(module)
        self.module = module
        self.set_model_auto_sync(sync_model_each_microbatch)
        self._replace_param_with_distributed_if_needed()

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @property
    def is_last_microbatch(self) -> bool:
        """Whether backwards synchronize gradients even if `model_auto_sync` is False."""
        return getattr(self, "_is_last_microbatch", False)

    @is_last_microbatch.setter
    def is_last_microbatch(self, is_last: bool) -> None:
        self._is_last_microbatch = is_last
        cast("FSDPModule", self.module).set_requires_gradient_sync(is_last or self.model_auto_sync)

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Set whether every backward synchronizes gradients."""
        self.model_auto_sync = sync_model
        self.is_last_microbatch = self.is_last_microbatch

    @contextlib.contextmanager
    def sync(self) -> Iterator[None]:
        """Synchronize gradients in every backward inside the context, and not after it."""
        self.set_model_auto_sync(True)
        try:
            yield
        finally:
            self.set_model_auto_sync(False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer synchronization to a backward after the context, if `model_auto_sync` is False."""
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = True

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce pending gradients into `param.grad`, and register sharded parameters. Collective.

        Args:
            force_all_reduce: No effect, as in `megatron_fsdp`.
        """
        cast("FSDPModule", self.module).reduce_grad()
        self._replace_param_with_distributed_if_needed()

    def zero_grad_buffer(self) -> None:
        """Set every gradient to None, and drop gradients that are not reduced yet."""
        self.module.zero_grad()

    def install_optimized_model_weights(self) -> None:
        """Make the next forward use the stepped weights, after a step that torch does not know."""
        events.weights_changed(unit_of(self.module).state.root)

    def _replace_param_with_distributed_if_needed(self) -> None:
        make_idle(self.module)
        for param in self.module.parameters():
            # Weak: a cycle would keep the memory of a deleted model.
            param._megatron_fsdp_model = weakref.ref(self)  # type: ignore[attr-defined]


def fully_shard_model(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    *,
    hybrid_fsdp_group: dist.ProcessGroup | None = None,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: dist.ProcessGroup | None = None,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    zero_dp_strategy: str | int = 3,
    outer_dp_sharding_strategy: str | int = 0,
    device: torch.device | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    report_nan_in_param_grad: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    fsdp_double_buffer: bool = False,
    **others: Any,
) -> MegatronFSDP:
    """Shard a model: the outermost modules of some classes, then the rest as one unit.

    Args:
        module: The model.
        device_mesh: Mesh with the named axes. None: one axis over all ranks.
        dp_shard_dim: Axis to shard along; "fsdp" by default if there is no `device_mesh`.
        dp_outer_dim: Outer axis (HSDP, HFSDP).
        tp_dim: Axis over which parameters are DTensors already.
        hybrid_fsdp_group: All data-parallel ranks; compared with the mesh.
        hybrid_fsdp_expt_group: The same for experts.
        expt_device_mesh: Mesh of experts: parameters with `.experts.` in their names, or with the
            attribute `allreduce` False. Their gradients are divided like the others.
        fsdp_group_ag: Group of the ranks of `dp_shard_dim` for gathers.
        fsdp_unit_modules: Classes, or their import paths.
        zero_dp_strategy: Name of the strategy, or 0 to 3.
        outer_dp_sharding_strategy: The same along the outer axis, or 0 or 1.
        device: Device that the model is moved to.
        init_model_with_meta_device: Whether the model may be on the meta device.
        mixed_precision_policy: Dtypes.
        overlap_grad_reduce: Reduce gradients of a unit while the next one computes.
        overlap_param_gather: Gather the next unit while one computes.
        sync_model_each_microbatch: Synchronize gradients in every backward. Otherwise in those of
            `is_last_microbatch`, in `finish_grad_sync`, or in the optimizer's step.
        preproc_state_dict_for_dcp_ckpt: See `fully_shard_optimizer`.
        report_nan_in_param_grad: Raise a ValueError at the end of a backward on the ranks whose
            rows of a gradient are not finite.
        calculate_per_token_loss: Sum gradients over ranks instead of averaging them.
        keep_fp8_transpose_cache: Keep Transformer Engine's copies of gathered weights.
        fsdp_double_buffer: Place temporary buffers at planned addresses in one block of memory.
        others: Arguments that `NO_OP` and `REJECTED` list.

    Raises:
        TypeError: An argument does not exist.
        ValueError: An argument is invalid or rejected.
    """
    for name, value in others.items():
        if name not in (*NO_OP, *REJECTED):
            raise TypeError(f"fully_shard_model has no argument {name!r}")
        if value and name in REJECTED:
            raise ValueError(f"{name} is not supported by megatron_fsdp_v2: {REJECTED[name]}")
    is_meta = any(param.is_meta for param in module.parameters())
    if is_meta and not init_model_with_meta_device:
        raise ValueError("the model is on the meta device: set init_model_with_meta_device=True")
    strategy = _strategy("zero_dp_strategy", zero_dp_strategy, _STRATEGIES)
    outer = _strategy("outer_dp_sharding_strategy", outer_dp_sharding_strategy, _STRATEGIES[:2])
    if device_mesh is None and dp_outer_dim is not None:
        raise ValueError(f"dp_outer_dim={dp_outer_dim!r} needs a device_mesh with this axis")
    if device_mesh is not None and dp_shard_dim is None:
        raise ValueError("device_mesh needs dp_shard_dim, the name of its axis to shard along")
    if device_mesh is None and dp_shard_dim is None:
        dp_shard_dim = "fsdp"  # The default name of this axis, also in expt_device_mesh.
    axes = [dp_outer_dim, dp_shard_dim]
    named = [name for name in (*axes, tp_dim) if name is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"the arguments *_dim must name different axes, got {named}")
    _part("device_mesh", device_mesh, [tp_dim])
    mesh = _part("device_mesh", device_mesh, axes, hybrid_fsdp_group)
    expert_mesh = _part("expt_device_mesh", expt_device_mesh, axes, hybrid_fsdp_expt_group)
    units = _units(module, fsdp_unit_modules or ())
    if device is not None and not is_meta:
        module.to(device)
    num_ranks = dist.get_world_size() if mesh is None else mesh.size()
    has_formats = "transformer_engine" in sys.modules and register_formats()
    options: dict[str, Any] = {
        "mesh": mesh,
        "sharding_strategy": strategy,
        "outer_dp_sharding_strategy": outer,
        "mp_policy": _policy(mixed_precision_policy, module),
        "gradient_scaling_factor": 1.0 if calculate_per_token_loss else 1.0 / num_ranks,
        "on_missing_grad": "zero",
        "enable_unshard_prefetch": overlap_param_gather,
        "enable_async_reduce_grad": overlap_grad_reduce,
        "enable_trace_pool": fsdp_double_buffer,
        "shard_placement_fn": _placement_fn(module, expert_mesh),
        "options": UnitOptions(param_init_fn=_reset, gather_group=fsdp_group_ag),
    }
    for unit in dict.fromkeys([*units, module]):
        megatron_fsdp_v2.fully_shard(unit, **options)
    if has_formats:
        keeps = keep_fp8_transpose_cache
        limit_weight_caches(module, keeps_weights=keeps, keeps_transposes=keeps)
    for name, param in module.named_parameters() if report_nan_in_param_grad else ():
        if param.requires_grad:
            check: Any = functools.partial(_check_finite, name)
            param.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]
    return MegatronFSDP(module, sync_model_each_microbatch=sync_model_each_microbatch)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Make an optimizer synchronize gradients before its steps, in place.

    `step` gets the arguments `sync_grad_before_optimizer_step` and
    `install_optimized_model_weights`, and `zero_grad` gets `zero_grad_buffer`, True by default. The
    next forward uses the stepped weights in any case.

    Args:
        optimizer: Built from the parameters of a `MegatronFSDP`.
        preproc_state_dict_for_dcp_ckpt: Whether `state_dict()` before the first step contains the
            state that a step creates, into which a checkpoint can be read.

    Raises:
        ValueError: No parameter belongs to a `MegatronFSDP`, or `optimizer.step` was replaced.
    """
    params = (param for group in optimizer.param_groups for param in group["params"])
    owners = (getattr(param, "_megatron_fsdp_model", None) for param in params)
    owner: Any = next((owner for owner in owners if owner is not None), None)
    # automodel sets the model itself.
    model = owner() if isinstance(owner, weakref.ref) else owner
    if model is None:
        raise ValueError(
            "the optimizer has no parameter of a MegatronFSDP model; build it from "
            "fully_shard_model(...).parameters()"
        )
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise ValueError("optimizer.step was replaced; call fully_shard_optimizer before that")
    if hasattr(optimizer, "_megatron_fsdp_model"):
        return optimizer
    # The function of a schedule of learning rates only notes that steps ran.
    vars(optimizer).pop("step", None)
    optimizer._megatron_fsdp_model = model  # type: ignore[attr-defined]
    kind: Any = type(optimizer)
    optimizer.__class__ = _synchronizing(kind)
    # Some optimizers create their state when they are built.
    if preproc_state_dict_for_dcp_ckpt and not optimizer.state:
        optimizer.register_state_dict_post_hook(_with_initial_state)
        optimizer.register_load_state_dict_post_hook(_drop_initial_state)
    return optimizer


@functools.cache
def _synchronizing(kind: Any) -> type[torch.optim.Optimizer]:
    """Return a subclass of an optimizer's class. Methods set on the instance would be a cycle."""

    @functools.wraps(kind.step)
    def step(
        self: Any,
        *closure: Any,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
        **kwargs: Any,
    ) -> Any:
        model = self._megatron_fsdp_model
        if sync_grad_before_optimizer_step and not model.model_auto_sync:
            if closure or kwargs.get("closure"):
                with model.sync():
                    return kind.step(self, *closure, **kwargs)
            model.finish_grad_sync()
        return kind.step(self, *closure, **kwargs)

    @functools.wraps(kind.zero_grad)
    def zero_grad(self: Any, *args: Any, zero_grad_buffer: bool = True, **kwargs: Any) -> None:
        kind.zero_grad(self, *args, **kwargs)
        if zero_grad_buffer:
            self._megatron_fsdp_model.zero_grad_buffer()

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, "step": step, "zero_grad": zero_grad})


def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model and its optimizer, which keeps its parameter groups.

    Args:
        module: The model.
        optimizer: Steps parameters of the model and has no state yet.
        args: Further arguments of `fully_shard_model`.
        kwargs: The same by name.

    Raises:
        ValueError: The optimizer has state or other parameters; or see `fully_shard_model`.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    held = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    if optimizer.state or not all(map(all, held)):
        raise ValueError(
            "the optimizer has state already, or parameters that the model does not have; build it "
            "from fully_shard_model(...).parameters(), and call fully_shard_optimizer"
        )
    model = fully_shard_model(module, *args, **kwargs)
    params = dict(module.named_parameters())
    for group, group_names in zip(optimizer.param_groups, held, strict=True):
        # The list stays the same object, since L-BFGS holds a reference to the list.
        group["params"][:] = [params[name] for name in group_names]
    return model, fully_shard_optimizer(
        optimizer, kwargs.get("preproc_state_dict_for_dcp_ckpt", True)
    )


# Libraries look for arguments by name.
_FIRST, *_FURTHER = inspect.signature(fully_shard_model).parameters.values()
_SECOND = _FIRST.replace(name="optimizer")
fully_shard.__signature__ = inspect.Signature([_FIRST, _SECOND, *_FURTHER])  # type: ignore[attr-defined]


def _strategy(argument: str, given: str | int, names: Sequence[str]) -> str:
    known = dict(enumerate(names)) | {name: name for name in names}
    if given not in known:
        raise ValueError(f"{argument} must be one of {list(known)}, got {given!r}")
    return known[given]


def _part(
    argument: str,
    mesh: DeviceMesh | None,
    axes: Sequence[str | None],
    group: dist.ProcessGroup | None = None,
) -> DeviceMesh | None:
    """Return the named axes of a mesh; None if there are none."""
    names = tuple(name for name in axes if name is not None)
    if mesh is None and group is not None:
        raise ValueError(f"the hybrid group of {argument} is given without {argument}")
    if mesh is None or not names:
        return None
    try:
        found = mesh[names]
    except (KeyError, RuntimeError) as error:
        raise ValueError(
            f"{argument} has no axes {names} of the arguments *_dim: {mesh}"
        ) from error
    ranks = sorted(found.mesh.flatten().tolist())
    if group is not None and sorted(dist.get_process_group_ranks(group)) != ranks:
        raise ValueError(f"the hybrid group of {argument} must have the ranks of {names}: {ranks}")
    return found


def _units(module: nn.Module, classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Return the outermost modules of some classes."""
    kinds = tuple(pkgutil.resolve_name(c) if isinstance(c, str) else c for c in classes)
    found = [part for part in module.modules() if isinstance(part, kinds)]
    if kinds and not found:
        raise ValueError(f"{type(module).__name__} has no module of fsdp_unit_modules={classes}")
    return outermost(found) if found else []


def _policy(
    given: MixedPrecisionPolicy, module: nn.Module
) -> megatron_fsdp_v2.MixedPrecisionPolicy:
    """Convert a policy. Torch's optimizers require gradients of the dtype of main weights."""
    main, grads, dtypes = given.main_params_dtype, given.main_grads_dtype, set[torch.dtype]()
    for name, param in module.named_parameters():
        held = main or param.dtype
        if param.requires_grad:
            dtypes.add(param.dtype)
            if grads is not None and torch.promote_types(held, grads) != held:
                raise ValueError(
                    f"main_grads_dtype={grads} needs main weights of this dtype, and those of "
                    f"{name} are {held}; set main_params_dtype={grads} in mixed_precision_policy"
                )
    widest = functools.reduce(torch.promote_types, dtypes) if main and dtypes else None
    return megatron_fsdp_v2.MixedPrecisionPolicy(
        main_params_dtype=main,
        grad_comm_dtype=given.grad_comm_dtype or grads or widest,
        cast_forward_inputs=False,
    )


def _placement_fn(
    module: nn.Module, expert_mesh: DeviceMesh | None
) -> Callable[[nn.Parameter], Any] | None:
    named = dict(module.named_parameters())
    marked = {name for name, param in named.items() if not getattr(param, "allreduce", True)}
    if marked and expert_mesh is None:
        raise ValueError(f"{min(marked)} has allreduce=False; give its mesh as expt_device_mesh")
    experts = {id(p) for name, p in named.items() if name in marked or ".experts." in f".{name}"}
    if expert_mesh is None:
        return None
    if not experts:
        raise ValueError(
            f"expt_device_mesh is given, and {type(module).__name__} has no experts: parameters "
            "with .experts. in their names, or with the attribute allreduce=False"
        )
    return lambda param: ShardPlacementResult(None, expert_mesh) if id(param) in experts else None


def _reset(module: Any) -> None:
    """Initialize a module that was on the meta device."""
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if reset is not None:
        reset()


def _check_finite(name: str, param: torch.Tensor) -> None:
    if param.grad is not None and not plain_of(param.grad).isfinite().all():
        raise ValueError(
            f"report_nan_in_param_grad: rank {dist.get_rank()} has NaN or Inf in its rows of the "
            f"gradient of {name}"
        )


def _with_initial_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> Any:
    """Add the state that a step creates, with the step count 0, if there is none."""
    if optimizer.state:
        return state_dict
    state: dict[Any, Any] = {}
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        options = {name: value for name, value in group.items() if name != "params"}
        for param, key in zip(group["params"], packed["params"], strict=True):
            if not param.requires_grad:
                continue
            zeros = torch.zeros_like(param, requires_grad=False)
            probe = optimizer_like(optimizer, [{**copy.deepcopy(options), "params": [zeros]}])
            # Without rows of a parameter, such an optimizer has no state of it either.
            if not (finds_no_empty_gradients(type(optimizer)) and has_no_rows(param)):
                zeros.grad = torch.zeros_like(zeros)
                probe.step(sync_grad_before_optimizer_step=False)
            if made := probe.state.get(zeros):
                state[key] = made | {"step": torch.zeros(())} if "step" in made else made
    return {**state_dict, "state": state}


def _drop_initial_state(optimizer: torch.optim.Optimizer) -> None:
    """Drop the state of a checkpoint from before the first step."""
    if not any(map(_has_stepped, optimizer.state.values())):
        optimizer.state.clear()


def _has_stepped(state: dict[str, Any]) -> bool:
    if "step" in state:
        return float(state["step"]) > 0
    return any(isinstance(v, torch.Tensor) and bool(plain_of(v).any()) for v in state.values())
