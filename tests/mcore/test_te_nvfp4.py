"""NVFP4 over the reference kernels: what its definition says, computed here in fp64.

Where a definition rounds in fp32, the exact number is made in fp64 and rounded once. Tests of
Transformer Engine's Python run on ranks that have it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cpu_rehearsal.te import fp4
from tests.mcore.session import entered_te
from tests.mcore.test_te_kernels import E4M3, TEX, _nearest
from tests.mcore.trained import on_te

# A sign, two bits of exponent with a bias of 1, one of mantissa; without exponent, halves.
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
# Sylvester's construction: an entry is -1 where row and column share an odd number of bits.
HADAMARD = torch.tensor(
    [[(-1) ** (row & col).bit_count() for col in range(16)] for row in range(16)],
    dtype=torch.float64,
)


def _nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest value in fp64, ties to the even mantissa, saturating."""
    size = values.double().abs().clamp(max=6.0)
    distance = (size.unsqueeze(-1) - GRID).abs()
    # Positions in the grid are the numbers themselves: an even one has an even mantissa.
    even_first = [0, 2, 4, 6, 1, 3, 5, 7]
    closest = distance[..., even_first].argmin(-1)
    return GRID[torch.tensor(even_first)[closest]] * values.double().sign()


def test_e2m1_rounds_to_nearest_even_and_saturates() -> None:
    torch.manual_seed(0)
    halfway = (GRID[1:] + GRID[:-1]) / 2
    near = torch.cat([halfway * (1 + 1e-6), halfway * (1 - 1e-6)])
    beyond = torch.tensor([6.5, 7.0, 1e30, torch.inf], dtype=torch.float64)
    values = torch.cat([GRID, halfway, near, torch.rand(3000).double() * 8, beyond]).float()
    values = torch.cat([values, -values])
    read = fp4.from_e2m1(fp4.to_e2m1(values))
    assert torch.equal(read.double(), _nearest_e2m1(values))
    assert fp4.from_e2m1(fp4.to_e2m1(torch.tensor([torch.nan, -torch.nan]))).tolist() == [6.0, 6.0]
    assert int(fp4.to_e2m1(values).max()) == 15


def test_stochastic_rounding_takes_a_neighbor_as_often_as_it_is_near() -> None:
    values = torch.cat([torch.rand(200) * 6.5, GRID.float(), torch.tensor([0.125, 2.75, 5.0])])
    values = torch.cat([values, -values])
    every = torch.arange(256).expand(len(values), 256)
    found = fp4.from_e2m1(fp4.to_e2m1(values[:, None].expand(-1, 256), every)).double()
    for value, rounded in zip(values.double().tolist(), found, strict=True):
        size = min(abs(value), 6.0)
        below = max(float(number) for number in GRID if number <= size)
        above = min((float(number) for number in GRID if number > size), default=below)
        assert set(rounded.abs().tolist()) <= {below, above}
        share = (size - below) / (above - below) if above > below else 0.0
        assert int((rounded.abs() == above).sum()) == (
            int(share * 256) if share else 256 * (above == below)
        )
        assert bool((rounded.sign() * value >= 0).all())


def test_two_numbers_share_a_byte_the_first_its_lower_half() -> None:
    numbers = torch.tensor([[1, 2, 15, 0], [7, 8, 3, 4]], dtype=torch.uint8)
    packed = fp4.pack(numbers)
    assert packed.tolist() == [[1 + 16 * 2, 15], [7 + 16 * 8, 3 + 16 * 4]]
    assert torch.equal(fp4.unpack(packed), numbers)
    assert torch.equal(fp4.unpack(TEX.nvfp4_data_transpose(packed)), numbers.t())


def _defined(
    source: torch.Tensor, rows: int, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements, scales of blocks of `rows` x 16, and amax that a matrix has in NVFP4, in fp64."""
    amax = source.abs().max().double() if amax is None else amax.double()
    to_all = (6 * 448 / amax).float().double()
    blocks = source.double().unfold(0, rows, rows).unfold(1, 16, 16).abs().amax((2, 3))
    sixth = (to_all * torch.tensor(1 / 6).double()).float().double()
    scales = _nearest((blocks * sixth).float(), E4M3)
    decoded = (scales * (1 / to_all).float().double()).float().double()
    factors = (1 / decoded).float().double().clamp(max=torch.finfo(torch.float32).max)
    wide = factors.repeat_interleave(rows, 0).repeat_interleave(16, 1)
    return _nearest_e2m1((source.double() * wide).float()), scales, amax


def _assert_payload(
    tensor: Any, way: str, wanted: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rows: int
) -> None:
    """Compare what is stored of one payload, as the matrix it lies in memory."""
    elements, scales, amax = wanted
    data = getattr(tensor, f"_{way}_data").reshape(elements.shape[0], -1)
    assert torch.equal(fp4.from_e2m1(fp4.unpack(data)).double(), elements), way
    stored = getattr(tensor, f"_{way}_scale_inv").view(E4M3).double()
    expanded = scales.repeat_interleave(rows, 0)
    assert torch.equal(stored[: expanded.shape[0], : expanded.shape[1]], expanded), way
    assert float(stored.sum()) == float(expanded.sum()), "padding is not zero"
    assert stored.shape[0] % 128 == stored.shape[1] % 4 == 0
    assert float(getattr(tensor, f"_amax_{way}")) == float(amax), way


def _samples() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(48, 80) * torch.logspace(-3, 2, 48)[:, None]
    # A block of zeros, and one whose scale E4M3 has no number for.
    x[:16, :16] = 0.0
    x[:16, 16:32] *= 1e-9
    return x.bfloat16()


@on_te(2)
def test_payloads_scales_and_what_is_read_back_are_their_definition() -> None:
    te, x = entered_te(), _samples()
    for rows in (1, 16):
        quantizer = te.NVFP4Quantizer(with_2d_quantization=rows == 16)
        made = quantizer(x)
        for way, source in (("rowwise", x), ("columnwise", x.t())):
            _assert_payload(made, way, _defined(source, rows), rows)
        elements, scales, amax = _defined(x, rows)
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(16, 1)
        exact = elements * wide * amax / (6 * 448)
        torch.testing.assert_close(
            made.dequantize(dtype=torch.float32).double(), exact, rtol=1e-6, atol=0
        )
        # Six times what E2M1 and E4M3 are off by together, of the largest of a block.
        most = x.double().unfold(0, rows, rows).unfold(1, 16, 16).abs().amax((2, 3))
        bound = most.repeat_interleave(rows, 0).repeat_interleave(16, 1) / 4 + amax / 6 / 448 / 448
        assert bool(((exact - x.double()).abs() <= bound).all())
    # Made of the row-wise payload, the column-wise one is what both make together.
    alone = te.NVFP4Quantizer(columnwise=False, with_2d_quantization=True)(x)
    alone.update_usage(rowwise_usage=True, columnwise_usage=True)
    for field in ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"):
        assert torch.equal(getattr(alone, field), getattr(made, field)), field
    with pytest.raises(ValueError, match="blocks of 16"):
        te.NVFP4Quantizer()(torch.randn(24, 32).bfloat16())
    for name in ("row_scaled_nvfp4", "nvfp4_use_4over6"):
        with pytest.raises(NotImplementedError, match=name):
            te.NVFP4Quantizer(**{name: True})(x)


@on_te(2)
def test_a_transformed_payload_is_that_of_tokens_times_a_hadamard_matrix() -> None:
    """Blocks of 16 tokens are multiplied with a Hadamard matrix with signs, rounded to bf16."""
    te, x = entered_te(), _samples()
    quantizer = te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    made = quantizer(x)
    _assert_payload(made, "rowwise", _defined(x, 1), 1)
    from transformer_engine.pytorch.tensor.nvfp4_tensor import get_wgrad_sign_vector

    signs = get_wgrad_sign_vector("cpu").double()
    matrix = signs[:, None] * HADAMARD / 4
    turned = (x.t().double().unflatten(1, (-1, 16)) @ matrix).flatten(1).bfloat16()
    _assert_payload(made, "columnwise", _defined(turned, 1), 1)
    # Orthogonal: what two transforms are multiplied to is what the originals are.
    assert torch.equal(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))
    with pytest.raises(ValueError, match="bf16 alone"):
        quantizer(x.float())


@on_te(2)
def test_stochastic_rounding_has_the_mean_of_what_is_rounded() -> None:
    te, x = entered_te(), _samples()
    quantizer = te.NVFP4Quantizer(columnwise=False, stochastic_rounding=True)
    torch.manual_seed(1)
    made = [quantizer(x).dequantize(dtype=torch.float32).double() for _ in range(400)]
    torch.manual_seed(1)
    assert torch.equal(quantizer(x).dequantize(dtype=torch.float32).double(), made[0])
    _, scales, amax = _defined(x, 1)
    steps = 2 * scales.repeat_interleave(16, 1) * amax / (6 * 448)
    mean = torch.stack(made).mean(0)
    representable = x.double().abs() <= 6 * steps / 2
    error = (mean - x.double()).abs()[representable]
    # Five standard deviations of the mean, and the 256th that probabilities are rounded by.
    assert bool((error <= steps[representable] * (5 * 0.5 / 20 + 1 / 256)).all())


@on_te(2)
def test_products_are_those_of_the_values_that_are_stored() -> None:
    te = entered_te()
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    torch.manual_seed(0)
    weight, x, grad = (torch.randn(*s).bfloat16() for s in ((64, 48), (32, 48), (32, 64)))
    w = te.NVFP4Quantizer(with_2d_quantization=True)(weight)
    transforming = te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    a, d = transforming(x), transforming(grad)

    def values(tensor: Any, way: str) -> torch.Tensor:
        data = getattr(tensor, f"_{way}_data")
        scales = getattr(tensor, f"_{way}_scale_inv").view(E4M3).double()
        elements = fp4.from_e2m1(fp4.unpack(data)).double()
        for row, col in itertools.product(*map(range, elements.shape)):
            elements[row, col] *= scales[row, col // 16]
        return elements * getattr(tensor, f"_amax_{way}").double() / (6 * 448)

    y, *_ = general_gemm(w, a, torch.float32)
    dgrad, *_ = general_gemm(w, d, torch.float32, layout="NN", grad=True)
    wgrad, *_ = general_gemm(a, d, torch.float32, layout="NT", grad=True)
    wanted = [
        values(a, "rowwise") @ values(w, "rowwise").t(),
        values(d, "rowwise") @ values(w, "columnwise").t(),
        values(d, "columnwise") @ values(a, "columnwise").t(),
    ]
    for mine, theirs in zip((y, dgrad, wgrad), wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-4, rtol=1e-5)
    # The transforms cancel: the product is near that of the gradient and the input themselves.
    exact = grad.double().t() @ x.double()
    assert float((wgrad.double() - exact).norm() / exact.norm()) < 0.25
    with pytest.raises(NotImplementedError, match="Hadamard transform of a gradient"):
        general_gemm(a, d, torch.float32, layout="NT", grad=True, bias=torch.zeros(64))


@on_te(2)
def test_parts_that_ranks_cast_are_those_of_the_whole_quantized() -> None:
    """Each rank casts its part; together they are what quantizing the whole gives."""
    te = entered_te()
    from transformer_engine.pytorch.tensor.utils import (
        post_all_gather_processing,
        quantize_master_weights,
    )

    rank, half = dist.get_rank(), 96 * 80 // 2 + 80 * 5
    torch.manual_seed(0)
    whole = torch.randn(96, 80)
    whole[70, 7] = 9.0
    quantizer = te.NVFP4Quantizer(with_2d_quantization=True)
    wanted = quantizer(whole.bfloat16())
    weight = quantizer(torch.zeros(96, 80).bfloat16())
    mine = slice(0, half) if rank == 0 else slice(half, 96 * 80)
    quantize_master_weights(
        [weight], [whole.view(-1)[mine].clone()], [mine.start], dist.group.WORLD
    )
    bytes_ = slice(mine.start // 2, mine.stop // 2)
    assert torch.equal(weight._rowwise_data.view(-1)[bytes_], wanted._rowwise_data.view(-1)[bytes_])
    assert torch.equal(weight._rowwise_scale_inv, wanted._rowwise_scale_inv)
    assert torch.equal(weight._amax_rowwise, wanted._amax_rowwise)
    weight._rowwise_data.copy_(wanted._rowwise_data)
    post_all_gather_processing([weight])
    assert torch.equal(weight._columnwise_data, wanted._columnwise_data)
    assert torch.equal(weight._columnwise_scale_inv, wanted._columnwise_scale_inv)
    assert torch.equal(weight._amax_columnwise, wanted._amax_columnwise)


@on_te(2)
def test_ranks_share_the_amax_of_a_group() -> None:
    te = entered_te()
    x = _samples() * (dist.get_rank() + 1)
    quantizer = te.NVFP4Quantizer()
    quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, dist.group.WORLD
    amax = x.abs().max().float()
    dist.all_reduce(amax, dist.ReduceOp.MAX)
    _assert_payload(quantizer(x), "rowwise", _defined(x, 1, amax), 1)
