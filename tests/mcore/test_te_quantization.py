"""Transformer Engine's quantizers and products over the reference kernels.

Expected values are computed in fp64 from each format's definition. Where a definition rounds in
fp32, the exact number is computed in fp64 and rounded once. Tests that import Transformer Engine
run on ranks that have it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cpu_rehearsal.te import fp4, numbers
from tests.mcore.session import enter_te
from tests.mcore.test_te_kernels import E4M3, TEX, VALUES, hadamard, nearest
from tests.mcore.trained import on_te

_GRID = VALUES["E2M1"]


def _largest(values: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Return the amax of every block of `rows` x `cols` elements, in fp64."""
    return values.double().unfold(0, rows, rows).unfold(1, cols, cols).abs().amax((2, 3))


def _spread(scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Repeat the scale of each block for all of its elements."""
    return scales.repeat_interleave(rows, 0).repeat_interleave(cols, 1)


def _bytes_of(exact: torch.Tensor) -> torch.Tensor:
    """Return the bytes of values that E4M3 represents exactly."""
    return exact.float().to(E4M3).view(torch.uint8)


@on_te(2)
def test_scale_of_a_tensor_is_delayed_or_current_and_common_to_ranks() -> None:
    te = enter_te()
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = (torch.randn(6, 8) * (rank + 1)).bfloat16()
    history = torch.zeros(1)
    delayed = te.Float8Quantizer(torch.tensor([20.0]), history, te.DType.kFloat8E4M3)
    made = delayed(x)
    exact = nearest(x.double() * 20.0, E4M3)
    assert torch.equal(made._data, _bytes_of(exact))
    assert torch.equal(made._transpose, _bytes_of(exact).t())
    assert torch.equal(made.dequantize().double(), (exact * (1 / 20.0)).float().bfloat16().double())
    assert history.item() == x.abs().max().item()
    # A smaller amax does not lower the recorded amax.
    delayed(x / 2)
    assert history.item() == x.abs().max().item()

    for power in (False, True):
        current = te.Float8CurrentScalingQuantizer(
            te.DType.kFloat8E4M3, "cpu", force_pow_2_scales=power
        )
        current.with_amax_reduction, current.amax_reduction_group = True, dist.group.WORLD
        made = current(x)
        amax = x.float().abs().max()
        dist.all_reduce(amax, dist.ReduceOp.MAX)
        scale = (448.0 / amax.double()).float()
        if power:
            scale = 2.0 ** scale.log2().floor()
        assert torch.equal(made._data, _bytes_of(nearest(x.float() * scale, E4M3)))
        assert made._scale_inv.item() == (1 / scale).item()
    # Quantization writes in place: a payload that is a view of a flat buffer stays one.
    address = made._data.data_ptr()
    current.with_amax_reduction = False
    made.quantize_(x * 3)
    assert made._data.data_ptr() == address
    scale = 2.0 ** (448.0 / (x * 3).float().abs().max()).log2().floor()
    assert torch.equal(made._data, _bytes_of(nearest((x * 3).float() * scale, E4M3)))


@on_te(2)
def test_scale_of_a_block_is_a_power_of_two_from_its_amax() -> None:
    te = enter_te()
    x = torch.randn(256, 384) * torch.rand(256, 1) * 10
    for dim in (1, 2):
        made = te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim
        )(x)
        for way in ("rowwise", "columnwise"):
            rows, cols = (128, 128) if dim == 2 else (1, 128) if way == "rowwise" else (128, 1)
            scale = 2.0 ** (448.0 / _largest(x, rows, cols)).log2().floor()
            data = _bytes_of(nearest(x.double() * _spread(scale, rows, cols), E4M3))
            stored = getattr(made, f"_{way}_data")
            assert torch.equal(stored, data.t() if way == "columnwise" else data), (dim, way)
            inverse = (1 / scale).float()
            if (dim, way) in ((1, "rowwise"), (2, "columnwise")):
                inverse = inverse.t()
            kept = getattr(made, f"_{way}_scale_inv")[: inverse.shape[0], : inverse.shape[1]]
            assert torch.equal(kept, inverse), (dim, way)
        assert (made.dequantize() - x).abs().max() <= x.abs().max() / 16


@on_te(2)
def test_mxfp8_has_an_exponent_for_32_elements_in_both_directions() -> None:
    te = enter_te()
    x = (torch.randn(64, 96) * torch.rand(64, 1) * 10).bfloat16()
    made = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x)
    for way, (rows, cols) in (("rowwise", (1, 32)), ("columnwise", (32, 1))):
        exponent = (_largest(x, rows, cols) / 448.0).log2().ceil()
        wide = _spread(2.0**exponent, rows, cols)
        data = nearest(x.double() / wide, E4M3)
        assert torch.equal(getattr(made, f"_{way}_data"), _bytes_of(data)), way
        stored = getattr(made, f"_{way}_scale_inv")
        kept = stored[: exponent.shape[0], : exponent.shape[1]].double() - 127
        assert torch.equal(kept, exponent), way
        assert int(stored.sum()) == int((exponent + 127).sum()), "padding is not zero"
        if way == "rowwise":
            assert torch.equal(made.dequantize().double(), data * wide)
    square = te.MXFP8Quantizer(te.DType.kFloat8E4M3, with_2d_quantization=True)(x)
    assert torch.equal(square._rowwise_data, square._columnwise_data)
    with pytest.raises(ValueError, match="blocks of 32"):
        te.MXFP8Quantizer(te.DType.kFloat8E4M3)(torch.randn(33, 32))


def _quantizers(te: Any, *, of_weights: bool) -> dict[str, Any]:
    """Return a quantizer of each format, for weights or for inputs and gradients."""
    e4m3 = te.DType.kFloat8E4M3
    dim = 2 if of_weights else 1
    four_bits = {"with_2d_quantization": True}
    if not of_weights:
        four_bits = {"with_rht": True, "with_post_rht_amax": True}
    return {
        "current": te.Float8CurrentScalingQuantizer(e4m3, "cpu"),
        "blockwise": te.Float8BlockQuantizer(
            e4m3, rowwise=True, columnwise=True, block_scaling_dim=dim
        ),
        "mxfp8": te.MXFP8Quantizer(e4m3),
        "nvfp4": te.NVFP4Quantizer(**four_bits),
    }


def _values(tensor: Any, way: str) -> torch.Tensor:
    """Return the values of a payload in fp64: its elements times the scales of their blocks."""
    if hasattr(tensor, "_scale_inv"):
        return numbers.from_fp8(tensor._data, E4M3).double() * tensor._scale_inv.double()
    data, scales = (getattr(tensor, f"_{way}_{what}") for what in ("data", "scale_inv"))
    rows, columns = tensor.shape
    if hasattr(tensor, "_amax_rowwise"):
        factor = getattr(tensor, f"_amax_{way}").double() / (6 * 448)
        found = fp4.from_e2m1(fp4.unpack(data)).double() * factor
        wide = scales.view(E4M3).double().repeat_interleave(16, 1)
        found *= wide[: found.shape[0], : found.shape[1]]
        return found if way == "rowwise" else found.t()
    scales, block = scales.double(), 32
    if hasattr(tensor, "_is_2D_scaled"):
        block = 128
        # One scale for each block of a row or, in two dimensions, for each square block.
        if tensor._is_2D_scaled:
            scales = scales.repeat_interleave(block, 0)[: rows if way == "rowwise" else columns]
            scales = scales if way == "rowwise" else scales.t()
        elif way == "rowwise":
            scales = scales.t()
        data = data if way == "rowwise" else data.t()
    else:
        scales = 2.0 ** (scales - 127)
    wide = scales.repeat_interleave(block, 1 if way == "rowwise" else 0)
    return numbers.from_fp8(data, E4M3).double() * wide[:rows, :columns]


@on_te(2, name=["current", "blockwise", "mxfp8", "nvfp4"])
def test_products_multiply_the_stored_values(name: str) -> None:
    te = enter_te()
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    shapes = ((256, 128), (64, 128), (64, 256))
    weight, x, grad = (torch.randn(*shape).bfloat16() for shape in shapes)
    one, other = (_quantizers(te, of_weights=is_weight)[name] for is_weight in (True, False))
    w, a, d = one(weight), other(x), other(grad)
    y, *_ = general_gemm(w, a, torch.float32)
    dgrad, *_ = general_gemm(w, d, torch.float32, layout="NN", grad=True)
    wgrad, *_ = general_gemm(a, d, torch.float32, layout="NT", grad=True)
    wanted = [
        _values(a, "rowwise") @ _values(w, "rowwise").t(),
        _values(d, "rowwise") @ _values(w, "columnwise"),
        _values(d, "columnwise").t() @ _values(a, "columnwise"),
    ]
    for mine, theirs in zip((y, dgrad, wgrad), wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-4, rtol=1e-5)
    # Close to the product of the original gradient and input: NVFP4's transforms cancel.
    exact = grad.double().t() @ x.double()
    assert float((wgrad.double() - exact).norm() / exact.norm()) < 0.25
    if name == "nvfp4":
        with pytest.raises(NotImplementedError, match="Hadamard transform of a gradient"):
            general_gemm(a, d, torch.float32, layout="NT", grad=True, bias=torch.zeros(256))


# -- NVFP4 -----------------------------------------------------------------------------------------


def test_stochastic_rounding_selects_neighbors_in_proportion_to_distance() -> None:
    values = torch.cat([torch.rand(200) * 6.5, _GRID.float(), torch.tensor([0.125, 2.75, 5.0])])
    values = torch.cat([values, -values])
    every = torch.arange(256).expand(len(values), 256)
    found = fp4.from_e2m1(fp4.to_e2m1(values[:, None].expand(-1, 256), every)).double()
    for value, rounded in zip(values.double().tolist(), found, strict=True):
        size = min(abs(value), 6.0)
        below = max(float(number) for number in _GRID if number <= size)
        above = min((float(number) for number in _GRID if number > size), default=below)
        assert set(rounded.abs().tolist()) <= {below, above}
        share = (size - below) / (above - below) if above > below else 0.0
        assert int((rounded.abs() == above).sum()) == (
            int(share * 256) if share else 256 * (above == below)
        )
        assert bool((rounded.sign() * value >= 0).all())


def test_first_of_two_packed_numbers_is_the_lower_half_of_the_byte() -> None:
    numbers = torch.tensor([[1, 2, 15, 0], [7, 8, 3, 4]], dtype=torch.uint8)
    packed = fp4.pack(numbers)
    assert packed.tolist() == [[1 + 16 * 2, 15], [7 + 16 * 8, 3 + 16 * 4]]
    assert torch.equal(fp4.unpack(packed), numbers)
    assert torch.equal(fp4.unpack(TEX.nvfp4_data_transpose(packed)), numbers.t())


def _defined(
    source: torch.Tensor, rows: int, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a matrix's NVFP4 elements, scales of `rows` x 16 blocks, and amax, in fp64."""
    amax = source.abs().max().double() if amax is None else amax.double()
    to_all = (6 * 448 / amax).float().double()
    blocks = _largest(source, rows, 16)
    sixth = (to_all * torch.tensor(1 / 6).double()).float().double()
    scales = nearest((blocks * sixth).float(), E4M3)
    decoded = (scales * (1 / to_all).float().double()).float().double()
    factors = (1 / decoded).float().double().clamp(max=torch.finfo(torch.float32).max)
    wide = _spread(factors, rows, 16)
    return nearest((source.double() * wide).float(), "E2M1"), scales, amax


def _assert_payload(
    tensor: Any, way: str, wanted: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rows: int
) -> None:
    """Compare a stored payload, as the matrix in memory, with its definition."""
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
    # A block of zeros, and one whose scale is too small for E4M3.
    x[:16, :16] = 0.0
    x[:16, 16:32] *= 1e-9
    return x.bfloat16()


@on_te(2)
def test_payloads_scales_and_dequantized_values_match_their_definition() -> None:
    te, x = enter_te(), _samples()
    for rows in (1, 16):
        quantizer = te.NVFP4Quantizer(with_2d_quantization=rows == 16)
        made = quantizer(x)
        for way, source in (("rowwise", x), ("columnwise", x.t())):
            _assert_payload(made, way, _defined(source, rows), rows)
        elements, scales, amax = _defined(x, rows)
        exact = elements * _spread(scales, rows, 16) * amax / (6 * 448)
        torch.testing.assert_close(
            made.dequantize(dtype=torch.float32).double(), exact, rtol=1e-6, atol=0
        )
        # Rounding to E2M1 and of the scale to E4M3 is off by less than 1/4 of a block's amax.
        bound = _spread(_largest(x, rows, 16), rows, 16) / 4 + amax / 6 / 448 / 448
        assert bool(((exact - x.double()).abs() <= bound).all())
    # A column-wise payload that is derived from the row-wise one equals the directly quantized one.
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
def test_transformed_payload_is_the_product_with_a_hadamard_matrix() -> None:
    """Blocks of 16 tokens are multiplied by a signed Hadamard matrix and rounded to bf16."""
    te, x = enter_te(), _samples()
    quantizer = te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    made = quantizer(x)
    _assert_payload(made, "rowwise", _defined(x, 1), 1)
    from transformer_engine.pytorch.tensor.nvfp4_tensor import get_wgrad_sign_vector

    signs = get_wgrad_sign_vector("cpu").double()
    matrix = signs[:, None] * hadamard(16) / 4
    turned = (x.t().double().unflatten(1, (-1, 16)) @ matrix).flatten(1).bfloat16()
    _assert_payload(made, "columnwise", _defined(turned, 1), 1)
    # Orthogonal: the product of two transformed tensors equals the product of the originals.
    assert torch.equal(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))
    with pytest.raises(ValueError, match="transforms only bf16"):
        quantizer(x.float())


@on_te(2)
def test_stochastic_rounding_is_unbiased() -> None:
    te, x = enter_te(), _samples()
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
    # Five standard deviations of the mean, and the rounding of probabilities to 1/256.
    assert bool((error <= steps[representable] * (5 * 0.5 / 20 + 1 / 256)).all())


@on_te(2)
def test_ranks_share_the_amax_of_a_group() -> None:
    te = enter_te()
    x = _samples() * (dist.get_rank() + 1)
    quantizer = te.NVFP4Quantizer()
    quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, dist.group.WORLD
    amax = x.abs().max().float()
    dist.all_reduce(amax, dist.ReduceOp.MAX)
    _assert_payload(quantizer(x), "rowwise", _defined(x, 1, amax), 1)
