"""An optimizer that steps sharded parameters on two devices (`--optimizer-cpu-offload`).

Megatron's `HybridDeviceOptimizer` would pin, copy and step DTensors. Here each inner optimizer
steps plain tensors, either this rank's rows or copies of them in host memory: no operation of a
step is dispatched through DTensor. The public parameter groups and state refer to the sharded
parameters and equal those of a run without offload, so that both write the same checkpoints.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, override

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.dtensor.sharded_rows import local_of, plain_attributes, rows_like
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.memory.host_memory import empty_in_host_memory, register_host_memory
from megatron_fsdp_v2_mcore.optim.optimizer_state import optimizer_like, state_after_a_step

STEP = "step"


def choose_offloaded(
    numels: Sequence[int], fraction: float, first: Collection[int] = ()
) -> set[int]:
    """Choose the parameters to offload, with at least a given fraction of all elements.

    The function chooses, in descending size, the parameters that fit into the fraction, and adds
    the smallest parameter that completes it. It then removes parameters that are no longer needed,
    so that the excess over the fraction is smaller than any chosen parameter outside `first`.

    Args:
        numels: Number of elements of each parameter on this rank.
        fraction: Fraction of all elements to offload, from 0 to 1.
        first: Indices of the parameters that any fraction above 0 includes.

    Returns:
        The indices of the chosen parameters, none of which is empty.
    """
    target = fraction * sum(numels)
    chosen = {index for index in first if target and numels[index]}
    num_offloaded = sum(numels[index] for index in chosen)
    for index in sorted(set(range(len(numels))) - chosen, key=lambda i: (-numels[i], i)):
        if numels[index] and num_offloaded + numels[index] <= target:
            chosen.add(index)
            num_offloaded += numels[index]
    remaining = [index for index, numel in enumerate(numels) if numel and index not in chosen]
    if num_offloaded < target and remaining:
        completing = min(remaining, key=lambda i: (numels[i], i))
        num_offloaded += numels[completing]
        for index in sorted(chosen - set(first), key=lambda i: (-numels[i], i)):
            if num_offloaded - numels[index] >= target:
                chosen.remove(index)
                num_offloaded -= numels[index]
        chosen.add(completing)
    return chosen


@dataclass(eq=False, slots=True)
class _Slot:
    """A parameter's rows on this rank, and the tensor that an optimizer steps for them.

    Attributes:
        param: The sharded parameter.
        group: Index of its parameter group.
        rows: The local rows, a plain tensor.
        stepped: The stepped tensor: `rows` itself, or a copy in host memory.
        grad: Host memory for the gradient of the copy; None before the first gradient.
        version: Version of the parameter when the copy was last equal to the rows; None if the copy
            is stale.
        state: The inner optimizer's state from which the public state was built.
    """

    param: torch.Tensor
    group: int
    rows: torch.Tensor
    stepped: torch.Tensor
    grad: torch.Tensor | None = None
    version: tuple[int, int] | None = None
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def is_on_host(self) -> bool:
        """Whether the parameter is stepped on the host."""
        return self.stepped is not self.rows


class _Part(NamedTuple):
    """An inner optimizer and the slots whose plain tensors it steps.

    Attributes:
        optimizer: The inner optimizer.
        slots: The slots that it steps.
        groups: For each of its groups, the index of the public group.
    """

    optimizer: Any
    slots: Sequence[_Slot]
    groups: Sequence[int]


class ShardedHybridOptimizer(torch.optim.Optimizer):
    """Steps rows of sharded parameters, some on their device and some on the host.

    If the parameters are on the CPU, as in a rehearsal, and the template is torch's Adam, the same
    code as without offload steps all parameters, and results are bitwise identical. Transformer
    Engine's `FusedAdam` does not step the host's part, in a rehearsal either: torch's Adam does,
    whose last bits differ. With parameters on a GPU, torch's fused kernel steps the host's part.

    Args:
        template: The Adam that would step all parameters without offload. Its class, options
            and parameter groups are used; the object itself is not used afterwards.
        fraction: Fraction of this rank's elements that are stepped on the host, from 0 to 1.
            Only whole parameters are offloaded: see `choose_offloaded`.
        pin_grads: Whether copies of gradients are in pinned memory.
        pin_params: Whether copies of parameters are in pinned memory.
        overlaps: Whether copies of parameters overlap with steps of other parameters.
        uses_torch_on_device: Whether torch's Adam also steps the parameters on the device.
    """

    _is_built = False

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
        self._on_host = _cpu_equivalent(template, template.param_groups)
        self._on_device = self._on_host if uses_torch_on_device else template
        self._counts_steps_per_group = not isinstance(template, torch.optim.Adam)
        self._pins_grads = pin_grads
        groups = [
            {**copy.deepcopy(_without_params(group)), "params": list(group["params"])}
            for group in template.param_groups
        ]
        super().__init__(groups, {})
        self._is_built = True
        numbered = [(number, p) for number, group in enumerate(groups) for p in group["params"]]
        numels = [local_of(param).numel() for _, param in numbered]
        # Two pipeline stages step these weights, and different kernels would round differently.
        pairs = enumerate(numbered)
        shared = [index for index, (_, p) in pairs if getattr(p, "shared_embedding", False)]
        chosen = choose_offloaded(numels, fraction, shared)
        self._slots: list[_Slot] = []
        for index, (number, param) in enumerate(numbered):
            # Fused optimizers fail on empty tensors.
            if numels[index]:
                rows = stepped = local_of(param).detach()
                if index in chosen:
                    # The first step fills the copy, since it is stale (`version` is None).
                    stepped = empty_in_host_memory(rows.shape, rows.dtype, pin_memory=pin_params)
                self._slots.append(_Slot(param, number, rows, stepped))
        self._is_fused_on_host = any(slot.rows.device.type != "cpu" for slot in self._slots)
        on_host = [slot for slot in self._slots if slot.is_on_host]
        batches = [[slot] for slot in on_host] if overlaps else [on_host]
        self._host_parts = [_part(self._on_host, slots) for slots in batches if slots]
        on_device = [slot for slot in self._slots if not slot.is_on_host]
        self._device_parts = [_part(self._on_device, on_device)] if on_device else []
        self._parts = self._host_parts + self._device_parts
        stream: Any = torch.cuda.Stream
        # One stream for copies to the host, one for copies to the device.
        self._streams = (stream(), stream()) if overlaps else None

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Only the constructor may call this, since it assigns parameters to devices.

        Raises:
            RuntimeError: A group is added after construction.
        """
        if self._is_built:
            raise RuntimeError(
                "an offloaded optimizer takes no further parameter groups; build another one of "
                "all parameters"
            )
        super().add_param_group(param_group)

    def _options(self, number: int, *, on_host: bool) -> dict[str, Any]:
        """Return a group's current options for an inner optimizer on the host or the device."""
        options = _without_params(self.param_groups[number])
        if on_host and self._is_fused_on_host:
            options.update(fused=True, foreach=False, capturable=False)
        return options

    # -- a step -----------------------------------------------------------------------------------

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> Any:
        """Step the parameters on the host and on the device.

        Args:
            closure: Not supported.

        Raises:
            ValueError: A closure was given.
        """
        if closure is not None:
            raise ValueError("an offloaded optimizer takes no closure")
        for slot in self._slots:
            local = local_of(slot.param)
            if slot.rows.data_ptr() != local.data_ptr():
                # After `param.data = other`, the rows are in other memory.
                slot.rows.data, slot.version = local, None
            # A gradient must have the tensor's dtype. The cast runs on the current stream.
            grad = slot.param.grad
            slot.rows.grad = None if grad is None else local_of(grad).to(slot.rows.dtype)
        for part in self._parts:
            for number, group in zip(part.groups, part.optimizer.param_groups, strict=True):
                group.update(self._options(number, on_host=part.slots[0].is_on_host))
        if self._counts_steps_per_group:
            self._align_steps()
        current = torch.cuda.current_stream()
        to_host, to_device = self._streams or (current, current)
        to_host.wait_stream(current)
        copied = []
        with torch.cuda.stream(to_host):
            for part in self._host_parts:
                for slot in part.slots:
                    self._copy_to_host(slot)
                copied.append(to_host.record_event())
        for part in self._device_parts:
            part.optimizer.step()
        for part, event in zip(self._host_parts, copied, strict=True):
            event.synchronize()
            part.optimizer.step()
            to_device.wait_stream(current)
            with torch.cuda.stream(to_device):
                for slot in part.slots:
                    slot.rows.copy_(slot.stepped, non_blocking=True)
        current.wait_stream(to_device)
        for slot in self._slots:
            slot.rows.grad = None
            slot.version = _version(slot.param)
        if self._counts_steps_per_group:
            for number in {slot.group for slot in self._slots}:
                self.param_groups[number][STEP] = self.param_groups[number].get(STEP, 0) + 1
        self._publish()

    def _copy_to_host(self, slot: _Slot) -> None:
        """Copy a gradient, and the rows if they changed outside this optimizer."""
        rows = slot.rows
        if slot.version != _version(slot.param):
            slot.stepped.copy_(rows, non_blocking=True)
        if rows.grad is None:
            # Drop the gradient of an earlier step.
            slot.stepped.grad = None
            return
        if slot.grad is None:
            slot.grad = empty_in_host_memory(rows.shape, rows.dtype, pin_memory=self._pins_grads)
        slot.grad.copy_(rows.grad, non_blocking=True)
        slot.stepped.grad = slot.grad

    def _align_steps(self) -> None:
        """Set the per-parameter step counts of torch's Adam to the counts of the groups."""
        for part in self._parts:
            if not isinstance(part.optimizer, torch.optim.Adam):
                continue
            state: dict[Any, Any] = part.optimizer.state
            for slot in part.slots:
                count = self.param_groups[slot.group].get(STEP, 0)
                if slot.param.grad is None or not count:
                    continue
                if not state.get(slot.stepped):
                    zero_param = torch.zeros_like(slot.stepped)
                    state[slot.stepped] = self._zero_state(slot, zero_param)
                state[slot.stepped][STEP].fill_(count)

    def _publish(self) -> None:
        """Publish the inner optimizers' state as the state of the sharded parameters."""
        for part in self._parts:
            for slot in part.slots:
                values = part.optimizer.state.get(slot.stepped, {})
                known = slot.state
                if known.keys() == values.keys() and all(known[k] is values[k] for k in known):
                    continue
                slot.state = dict(values)
                self.state[slot.param] = self._public_state(slot.param, values)
                if slot.is_on_host:
                    _keep_on_host(values)

    def _public_state(self, param: torch.Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter's state as an optimizer without offload would have it."""
        return {
            name: value if name == STEP else _as_rows(value, param)
            for name, value in values.items()
            if name != STEP or not self._counts_steps_per_group
        }

    # -- state dicts ------------------------------------------------------------------------------

    def state_to_fill(self) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
        """Return zeros for the state that a step creates, and groups with the options it adds."""
        state: dict[Any, Any] = {}
        for slot in self._slots:
            made = self._zero_state(slot, torch.zeros_like(slot.stepped))
            state[slot.param] = self._public_state(slot.param, made)
        added = {STEP: 0} if self._counts_steps_per_group else {}
        return state, [{**added, **group} for group in self.param_groups]

    def _zero_state(self, slot: _Slot, zero_param: torch.Tensor) -> dict[str, Any]:
        on_host = slot.is_on_host
        source = self._on_host if on_host else self._on_device
        made, _ = state_after_a_step(source, self._options(slot.group, on_host=on_host), zero_param)
        if on_host:
            _keep_on_host(made or {})
        return made or {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and options that were saved with any fraction, or without offload.

        Values are copied directly to the device where they are used. torch would first copy all of
        them to the parameters' device.

        Args:
            state_dict: A result of `state_dict()`, with arbitrary keys of parameters.

        Raises:
            RuntimeError: An entry of a parameter's state is missing.
        """
        super().load_state_dict({**state_dict, "state": {}})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        saved = {p: state_dict["state"].get(key) for key, p in zip(keys, params, strict=True)}
        self.state = defaultdict(dict)
        for part in self._parts:
            part.optimizer.state = defaultdict(dict)
            for slot in part.slots:
                slot.state = {}
                # The weights may have been loaded too: mark the host's copy stale.
                slot.version = None
                values = saved.get(slot.param)
                if values:
                    part.optimizer.state[slot.stepped] = self._to_step_device(slot, values)
        self._publish()

    def _to_step_device(self, slot: _Slot, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter's saved state on the device where the parameter is stepped."""
        options = self.param_groups[slot.group]
        needed = self._zero_state(slot, torch.zeros_like(slot.stepped.flatten()[:1]))
        found = dict(saved)
        if self._counts_steps_per_group and STEP in needed and STEP in options:
            found[STEP] = torch.tensor(float(options[STEP]))
        missing = sorted(needed.keys() - found.keys())
        if missing:
            name = _shards(slot.param).label or "a parameter"
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
                # Parameters may share a loaded step count, which each of their steps increments.
                placed[name] = value.detach().as_subclass(torch.Tensor).to(like, copy=True)
            else:
                placed[name] = _rows_of(value, slot.param).to(like.device)
        return placed


def _part(template: Any, slots: Sequence[_Slot]) -> _Part:
    numbers = sorted({slot.group for slot in slots})
    groups = [{"params": [s.stepped for s in slots if s.group == number]} for number in numbers]
    return _Part(optimizer_like(template, groups), slots, numbers)


def _keep_on_host(values: Mapping[str, Any]) -> None:
    for value in values.values():
        if isinstance(value, torch.Tensor):
            register_host_memory(value)


def offloaded(optimizer: torch.optim.Optimizer, config: Any) -> ShardedHybridOptimizer:
    """Offload an optimizer with the options of an `OptimizerConfig`."""
    return ShardedHybridOptimizer(
        optimizer,
        fraction=config.optimizer_offload_fraction,
        pin_grads=config.pin_cpu_grads,
        pin_params=config.pin_cpu_params,
        overlaps=config.overlap_cpu_optimizer_d2h_h2d,
        uses_torch_on_device=config.use_torch_optimizer_for_cpu_offload,
    )


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _cpu_equivalent(template: Any, groups: Sequence[dict[str, Any]]) -> Any:
    """Return a torch optimizer that computes the same step on the CPU."""
    if isinstance(template, torch.optim.Adam):
        return template
    cls = torch.optim.AdamW if template.adam_w_mode else torch.optim.Adam
    # The options of the groups are set before every step; the other options have no effect.
    return cls([torch.zeros(1)], **{k: groups[0][k] for k in ("betas", "eps") if k in groups[0]})


def _version(param: torch.Tensor) -> tuple[int, int]:
    with plain_attributes():
        return param._version, local_of(param)._version


def _as_rows(value: Any, param: torch.Tensor) -> Any:
    """Return state with the shape of a parameter's local rows as a sharded tensor."""
    if type(value) is not torch.Tensor or value.shape != local_of(param).shape:
        return value
    return rows_like(value, cast("UnevenDTensor", param))


def _rows_of(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a value, which may be sharded differently from the parameter."""
    if isinstance(value, UnevenDTensor) and value.row_shards == _shards(param):
        return local_of(value)
    if isinstance(value, DTensor) or value.shape != local_of(param).shape:
        rows = torch.zeros_like(local_of(param), dtype=value.dtype)
        rows_like(rows, cast("UnevenDTensor", param)).copy_(value)
        return rows
    return value.detach().as_subclass(torch.Tensor)


def _shards(param: torch.Tensor) -> Any:
    return cast("UnevenDTensor", param).row_shards
