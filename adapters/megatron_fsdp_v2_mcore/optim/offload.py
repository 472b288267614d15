"""Megatron's optimizer of two devices over sharded parameters (`--optimizer-cpu-offload`).

Megatron's `HybridDeviceOptimizer` steps some parameters on their device and copies of the others
on the host, and moves gradients and stepped values between them, on streams of its own. Given
sharded parameters it would pin, copy and step DTensors. Here everything below it has this rank's
rows as plain tensors: nothing of a step goes through DTensor. What it tells others (parameter
groups, state) is in terms of the sharded parameters, and is what a run without offload has of them,
so that checkpoints of both are the same.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, override

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.dtensor.sharded_rows import rows_like
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of, plain_attributes
from megatron_fsdp_v2.memory.host_memory import empty_in_host_memory, keep_in_host_memory
from megatron_fsdp_v2_mcore.flags.errors import optimizer_field
from megatron_fsdp_v2_mcore.flags.offload import NO_TWIN, offload_problem
from megatron_fsdp_v2_mcore.optim.probes import optimizer_like, state_after_a_step

__all__ = ["ShardedHybridOptimizer", "build_offloaded", "check_offload", "choose_offloaded"]

STEP = "step"


def choose_offloaded(numels: Sequence[int], fraction: float) -> set[int]:
    """Which parameters are offloaded, so that at least a fraction of all elements is.

    The largest ones first that still fit, then the smallest one that makes up for what is missing,
    without those that are not needed any more: less than any one of them is offloaded beyond the
    fraction.

    Args:
        numels: Elements of each on this rank.
        fraction: Of all elements, from 0 to 1.

    Returns:
        Their positions; none without elements.
    """
    wanted = fraction * sum(numels)
    chosen: set[int] = set()
    num_offloaded = 0
    for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        if numels[index] and num_offloaded + numels[index] <= wanted:
            chosen.add(index)
            num_offloaded += numels[index]
    left = [index for index, numel in enumerate(numels) if numel and index not in chosen]
    if num_offloaded < wanted and left:
        makes_up = min(left, key=lambda i: (numels[i], i))
        num_offloaded += numels[makes_up]
        for index in sorted(chosen, key=lambda i: (-numels[i], i)):
            if num_offloaded - numels[index] >= wanted:
                chosen.remove(index)
                num_offloaded -= numels[index]
        chosen.add(makes_up)
    return chosen


class ShardedHybridOptimizer(HybridDeviceOptimizer):
    """Steps rows of sharded parameters, some on their device and some on the host.

    Where the parameters are on the CPU themselves, as in a rehearsal, both parts are stepped by
    the same code as without offload, and results are the same bit for bit. Otherwise the host's
    part is stepped by torch's fused kernel.

    Args:
        template: What would step all parameters without offload. Class, options and parameter
            groups are taken from it; it is not used any more.
        fraction: Of this rank's elements, how many are stepped on the host, from 0 to 1. Whole
            parameters are: see `choose_offloaded`.
        pin_grads: Whether copies of gradients are in pinned memory.
        pin_params: Whether copies of parameters are.
        overlaps: Whether parameters are copied while others are stepped.
        uses_torch_on_device: Whether the device's part is stepped by the class of the host's part.

    Raises:
        ValueError: The fraction is not one, or the template has no twin on the CPU.
    """

    skips_empty_shards = True

    def __init__(
        self,
        template: torch.optim.Optimizer,
        *,
        fraction: float,
        pin_grads: bool = True,
        pin_params: bool = True,
        overlaps: bool = False,
        uses_torch_on_device: bool = False,
    ) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(
                f"optimizer_offload_fraction is from 0 to 1, got {fraction}; 1 offloads everything"
            )
        self._on_host = _twin_on_cpu(template, template.param_groups)
        self._on_device = self._on_host if uses_torch_on_device else template
        self._counts_in_groups = not isinstance(template, torch.optim.Adam)
        self._options = [_without_params(group) for group in template.param_groups]
        self._rows: dict[torch.Tensor, torch.Tensor] = {}
        self._versions: dict[torch.Tensor, tuple[int, int]] = {}
        self._known: dict[torch.Tensor, dict[str, Any]] = {}
        self._is_built = False
        super().__init__(
            [{**group, "params": list(group["params"])} for group in template.param_groups],
            offload_fraction=fraction,
            cpu_optimizer_cls=self._host_part,
            gpu_optimizer_cls=self._device_part,
            # Main weights have the dtype that they are stepped in.
            param_update_in_fp32=False,
            pin_cpu_grads=pin_grads,
            pin_cpu_params=pin_params,
            overlap_cpu_optimizer_d2h_h2d=overlaps,
        )
        self._is_built = True

    # -- what is stepped where --------------------------------------------------------------------

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters are given once, since where each is stepped is decided for all together.

        Raises:
            RuntimeError: Another group is added.
        """
        if self._is_built:
            raise RuntimeError(
                "an offloaded optimizer takes no further parameter groups; build another one of "
                "all parameters"
            )
        super().add_param_group(param_group)

    def _host_part(self, groups: list[dict[str, Any]]) -> Any:
        return optimizer_like(self._on_host, groups)

    def _device_part(self, groups: list[dict[str, Any]]) -> Any:
        return optimizer_like(self._on_device, groups)

    @property
    def is_fused_on_host(self) -> bool:
        """Whether the host's part is stepped by torch's fused kernel."""
        return any(rows.device.type != "cpu" for rows in self._rows.values())

    @override
    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        for group, options in zip(self.param_groups, self._options, strict=True):
            # Megatron's class puts its own arguments into every group, which a checkpoint keeps.
            params = group["params"]
            group.clear()
            group.update(copy.deepcopy(options), params=params)
        params = [param for group in self.param_groups for param in group["params"]]
        numels = [local_of(param).numel() for param in params]
        chosen = {params[i] for i in choose_offloaded(numels, offload_fraction)}
        self._rows = {p: local_of(p).detach() for p in params if local_of(p).numel()}
        self._versions = {}
        copies: dict[torch.Tensor, torch.Tensor] = {}
        host_groups, device_groups = [], []
        for group in self.param_groups:
            on_host, on_device = [], []
            for param in group["params"]:
                rows = self._rows.get(param)
                if rows is None:
                    # Fused optimizers fail on empty tensors.
                    continue
                if param in chosen:
                    # Filled in the first step, like all that is older than what it is a copy of.
                    copies[param] = empty_in_host_memory(
                        rows.shape, rows.dtype, pin_memory=self.pin_cpu_params
                    )
                    on_host.append(copies[param])
                else:
                    on_device.append(rows)
            if on_host:
                host_groups.append({**self._on_host_options(group), "params": on_host})
            if on_device:
                device_groups.append({**_without_params(group), "params": on_device})
        rows_of_copies = {copied: self._rows[param] for param, copied in copies.items()}
        instead = {param: rows for param, rows in self._rows.items() if param not in copies}
        return host_groups, device_groups, copies, rows_of_copies, instead

    def _on_host_options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        options = _without_params(group)
        if self.is_fused_on_host:
            options.update(fused=True, foreach=False, capturable=False)
        return options

    @override
    def _sync_hdo_param_groups_to_sub_optimizers(self) -> None:
        super()._sync_hdo_param_groups_to_sub_optimizers()
        for optimizer in self.cpu_optimizers:
            for group in optimizer.param_groups:
                group.update(self._on_host_options(group))

    # -- a step -----------------------------------------------------------------------------------

    @override
    def step(self, closure: Any = None) -> None:
        """Step both parts; see `torch.optim.Optimizer.step`."""
        # What the device's part reads is made on the stream that it steps on. Megatron's class has
        # its stream of copies wait for that, and calls `_set_sub_optimizer_grads` on it.
        for param, rows in self._rows.items():
            # A tensor takes no gradient of another dtype.
            rows.grad = None if param.grad is None else local_of(param.grad).to(rows.dtype)
        if self._counts_in_groups:
            self._align_steps()
        super().step(closure)

    @override
    def _set_sub_optimizer_grads(self) -> None:
        """Copy gradients to the host, and what was written to the parameters stepped there."""
        for param, copied in self.gpu_params_map_cpu_copy.items():
            rows = self._rows[param]
            if self._versions.get(param) != _version(param):
                copied.copy_(rows, non_blocking=True)
            if rows.grad is None:
                # What is left from another step is none of this one.
                copied.grad = None
                continue
            if copied not in self.cpu_copy_map_grad:
                self.cpu_copy_map_grad[copied] = empty_in_host_memory(
                    rows.shape, rows.dtype, pin_memory=self.pin_cpu_grads
                )
            copied.grad = self.cpu_copy_map_grad[copied]
        super()._set_sub_optimizer_grads()

    @override
    def update_fp32_param_by_new_param(self) -> None:
        """Take in parameters that were changed by others, with the next step."""
        self._versions.clear()

    def _align_steps(self) -> None:
        """Have torch's Adam, which counts steps of every parameter, go on from those of groups."""
        owners = self._group_of()
        for optimizer in self.sub_optimizers:
            if not isinstance(optimizer, torch.optim.Adam):
                continue
            for inner in (p for group in optimizer.param_groups for p in group["params"]):
                param = self.inner_param_to_orig_param[inner]
                count = owners[param].get(STEP, 0)
                if param.grad is None or not count:
                    continue
                if not optimizer.state.get(inner):
                    options = _without_params(owners[param])
                    made = self._state_of_zeros(param, options, torch.zeros_like(inner))
                    optimizer.state[inner] = made
                optimizer.state[inner][STEP].fill_(count)

    @override
    def _sync_sub_optimizers_state_to_hdo(self) -> None:
        """Have what a step made known as state of the sharded parameters."""
        for rows in self._rows.values():
            rows.grad = None
        if self._counts_in_groups:
            for group in self.param_groups:
                if any(param in self._rows for param in group["params"]):
                    group[STEP] = group.get(STEP, 0) + 1
        for param in self.gpu_params_map_cpu_copy:
            self._versions[param] = _version(param)
        self._tell_state()

    def _tell_state(self) -> None:
        for optimizer in self.sub_optimizers:
            for inner, values in optimizer.state.items():
                self._describe(self.inner_param_to_orig_param[inner], values)

    def _describe(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        known = self._known.get(param, {})
        if known.keys() == values.keys() and all(known[k] is v for k, v in values.items()):
            return
        self._known[param] = dict(values)
        self.state[param] = self._told(param, values)
        if param in self.gpu_params_map_cpu_copy:
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    keep_in_host_memory(value)

    def _told(self, param: torch.Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's state as it would be without offload."""
        return {
            name: value if name == STEP else _as_rows(value, param)
            for name, value in values.items()
            if name != STEP or not self._counts_in_groups
        }

    def _group_of(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {param: group for group in self.param_groups for param in group["params"]}

    # -- state dicts ------------------------------------------------------------------------------

    def state_to_fill(self) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
        """State as steps make it, where it belongs, and groups with the options steps add."""
        state: dict[Any, Any] = {}
        groups = []
        for group in self.param_groups:
            options = _without_params(group)
            for param in filter(self._rows.__contains__, group["params"]):
                mold = torch.zeros_like(self.param_to_inner_param[param])
                state[param] = self._told(param, self._state_of_zeros(param, options, mold))
            if self._counts_in_groups:
                options.setdefault(STEP, 0)
            groups.append({**options, "params": group["params"]})
        return state, groups

    def _state_of_zeros(
        self, param: torch.Tensor, options: dict[str, Any], mold: torch.Tensor
    ) -> dict[str, Any]:
        on_host = param in self.gpu_params_map_cpu_copy
        source = self._on_host if on_host else self._on_device
        options = self._on_host_options(options) if on_host else options
        made, _ = state_after_a_step(source, options, mold)
        for value in (made or {}).values():
            if on_host and isinstance(value, torch.Tensor):
                keep_in_host_memory(value)
        return made or {}

    @override
    def _register_load_state_dict_hooks(self) -> None:
        """Megatron's hooks would replace parameters by copies while state is loaded."""

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and options, saved with any fraction or without offload.

        Values go where they are used at once: torch would put all of them on the device first.

        Args:
            state_dict: As `state_dict()` makes it; keys of parameters may be any.

        Raises:
            RuntimeError: A parameter's state lacks something.
        """
        options = {key: value for key, value in state_dict.items() if key != "state"}
        super(HybridDeviceOptimizer, self).load_state_dict({**options, "state": {}})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        saved = {
            param: state_dict["state"][key]
            for key, param in zip(keys, params, strict=True)
            if key in state_dict["state"]
        }
        self.state: dict[Any, Any] = defaultdict(dict)
        self._known = {}
        owners = self._group_of()
        for optimizer in self.sub_optimizers:
            optimizer.state = defaultdict(dict)
            for inner in (p for group in optimizer.param_groups for p in group["params"]):
                param = self.inner_param_to_orig_param[inner]
                if saved.get(param):
                    optimizer.state[inner] = self._placed(
                        param, inner, saved[param], _without_params(owners[param])
                    )
        self._tell_state()
        # Weights may have been loaded as well.
        self._versions.clear()

    def _placed(
        self,
        param: torch.Tensor,
        inner: torch.Tensor,
        saved: Mapping[str, Any],
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """A parameter's state where it is stepped."""
        needed = self._state_of_zeros(param, options, torch.zeros_like(inner.flatten()[:1]))
        found = dict(saved)
        if self._counts_in_groups and STEP in needed and STEP in options:
            found[STEP] = torch.tensor(float(options[STEP]))
        missing = sorted(needed.keys() - found.keys())
        if missing:
            name = _shards(param).holders.name_of(param) or "a parameter"
            raise RuntimeError(
                f"the loaded state of {name} has no {', '.join(missing)}; load a state "
                f"dict of the same optimizer, which has {', '.join(sorted(needed))}"
            )
        placed: dict[str, Any] = {}
        for name, like in needed.items():
            value = found[name]
            if not isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor):
                placed[name] = value
            elif like.ndim == 0:
                # Parameters may have been given one tensor, to which each would add its steps.
                placed[name] = value.detach().as_subclass(torch.Tensor).to(like, copy=True)
            else:
                placed[name] = _rows_of(value, param).to(like.device)
        return placed


def build_offloaded(
    build: Callable[..., Any],
    config: Any,
    model_chunks: Any,
    param_groups: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    """Build Megatron's optimizer of sharded parameters, and offload it.

    Args:
        build: Megatron's factory, which makes it without offload.
        config: Megatron's `OptimizerConfig`, which asks for offload.
        model_chunks: Of the factory.
        param_groups: Likewise.
        *args: Likewise.
        **kw: Likewise.

    Raises:
        ValueError: The optimizer cannot be offloaded as the configuration says.
    """
    check_offload(config)
    plain = copy.copy(config)
    plain.optimizer_cpu_offload = False
    # With offload Megatron asks for that flag because its own class reads gradients elsewhere then.
    plain.use_precision_aware_optimizer = False
    plain.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    built = build(plain, model_chunks, param_groups, *args, **kw)
    if built.optimizer is not None:
        built.optimizer = ShardedHybridOptimizer(
            built.optimizer,
            fraction=config.optimizer_offload_fraction,
            pin_grads=config.pin_cpu_grads,
            pin_params=config.pin_cpu_params,
            overlaps=config.overlap_cpu_optimizer_d2h_h2d,
            uses_torch_on_device=config.use_torch_optimizer_for_cpu_offload,
        )
    return built


def check_offload(config: Any) -> None:
    """Check that an `OptimizerConfig` that asks for offload can have it.

    Raises:
        ValueError: It cannot; names the field.
    """
    problem = offload_problem(config, optimizer_field, "optimizer_cpu_offload")
    if problem:
        raise ValueError(problem)


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _twin_on_cpu(template: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """An optimizer of torch that computes the same on the CPU.

    Raises:
        ValueError: There is none.
    """
    if isinstance(template, torch.optim.Adam):
        return template
    is_decoupled = getattr(template, "adam_w_mode", None)
    if is_decoupled is None:
        raise ValueError(
            f"optimizer_cpu_offload cannot be used with {type(template).__name__}: {NO_TWIN}; use "
            "Adam, or leave it out"
        )
    cls = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    # Beyond what groups say, which is put in their place, none of its options matters.
    return cls([torch.zeros(1)], **{k: groups[0][k] for k in ("betas", "eps") if k in groups[0]})


def _version(param: torch.Tensor) -> tuple[int, int]:
    with plain_attributes():
        return param._version, local_of(param)._version


def _as_rows(value: Any, param: torch.Tensor) -> Any:
    """What an optimizer keeps of a parameter's rows, as rows of the parameter."""
    if type(value) is not torch.Tensor or value.shape != local_of(param).shape:
        return value
    return rows_like(value, cast("UnevenDTensor", param))


def _rows_of(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a value that is distributed like a parameter, or in any other way."""
    if isinstance(value, UnevenDTensor) and value.row_shards == _shards(param):
        return local_of(value)
    if isinstance(value, DTensor) or value.shape != local_of(param).shape:
        rows = torch.zeros_like(local_of(param), dtype=value.dtype)
        rows_like(rows, cast("UnevenDTensor", param)).copy_(value)
        return rows
    return value.detach().as_subclass(torch.Tensor)


def _shards(param: torch.Tensor) -> Any:
    return cast("UnevenDTensor", param).row_shards
