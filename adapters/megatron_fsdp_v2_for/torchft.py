"""torchft: replica groups, each sharded with this package, that fail and come back.

The ranks of a replica group shard the model; torchft's `Manager` averages gradients over the
replica groups that take part in a step, and copies the state of a peer to a group that comes back:

    from megatron_fsdp_v2_for import torchft as fault_tolerance

    fault_tolerance.attach(manager, model, optimizer)
    fault_tolerance.check_timeouts(manager, mesh, heartbeat_timeout=..., join_timeout=...)
    while manager.current_step() < num_steps:
        fault_tolerance.start_step(manager, mesh)
        ...  # forwards and backwards, the last one synchronized
        if manager.should_commit():
            optimizer.step()
        optimizer.zero_grad()

An exception in a step ends the process, and its launcher starts the group again, unless the program
catches it and calls `restart`, which goes on in the same processes.

`docs/fault_tolerance.md` has the whole recipe, and `examples/fault_tolerant.py` runs it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp_v2 import FSDPModule
from megatron_fsdp_v2.comm.interface import members_of
from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows, plain_of, rows_like, rows_of
from megatron_fsdp_v2.dtensor.uneven_dtensor import replicated

__all__ = ["attach", "check_timeouts", "restart", "start_step"]

STATE_KEY = "megatron_fsdp_v2"
"""Name under which `attach` registers the state with the manager."""


class _Rows(NamedTuple):
    """This rank's rows of a sharded tensor in an optimizer's state."""

    local: torch.Tensor


class _Replicated(NamedTuple):
    """A tensor in an optimizer's state that is equal on all ranks of a replica group."""

    local: torch.Tensor


def attach(manager: Any, model: nn.Module, *optimizers: Optimizer) -> None:
    """Give a manager the reduced gradients and the state of a sharded model.

    Each synchronized backward averages the gradient of every unit over the participants of the
    step: `param.grad` is the mean over all ranks of all `manager.num_participants()` groups. A
    replica group that comes back gets parameters, buffers and optimizer states from a peer, each
    rank the rows of the same rank there; nothing is gathered. Register other state, such as that of
    a scheduler or the extra state of modules, with `manager.register_state_dict_fn`.

    Call it once, after `fully_shard` and before the first step. Do not replace parameters later.

    Args:
        manager: torchft's `Manager`, created without `load_state_dict` and `state_dict`.
        model: A model of which all trained parameters are sharded, on a mesh of the ranks of this
            replica group.
        optimizers: The optimizers of its parameters.

    Raises:
        ValueError: A trained parameter is not sharded; or a unit has parameters on several meshes.
    """
    for name, param in model.named_parameters():
        if param.requires_grad and not isinstance(param, ShardedRows):
            raise ValueError(
                f"{name} is trained and not sharded, so its gradient would not be averaged over "
                "replica groups; call fully_shard on the model first"
            )

    def average(flat: torch.Tensor) -> None:
        # The manager keeps errors to itself: it reports them in `should_commit`.
        manager.allreduce(flat).wait()

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(average)
    # The manager may read the state during a forward, when modules have gathered parameters.
    params = dict(model.named_parameters())

    def tensors() -> dict[str, torch.Tensor]:
        return {**params, **dict(model.named_buffers())}

    def state() -> dict[str, Any]:
        return {
            "model": {name: rows_of(tensor) for name, tensor in tensors().items()},
            "optimizers": [_packed(optimizer.state_dict()) for optimizer in optimizers],
        }

    def load(given: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in tensors().items():
                rows_of(tensor).copy_(given["model"][name])
        for optimizer, packed in zip(optimizers, given["optimizers"], strict=True):
            optimizer.load_state_dict(_unpacked(packed, optimizer))

    manager.register_state_dict_fn(STATE_KEY, load, state)


def _packed(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of an optimizer without DTensors, whose meshes other groups lack."""

    def pack(value: Any) -> Any:
        if isinstance(value, ShardedRows):
            return _Rows(rows_of(value))
        return _Replicated(plain_of(value)) if isinstance(value, DTensor) else value

    return {
        **state_dict,
        "state": {
            key: {name: pack(value) for name, value in values.items()}
            for key, values in state_dict["state"].items()
        },
    }


def _unpacked(packed: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict that `_packed` packed, sharded like the optimizer's parameters."""
    keys = [key for group in packed["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def unpack(value: Any, param: Any) -> Any:
        if isinstance(value, _Rows):
            return rows_like(value.local.to(param.device), param)
        if isinstance(value, _Replicated):
            return replicated(value.local.to(param.device), param.device_mesh)
        return value

    owners = dict(zip(keys, params, strict=True))
    return {
        **packed,
        "state": {
            key: {name: unpack(value, owners[key]) for name, value in values.items()}
            for key, values in packed["state"].items()
        },
    }


class _Stage(enum.Enum):
    """Stage of a step."""

    COMPARING = "comparing"
    """The ranks of the group compare their steps."""
    QUORUM = "quorum"
    """The groups form a quorum, and a group that comes back gets the state of a peer."""
    BEGUN = "begun"
    """Forwards, backwards, and what follows them."""


@dataclass(slots=True)
class _Progress:
    """Progress of a manager's steps and restarts.

    Attributes:
        stage: Stage of the step under way.
        votes: Result of `_votes_of` when the step began.
        store: The store of the replica group, which outlives its process groups.
        num_restarts: Restarts until now.
        num_in_a_row: Restarts since the last step that was committed.
        restarted_at: The last step of a restart.
    """

    stage: _Stage = _Stage.COMPARING
    votes: tuple[int, int] = (0, 0)
    store: Any = None
    num_restarts: int = 0
    num_in_a_row: int = 0
    restarted_at: int = -1


_PROGRESS: WeakKeyDictionary[Any, _Progress] = WeakKeyDictionary()


def start_step(manager: Any, mesh: DeviceMesh) -> None:
    """Start a step: check that the ranks of this replica group are at one step, and get a quorum.

    Collective over the mesh. The manager compares replica groups by the step of one of their ranks.
    It does not heal a group whose ranks differ if that rank is up to date, and the other ranks
    would go on with old state.

    Args:
        manager: torchft's `Manager`.
        mesh: Mesh of the ranks of this replica group.

    Raises:
        RuntimeError: Some ranks got the state of a peer and others did not. End all ranks of the
            group and start them again, or call `restart`.
    """
    progress = _PROGRESS.setdefault(manager, _Progress())
    progress.stage = _Stage.COMPARING
    first, last = _range_of_steps(manager, mesh)
    if first != last:
        raise RuntimeError(
            f"ranks of this replica group are at steps {first} to {last}, this rank at "
            f"{manager.current_step()}: not all of them received the state of a peer. End all "
            "ranks of the group and start them again"
        )
    progress.stage = _Stage.QUORUM
    manager.start_quorum()
    progress.stage, progress.votes = _Stage.BEGUN, _votes_of(manager)


def _range_of_steps(manager: Any, mesh: DeviceMesh) -> tuple[int, int]:
    """Return the first and the last step at which a rank of the mesh is. Collective."""
    own = manager.current_step()
    steps = torch.tensor([own, -own], device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(steps, dist.ReduceOp.MAX, mesh.get_group(axis))
    return -int(steps[1]), int(steps[0])


def _votes_of(manager: Any) -> tuple[int, int]:
    """Return commits and failed commits in a row; each `should_commit` changes one of them."""
    return manager.current_step(), manager._commit_failures


NO_STATE = -1
"""Step of a replica group that has no state: less than that of any group which has."""


def restart(
    manager: Any,
    mesh: DeviceMesh,
    model: FSDPModule,
    *optimizers: Optimizer,
    error: Exception,
    max_in_a_row: int = 3,
) -> DeviceMesh:
    """Go on after an exception in a step, in the same processes, on new process groups.

    Collective over the ranks of this replica group, all of which get an exception: the first one
    aborts the process groups of the model, so that collectives of the others fail (with gloo,
    after the timeout of the mesh). The step is not committed. If no rank was in the step of an
    optimizer, and all are in the same step, parameters and optimizer states keep their values.
    Otherwise this group gets the state of a peer in its next step.

    All process groups of this process are destroyed, apart from those of the manager. The default
    group and the mesh are made again; make others again, too.

    Args:
        manager: torchft's `Manager`, with `use_async_quorum=False`.
        mesh: Mesh of the ranks of this replica group: all ranks of the default process group.
        model: The model that was given to `attach`.
        optimizers: The optimizers that were given to `attach`.
        error: The exception.
        max_in_a_row: Number of restarts without a committed step between them.

    Returns:
        The new mesh, of the same shape.

    Raises:
        Exception: `error`, if the manager cannot go on after it (no quorum was formed), or there
            were `max_in_a_row` restarts without a committed step between them.
        ValueError: The quorum is asynchronous, the mesh has not all ranks, or `start_step` was not
            called.
        RuntimeError: Other ranks did not get an exception in time, or are lost.
    """
    progress = _PROGRESS.get(manager)
    if progress is None:
        raise ValueError("call start_step before each step; restart continues after it") from error
    if manager._use_async_quorum:
        raise ValueError("restart needs a Manager with use_async_quorum=False") from error
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"restart makes the default process group again, of {dist.get_world_size()} ranks, and "
            f"the mesh has {mesh.size()}"
        ) from error
    step = manager.current_step()
    progress.num_in_a_row = 1 + (step <= progress.restarted_at) * progress.num_in_a_row
    progress.restarted_at = max(step, progress.restarted_at)
    if progress.stage is _Stage.QUORUM or progress.num_in_a_row > max_in_a_row:
        raise error
    has_begun = progress.stage is _Stage.BEGUN
    # After a commit, an optimizer may have updated a part of the parameters.
    keep = not has_begun or step == progress.votes[0]
    votes = has_begun and _votes_of(manager) == progress.votes
    shape, names, device_type = tuple(mesh.shape), mesh.mesh_dim_names, mesh.device_type
    options = _default_group_options()
    patience = 2 * options["timeout"] + manager._timeout
    if progress.store is None:
        # The first rank of the group hosts it, for the manager too.
        progress.store = dist.distributed_c10d._get_default_store()
    model.abort()
    dist.destroy_process_group()
    if votes:
        # Each rank of the group votes once in a step: the other ranks wait for all votes.
        manager.report_error(error)
        manager._pg.abort()
        manager.should_commit(timeout=patience)
    store = PrefixStore(f"restart {progress.num_restarts}", progress.store)
    progress.num_restarts += 1
    _wait_for_all(store, options["world_size"], patience)
    dist.init_process_group(store=store, **options)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    first, last = _range_of_steps(manager, mesh)
    if not model.rebuild(mesh, *optimizers, keep=keep and first == last):
        manager.load_state_dict({**manager.state_dict(), "step": NO_STATE})
    return mesh


def _default_group_options() -> dict[str, Any]:
    """Return the arguments of `init_process_group` that make a default group like this one."""
    world = dist.group.WORLD
    assert world is not None
    timeout = members_of(world)[1]
    assert timeout is not None
    return {
        "backend": str(dist.get_backend_config()),
        "timeout": timeout,
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "device_id": world.bound_device_id,
    }


def _wait_for_all(store: Store, num_ranks: int, timeout: timedelta) -> None:
    """Wait until all ranks of the group have left their collectives."""
    if store.add("arrived", 1) == num_ranks:
        store.set("all", "")
    store.wait(["all"], timeout)


class _Order(NamedTuple):
    """Two timeouts of which the first must be shorter, and what happens otherwise."""

    shorter: str
    longer: str
    otherwise: str


_HEARTBEAT = "heartbeat_timeout of the lighthouse"
_JOIN = "join_timeout of the lighthouse"
_COLLECTIVE = "timeout of the manager's process group"
_MANAGER = "timeout of the Manager"
_QUORUM = "quorum_timeout of the Manager"
_MESH = "timeout of the mesh's process group"
# In this order, so that each timeout is compared with all shorter ones before it is a shorter one.
_ORDERS = (
    _Order(
        _COLLECTIVE,
        _JOIN,
        "a group whose all-reduce hangs until its timeout is left out of the next quorum",
    ),
    _Order(
        _COLLECTIVE,
        _MANAGER,
        "a rank whose all-reduce failed at once gives up in should_commit, before the other ranks "
        "of its group are done with theirs",
    ),
    _Order(
        _MANAGER,
        _MESH,
        "a collective of the group gives up while one of its ranks still waits for other groups",
    ),
    _Order(
        _HEARTBEAT,
        _QUORUM,
        "groups give up before the lighthouse forms a quorum without a lost one",
    ),
    _Order(
        _JOIN,
        _QUORUM,
        "groups give up before the lighthouse forms a quorum without one that hangs",
    ),
    _Order(
        _MESH,
        _QUORUM,
        "if a rank of one of two groups hangs, the other group gives up before that one has ended",
    ),
)


def check_timeouts(
    manager: Any, mesh: DeviceMesh, *, heartbeat_timeout: timedelta, join_timeout: timedelta
) -> None:
    """Check that the timeouts of a run let each failure be handled where it happens.

    The manager's timeouts are read from it, since environment variables
    (`TORCHFT_TIMEOUT_SEC`, `TORCHFT_QUORUM_TIMEOUT_SEC`) replace those of its constructor.

    Args:
        manager: torchft's `Manager`.
        mesh: Mesh of the ranks of this replica group.
        heartbeat_timeout: `heartbeat_timeout_ms` of the lighthouse.
        join_timeout: `join_timeout_ms` of the lighthouse.

    Raises:
        ValueError: Timeouts are in the wrong order. The message lists the pairs, and numbers that
            are in order.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    given = {
        _HEARTBEAT: heartbeat_timeout,
        _JOIN: join_timeout,
        _COLLECTIVE: manager._pg._timeout,
        _MANAGER: manager._timeout,
        _QUORUM: manager._quorum_timeout,
        _MESH: min(timeout for group in groups if (timeout := members_of(group)[1]) is not None),
    }
    wrong = [
        f"the {one.shorter} ({_seconds(given[one.shorter])}) must be shorter than the {one.longer} "
        f"({_seconds(given[one.longer])}): otherwise, {one.otherwise}"
        for one in _ORDERS
        if given[one.shorter] >= given[one.longer]
    ]
    if wrong:
        right = dict(given)
        for one in _ORDERS:
            if right[one.shorter] >= right[one.longer]:
                right[one.longer] = 2 * right[one.shorter]
        changed = [
            f"{name}: {_seconds(value)}" for name, value in right.items() if value != given[name]
        ]
        raise ValueError(
            f"timeouts of this run are in the wrong order. {'. '.join(wrong)}. In order are, with "
            f"the others as they are: {', '.join(changed)}"
        )


def _seconds(timeout: timedelta) -> str:
    return f"{timeout.total_seconds():g} s"
