"""Transformer Engine's Python over the reference kernels: its formats, modules and optimizer.

What is compared with is computed here in fp64 from each format's definition. Everything runs on
ranks that have Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cpu_rehearsal.te import numbers
from tests.mcore.session import entered_te
from tests.mcore.test_te_kernels import E4M3, _nearest
from tests.mcore.trained import on_te


def _bytes_of(exact: torch.Tensor) -> torch.Tensor:
    """Bytes of values that an E4M3 has exactly."""
    return exact.float().to(E4M3).view(torch.uint8)


@on_te(2)
def test_a_scale_for_a_tensor_delayed_or_current_and_common_to_ranks() -> None:
    te = entered_te()
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = (torch.randn(6, 8) * (rank + 1)).bfloat16()
    history = torch.zeros(1)
    delayed = te.Float8Quantizer(torch.tensor([20.0]), history, te.DType.kFloat8E4M3)
    made = delayed(x)
    exact = _nearest(x.double() * 20.0, E4M3)
    assert torch.equal(made._data, _bytes_of(exact))
    assert torch.equal(made._transpose, _bytes_of(exact).t())
    assert torch.equal(made.dequantize().double(), (exact * (1 / 20.0)).float().bfloat16().double())
    assert history.item() == x.abs().max().item()
    # A smaller amax does not lower what was recorded.
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
        assert torch.equal(made._data, _bytes_of(_nearest(x.float() * scale, E4M3)))
        assert made._scale_inv.item() == (1 / scale).item()
    # Written in place: a payload that is a view of a flat buffer stays one.
    address = made._data.data_ptr()
    current.with_amax_reduction = False
    made.quantize_(x * 3)
    assert made._data.data_ptr() == address
    scale = 2.0 ** (448.0 / (x * 3).float().abs().max()).log2().floor()
    assert torch.equal(made._data, _bytes_of(_nearest((x * 3).float() * scale, E4M3)))


@on_te(2)
def test_a_scale_for_a_block_is_a_power_of_two_of_its_largest() -> None:
    te = entered_te()
    torch.manual_seed(0)
    x = torch.randn(256, 384) * torch.rand(256, 1) * 10
    for dim in (1, 2):
        made = te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim
        )(x)
        for way in ("rowwise", "columnwise"):
            rows, cols = (128, 128) if dim == 2 else (1, 128) if way == "rowwise" else (128, 1)
            tiles = x.double().unfold(0, rows, rows).unfold(1, cols, cols)
            scale = 2.0 ** (448.0 / tiles.abs().amax((2, 3))).log2().floor()
            wide = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
            data = _bytes_of(_nearest(x.double() * wide, E4M3))
            stored = getattr(made, f"_{way}_data")
            assert torch.equal(stored, data.t() if way == "columnwise" else data), (dim, way)
            inverse = (1 / scale).float()
            if (dim, way) in ((1, "rowwise"), (2, "columnwise")):
                inverse = inverse.t()
            kept = getattr(made, f"_{way}_scale_inv")[: inverse.shape[0], : inverse.shape[1]]
            assert torch.equal(kept, inverse), (dim, way)
        assert (made.dequantize() - x).abs().max() <= x.abs().max() / 16


@on_te(2)
def test_mxfp8_has_an_exponent_for_32_elements_each_way() -> None:
    te = entered_te()
    torch.manual_seed(0)
    x = (torch.randn(64, 96) * torch.rand(64, 1) * 10).bfloat16()
    made = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x)
    for way, (rows, cols) in (("rowwise", (1, 32)), ("columnwise", (32, 1))):
        tiles = x.double().unfold(0, rows, rows).unfold(1, cols, cols)
        exponent = (tiles.abs().amax((2, 3)) / 448.0).log2().ceil()
        scale_inv = 2.0**exponent
        wide = scale_inv.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
        data = _nearest(x.double() / wide, E4M3)
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


@on_te(2)
def test_products_of_fp8_are_those_of_the_values_they_stand_for() -> None:
    te = entered_te()
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    torch.manual_seed(0)
    weight, x, grad = torch.randn(256, 128), torch.randn(64, 128), torch.randn(64, 256)
    quantizers = {
        "current": lambda: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu"),
        "blockwise": lambda: te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
        ),
        "mxfp8": lambda: te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    }
    for name, make in quantizers.items():
        w, a, d = make()(weight), make()(x), make()(grad)
        exact = [_values(t) for t in (w, a, d)]
        rowwise, columnwise = [e[0] for e in exact], [e[1] for e in exact]
        y, *_ = general_gemm(w, a, torch.float32)
        dgrad, *_ = general_gemm(w, d, torch.float32, layout="NN", grad=True)
        wgrad, *_ = general_gemm(a, d, torch.float32, layout="NT", grad=True)
        wanted = [
            rowwise[1] @ rowwise[0].t(),
            rowwise[2] @ columnwise[0],
            columnwise[2].t() @ columnwise[1],
        ]
        for mine, theirs in zip((y, dgrad, wgrad), wanted, strict=True):
            torch.testing.assert_close(mine.double(), theirs, atol=1e-4, rtol=1e-5, msg=name)


def _values(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-wise and column-wise payloads in fp64, by loops over blocks."""
    if hasattr(tensor, "_scale_inv"):
        values = numbers.from_fp8(tensor._data, E4M3).double() * tensor._scale_inv.double()
        return values, values
    is_mx = not hasattr(tensor, "_is_2D_scaled")
    block, found = (32 if is_mx else 128), []
    for way in ("rowwise", "columnwise"):
        data = numbers.from_fp8(getattr(tensor, f"_{way}_data"), E4M3).double()
        scales = getattr(tensor, f"_{way}_scale_inv").double()
        scales = 2.0 ** (scales - 127) if is_mx else scales
        if way == "columnwise" and not is_mx:
            data = data.t()
        if way == "rowwise" and not is_mx:
            scales = scales.t()
        values = torch.empty_like(data)
        for row in range(data.shape[0]):
            for col in range(0, data.shape[1], block if way == "rowwise" else 1):
                if way == "rowwise":
                    part = (row, slice(col, col + block))
                    values[part] = data[part] * scales[row, col // block]
                else:
                    values[row, col] = data[row, col] * scales[row // block, col]
        found.append(values)
    return found[0], found[1]


@on_te(2)
def test_parts_that_ranks_cast_are_those_of_the_whole_quantized() -> None:
    """Each rank casts its part; together they are what quantizing the whole gives."""
    te = entered_te()
    from transformer_engine.pytorch.tensor.utils import quantize_master_weights

    rank, half = dist.get_rank(), 256 * 128 // 2
    torch.manual_seed(0)
    whole = torch.randn(256, 128)
    start = 0 if rank == 0 else half + 64
    part = whole.view(-1)[: half + 64] if rank == 0 else whole.view(-1)[half + 64 :]
    quantizers = [
        te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu"),
        te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=2
        ),
    ]
    for quantizer in quantizers:
        wanted = quantizer(whole.bfloat16())
        weight = quantizer(torch.zeros(256, 128).bfloat16())
        quantize_master_weights([weight], [part.clone()], [start], dist.group.WORLD)
        data, expected = (
            (t._data if hasattr(t, "_data") else t._rowwise_data).view(-1) for t in (weight, wanted)
        )
        mine = slice(start, start + part.numel())
        assert torch.equal(data[mine], expected[mine]), type(quantizer).__name__


@on_te(2)
def test_layer_norm_mlp_is_its_definition_forward_and_backward() -> None:
    te = entered_te()
    torch.manual_seed(0)
    hidden = 32
    for options in ({"activation": "gelu"}, {"activation": "swiglu", "normalization": "RMSNorm"}):
        mlp = te.LayerNormMLP(hidden, 64, **options)
        x = torch.randn(3, 4, hidden, requires_grad=True)
        y = mlp(x)
        weights = [p.detach().double().requires_grad_() for p in mlp.parameters()]
        named = dict(zip((name for name, _ in mlp.named_parameters()), weights, strict=True))
        wide = x.detach().double().requires_grad_()
        if options["activation"] == "gelu":
            normed = torch.nn.functional.layer_norm(
                wide, (hidden,), named["layer_norm_weight"], named["layer_norm_bias"], 1e-5
            )
        else:
            normed = torch.nn.functional.rms_norm(wide, (hidden,), named["layer_norm_weight"], 1e-5)
        inner = normed @ named["fc1_weight"].t() + named["fc1_bias"]
        if options["activation"] == "gelu":
            inner = torch.nn.functional.gelu(inner, approximate="tanh")
        else:
            first, second = inner.chunk(2, -1)
            inner = torch.nn.functional.silu(first) * second
        exact = inner @ named["fc2_weight"].t() + named["fc2_bias"]
        torch.testing.assert_close(y.double(), exact, atol=1e-5, rtol=1e-5)
        grad = torch.randn(y.shape)
        mine = torch.autograd.grad(y, [x, *mlp.parameters()], grad)
        theirs = torch.autograd.grad(exact, [wide, *weights], grad.double())
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)
