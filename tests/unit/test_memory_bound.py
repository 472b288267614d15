"""The bound of a step's memory, by hand: integers alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes, MixedPrecisionPolicy
from megatron_fsdp_v2.layout.placement import resolve_placements
from megatron_fsdp_v2.plan.memory_bound import peak_bytes
from megatron_fsdp_v2.plan.unit_bytes import GroupBytes, UnitBytes
from megatron_fsdp_v2.runtime.options import RuntimeOptions

FP32 = MixedPrecisionPolicy().resolve(torch.float32)
MIXED = GroupDtypes(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
NUMEL = 96


def group(
    strategy: str = "optim_grads_params",
    sizes: tuple[int, ...] = (4,),
    dtypes: GroupDtypes = FP32,
    outer: str = "no_shard",
    **options: Any,
) -> GroupBytes:
    placements = resolve_placements(strategy, outer, sizes)
    options = {"is_trained": True, "on_cpu": False, **options}
    return GroupBytes.of(NUMEL, sizes, placements, dtypes, **options)


@pytest.mark.parametrize(
    ("strategy", "dtypes", "expected"),
    [
        ("no_shard", FP32, (384, 0, 384, 0, 384, 0)),
        ("optim", FP32, (96, 384, 96, 0, 384, 0)),
        ("optim_grads", FP32, (96, 384, 96, 0, 384, 0)),
        ("optim_grads_params", FP32, (96, 0, 96, 384, 384, 0)),
        # bf16 to compute and to communicate; buffers that collect are in fp32.
        ("no_shard", MIXED, (384, 192, 384, 0, 384, 192)),
        ("optim", MIXED, (96, 192, 96, 0, 384, 192)),
        ("optim_grads", MIXED, (96, 192, 96, 0, 192, 0)),
        # Cast into the buffer that is gathered.
        ("optim_grads_params", MIXED, (96, 0, 96, 192, 192, 0)),
    ],
)
def test_bytes_of_a_group_by_strategy(
    strategy: str, dtypes: GroupDtypes, expected: tuple[int, ...]
) -> None:
    found = dataclasses.astuple(group(strategy, dtypes=dtypes))
    assert found[:6] == expected
    assert not any(found[6:10])


def test_only_a_cpu_receives_into_a_buffer_and_only_what_others_send() -> None:
    assert group(on_cpu=True).received == 384 * 3 // 4
    assert group(on_cpu=True, dtypes=MIXED).received == 192 * 3 // 4
    assert group("no_shard", on_cpu=True).received == 0
    assert group(sizes=(1,), on_cpu=True).received == 0
    assert group().received == 0


def test_an_outer_axis_adds_the_shard_that_waits_for_it() -> None:
    hsdp = group(sizes=(2, 4), dtypes=MIXED, on_cpu=True)
    assert (hsdp.main_weight, hsdp.main_grad) == (96, 96)
    assert (hsdp.partial_grad, hsdp.outer_comm, hsdp.outer_received) == (96, 48, 0)
    hfsdp = group(sizes=(2, 4), dtypes=MIXED, outer="optim", on_cpu=True)
    assert (hfsdp.main_weight, hfsdp.model_weight, hfsdp.main_grad) == (48, 48, 48)
    assert (hfsdp.partial_grad, hfsdp.outer_comm, hfsdp.outer_received) == (96, 48, 24)
    assert group("no_shard", sizes=(2, 4)).partial_grad == 384


def test_a_frozen_group_has_weights_only_and_an_unreduced_one_no_communication() -> None:
    frozen = group(is_trained=False)
    assert dataclasses.astuple(frozen) == (96, 0, 0, 384, *(0 for _ in range(9)), False, 0)
    own = group("optim", sizes=(2, 4), dtypes=MIXED, on_cpu=True, reduces=False)
    assert own.grad_buffer == 384
    assert own.grad_comm == own.partial_grad == own.received == 0


def model(*, num_blocks: int = 5, root: GroupBytes | None = None, **options: Any) -> list[Any]:
    """A root and equal units."""
    block = UnitBytes((group(**options),), parent=0)
    return [UnitBytes(() if root is None else (root,)), *[block] * num_blocks]


def test_a_step_holds_two_gathered_units_and_two_gradient_buffers() -> None:
    peak = peak_bytes(model(), optimizer_state=1000, activations=50)
    # Before the last unit: there is a next one to be gathered, and two gradients are to come.
    assert (peak.main_weight, peak.main_grad, peak.model_weight) == (5 * 96, 3 * 96, 0)
    assert (peak.gathered, peak.grad_buffer, peak.communication) == (2 * 384, 2 * 384, 0)
    assert peak.total == 8 * 96 + 1000 + 4 * 384 + 50
    assert peak.resting == 5 * 96 + 1000
    assert peak.temporary == 4 * 384


def test_main_gradients_of_earlier_backwards_are_there_from_the_start() -> None:
    zero_3 = model()
    assert peak_bytes(zero_3, has_gradients=True).main_grad == 5 * 96
    # Where micro-batches leave none: full buffers, or shards before the outer axis, have them.
    assert peak_bytes(zero_3, accumulates=True, has_gradients=None).main_grad == 5 * 96
    for waiting in (model(strategy="optim"), model(sizes=(2, 4))):
        waits = peak_bytes(waiting, accumulates=True, has_gradients=None)
        assert waits == peak_bytes(waiting, accumulates=True)
        assert waits.main_grad < 5 * 96


def test_all_gradients_are_there_when_the_optimizer_steps() -> None:
    heavy = [dataclasses.replace(group(), main_grad=10_000)]
    peak = peak_bytes([UnitBytes(()), *[UnitBytes(tuple(heavy), parent=0)] * 5])
    # The last unit's weights are dropped before it is reduced, and one more buffer is under way.
    assert (peak.main_grad, peak.gathered, peak.grad_buffer) == (50_000, 0, 2 * 384)
    alone = [dataclasses.replace(group(), gathered=1, grad_buffer=1, main_grad=10_000)]
    peak = peak_bytes([UnitBytes(()), UnitBytes(tuple(alone), parent=0)], optimizer_state=7)
    assert peak.total == 96 + 10_000 + 7 + 1


def test_a_forward_may_gather_more_at_a_time_than_any_moment_of_the_backward() -> None:
    small = dataclasses.replace(group(), gathered=10, grad_buffer=0, main_grad=0)
    large = dataclasses.replace(small, gathered=1000)
    # The large units: the last one inside of the first layer, and the second layer.
    units = [UnitBytes(()), UnitBytes((small,), parent=0), UnitBytes((large,), parent=1)]
    peak = peak_bytes([*units, UnitBytes((large,), parent=0)])
    assert peak.gathered == 2010


def test_knobs_change_the_number_of_units() -> None:
    deep = peak_bytes(model(), RuntimeOptions(unshard_prefetch_depth=3, max_live_grad_buffers=1))
    assert (deep.gathered, deep.grad_buffer) == (4 * 384, 384)
    none = peak_bytes(
        model(), RuntimeOptions(enable_unshard_prefetch=False, enable_async_reduce_grad=False)
    )
    assert (none.gathered, none.grad_buffer) == (384, 384)
    # No more than there are.
    all_of_them = peak_bytes(
        model(), RuntimeOptions(unshard_prefetch_depth=9, max_live_grad_buffers=9)
    )
    assert all_of_them.grad_buffer + all_of_them.gathered == (5 + 1) * 384


def test_bytes_gathered_ahead_limit_the_bound_and_one_unit_is_always_ahead() -> None:
    for nbytes, num_ahead in ((1, 1), (384, 1), (767, 1), (768, 2), (4 * 384, 3), (10**9, 3)):
        peak = peak_bytes(model(), RuntimeOptions(unshard_prefetch_bytes=nbytes))
        assert peak.gathered == (1 + num_ahead) * 384, nbytes
    both = peak_bytes(
        model(), RuntimeOptions(unshard_prefetch_bytes=10**9, unshard_prefetch_depth=2)
    )
    assert both.gathered == 3 * 384
    beside = peak_bytes(model(), RuntimeOptions(unshard_prefetch_bytes=1), num_held_beside=1)
    assert beside.gathered == 3 * 384


def test_a_root_with_parameters_adds_its_own_to_those_of_two_units() -> None:
    root = dataclasses.replace(group(), gathered=1000, grad_buffer=2000)
    peak = peak_bytes(model(root=root))
    assert (peak.gathered, peak.grad_buffer) == (1000 + 2 * 384, 2000 + 2 * 384)


def test_a_copy_for_the_wire_takes_the_place_of_its_buffer() -> None:
    peak = peak_bytes(model(strategy="optim", dtypes=MIXED))
    # One full buffer, its own copy, and that of the unit before.
    assert (peak.grad_buffer, peak.communication) == (384, 2 * 192)


def test_gradients_of_earlier_microbatches_stay_where_they_are_not_sharded_in_between() -> None:
    first = peak_bytes(model(strategy="optim"), accumulates=True)
    assert first.grad_buffer == 5 * 384
    second = peak_bytes(model(strategy="optim_grads"), accumulates=True)
    assert second.grad_buffer == 2 * 384
    hsdp = peak_bytes(model(sizes=(2, 4)), accumulates=True)
    assert hsdp.grad_buffer == 2 * 384 + 5 * 96


def test_an_outer_reduction_holds_twice_as_many_shards_as_there_are_buffers() -> None:
    peak = peak_bytes(model(num_blocks=9, sizes=(2, 4)))
    assert peak.grad_buffer == 2 * 384 + 4 * 96


def test_units_inside_a_unit_come_on_top_of_it() -> None:
    layer = UnitBytes((group(),), parent=0)
    units = [UnitBytes(())]
    for _ in range(3):
        units += [layer, UnitBytes((group(),), parent=len(units))]
    peak = peak_bytes(units)
    # The layer, the unit inside it, and the next layer; the layer's buffer, and two of units.
    assert (peak.gathered, peak.grad_buffer) == (3 * 384, 3 * 384)


def test_units_that_stay_gathered_are_all_gathered_at_the_end_of_the_forward() -> None:
    kept = [dataclasses.replace(unit, keeps_gathered=True) for unit in model()]
    # With the first gradient buffer, or with one gathered unit less and two buffers.
    assert peak_bytes(kept).temporary == 6 * 384
    assert peak_bytes(kept, RuntimeOptions(max_live_grad_buffers=1)).gathered == 5 * 384


def test_frozen_units_have_no_buffers_and_those_before_them_two() -> None:
    units = model()
    units[1:4] = [UnitBytes((group(is_trained=False),), parent=0)] * 3
    peak = peak_bytes(units)
    assert (peak.gathered, peak.grad_buffer) == (2 * 384, 2 * 384)


def test_a_list_that_is_no_tree_is_rejected() -> None:
    with pytest.raises(ValueError, match="units is empty"):
        peak_bytes([])
    with pytest.raises(ValueError, match="unit 1 has parent None"):
        peak_bytes([UnitBytes(()), UnitBytes(())])
    with pytest.raises(ValueError, match="unit 1 has parent 2"):
        peak_bytes([UnitBytes(()), UnitBytes((), parent=2), UnitBytes((), parent=0)])


def test_what_one_other_rank_sends_arrives_in_a_main_gradient_that_is_not_added_to() -> None:
    def communication(*, has_gradients: bool, **options: Any) -> int:
        units = [UnitBytes((group("optim_grads", on_cpu=True, **options),))]
        return peak_bytes(units, has_gradients=has_gradients, activations=0).communication

    assert communication(sizes=(2,), has_gradients=False) == 0
    assert communication(sizes=(2,), has_gradients=True) == 4 * NUMEL // 2
    # Of two others it does not fit.
    assert communication(sizes=(3,), has_gradients=False) == 4 * NUMEL * 2 // 3
    # A chunk of the sum, which is all of it here, in the dtype of the main gradient.
    assert communication(sizes=(2,), dtypes=MIXED, has_gradients=False) == 4 * NUMEL // 2
    assert communication(sizes=(2,), dtypes=MIXED, has_gradients=True) == 2 * NUMEL // 2
    # The main gradient is the outer reduction's.
    hfsdp = group(sizes=(2, 2), outer="optim", on_cpu=True)
    assert (hfsdp.received, hfsdp.outer_received, hfsdp.lent) == (192, 96, 96)
    hsdp = group(sizes=(2, 2), on_cpu=True)
    assert (hsdp.received, hsdp.outer_received, hsdp.lent) == (192, 0, 0)
    # Nor is the inner one received beside the shard that waits for the outer one.
    for is_waiting, received in ((False, 0), (True, 192)):
        assert hsdp.in_backward(is_set=False, is_waiting=is_waiting).received == received
        assert hfsdp.in_backward(is_set=True, is_waiting=is_waiting).received == received
    offloaded = group(sizes=(2,), on_cpu=True, offloaded=True)
    assert (offloaded.received, offloaded.lent) == (4 * NUMEL // 2 + 4 * NUMEL // 2, 0)
