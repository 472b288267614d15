"""Reference kernels compute what their formats and functions are defined as, in fp64 here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_cpu_rehearsal.patching import Patches
from megatron_cpu_rehearsal.te import NotEmulatedError, module, numbers
from megatron_cpu_rehearsal.te.enums import DType
from megatron_cpu_rehearsal.te.patches import BEFORE_IMPORT

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Bits of exponent and mantissa, bias, largest finite value.
LAYOUTS = {E4M3: (4, 3, 7, 448.0), E5M2: (5, 2, 15, 57344.0)}
TEX: Any = module.make()


def _every_value(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of an 8-bit float that are not negative, from the definition, ascending."""
    exponents, mantissas, bias, largest = LAYOUTS[dtype]
    found = []
    for exponent in range(2**exponents):
        for mantissa in range(2**mantissas):
            fraction = mantissa / 2**mantissas
            if exponent == 0:
                found.append(math.ldexp(fraction, 1 - bias))
            else:
                found.append(math.ldexp(1 + fraction, exponent - bias))
    return torch.tensor([value for value in found if value <= largest], dtype=torch.float64)


def _nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest value of a format in fp64, ties to the even mantissa, saturating."""
    grid = _every_value(dtype)
    size = values.double().abs().clamp(max=float(grid[-1]))
    above = torch.searchsorted(grid, size).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    up, down = grid[above] - size, size - grid[below]
    # Positions in the grid are the bytes themselves: an even one has an even mantissa.
    takes_above = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(takes_above, grid[above], grid[below]) * values.double().sign()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_fp8_rounds_to_nearest_even_and_saturates(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grid = _every_value(dtype)
    halfway = (grid[1:] + grid[:-1]) / 2
    largest = float(grid[-1])
    random = torch.randn(2000).double() * largest / 3
    small = torch.randn(500).double() * float(grid[1]) * 4
    beyond = torch.tensor([largest * 1.04, largest * 8, 3e38], dtype=torch.float64)
    values = torch.cat([grid, halfway, random, small, beyond]).float()
    values = torch.cat([values, -values])
    read = numbers.from_fp8(numbers.to_fp8(values, dtype), dtype)
    assert torch.equal(read.double(), _nearest(values, dtype))
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert numbers.from_fp8(numbers.to_fp8(infinite, dtype), dtype).tolist() == [largest, -largest]
    assert numbers.from_fp8(numbers.to_fp8(torch.tensor([torch.nan]), dtype), dtype).isnan().all()


def test_a_scale_is_the_largest_value_over_the_amax() -> None:
    amax = torch.tensor([1.0, 3.0, 448.0, 1e-3])
    plain = numbers.scale_of_amax(amax, 448.0)
    assert torch.equal(plain, (448.0 / amax.double()).float())
    power = numbers.scale_of_amax(amax, 448.0, power_of_two=True)
    expected = [2.0 ** math.floor(math.log2(448.0 / float(value))) for value in amax]
    assert power.tolist() == expected
    unusable = torch.tensor([0.0, torch.inf, torch.nan])
    assert numbers.scale_of_amax(unusable, 448.0).tolist() == [1.0, 1.0, 1.0]
    least = numbers.scale_of_amax(torch.tensor([0.0, 1e-9]), 448.0, epsilon=0.5)
    assert least.tolist() == [896.0, 896.0]
    overflowing = torch.tensor([1e-38])
    assert numbers.scale_of_amax(overflowing, 448.0).item() == torch.finfo(torch.float32).max
    assert numbers.scale_of_amax(overflowing, 448.0, power_of_two=True).item() == 2.0**127


def test_e8m0_is_the_least_power_of_two_that_is_not_below() -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.rand(300) * 10.0 ** torch.randint(-30, 30, (300,)), torch.ones(1)])
    values = torch.cat([values, 2.0 ** torch.arange(-120, 120.0)])
    stored = numbers.e8m0_of(values)
    expected = [math.ceil(math.log2(float(v))) + 127 for v in values.double()]
    # log2 of a power of two is exact in fp64, and no other value is that close to one.
    assert stored.tolist() == expected
    powers = numbers.power_of_e8m0(stored).double()
    assert bool((powers >= values.double()).all()) and bool((powers / 2 < values.double()).all())
    ends = torch.tensor([0.0, 2.0**-127, 2.0**-126, 3e38, torch.inf, torch.nan])
    assert numbers.e8m0_of(ends).tolist() == [0, 0, 1, 254, 254, 255]
    every = torch.arange(255).to(torch.uint8)
    exact = torch.pow(torch.tensor(2.0, dtype=torch.float64), every.double() - 127)
    assert torch.equal(numbers.power_of_e8m0(every).double(), exact)
    assert torch.equal(numbers.reciprocal_of_e8m0(every).double(), 1 / exact)


def _gemm(a: torch.Tensor, b: torch.Tensor, layout: str, **given: Any) -> list[Any]:
    workspace = torch.empty(0, dtype=torch.uint8)
    options = {
        "D": None,
        "quantizer": None,
        "output_dtype": None,
        "bias": None,
        "bias_type": DType.kBFloat16,
        "gelu": False,
        "gelu_in": None,
        "grad": False,
        "accumulate": False,
        **given,
    }
    return TEX.generic_gemm(
        a,
        layout[0] == "T",
        b,
        layout[1] == "T",
        workspace=workspace,
        workspace_size=0,
        use_split_accumulator=True,
        **options,
    )


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def test_the_layouts_of_a_product_are_forward_gradient_and_weight_gradient() -> None:
    torch.manual_seed(0)
    weight, x, grad = torch.randn(5, 7), torch.randn(2, 3, 7), torch.randn(2, 3, 5)
    wide = [tensor.double() for tensor in (weight, x, grad)]
    (forward, *nothing) = _gemm(weight, x, "TN")
    torch.testing.assert_close(forward.double(), wide[1] @ wide[0].t(), atol=1e-5, rtol=1e-5)
    assert nothing == [None, None, None]
    (dgrad, *_) = _gemm(weight, grad, "NN", grad=True)
    torch.testing.assert_close(dgrad.double(), wide[2] @ wide[0], atol=1e-5, rtol=1e-5)
    wgrad, bias_grad, *_ = _gemm(x, grad, "NT", grad=True, bias=torch.empty(5))
    expected = wide[2].reshape(6, 5).t() @ wide[1].reshape(6, 7)
    torch.testing.assert_close(wgrad.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(bias_grad.double(), wide[2].sum((0, 1)), atol=1e-5, rtol=1e-5)


def test_bias_and_gelu_come_before_the_one_rounding() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(5, 7).bfloat16(), torch.randn(6, 7).bfloat16()
    bias = torch.randn(5).bfloat16()
    y, _, before, _ = _gemm(weight, x, "TN", bias=bias, gelu=True)
    exact = x.double() @ weight.double().t() + bias.double()
    assert y.dtype == before.dtype == torch.bfloat16
    assert torch.equal(before, exact.float().bfloat16())
    torch.testing.assert_close(y.double(), _gelu(exact), atol=1e-6, rtol=2.0**-8)
    grad = torch.randn(6, 5).bfloat16()
    leaf = before.double().requires_grad_()
    (slope,) = torch.autograd.grad(_gelu(leaf).sum(), leaf)
    # A weight of ones hands the gradient through, so the slope is all that is left.
    identity = torch.eye(5, dtype=torch.bfloat16)
    result, bias_grad, *_ = _gemm(
        identity, grad, "NN", grad=True, gelu=True, gelu_in=before, bias=bias
    )
    torch.testing.assert_close(result.double(), grad.double() * slope, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(
        bias_grad.double(), (grad.double() * slope).sum(0), atol=2e-2, rtol=1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_gradient_is_added_in_place_and_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(64, 7).bfloat16(), torch.randn(64, 5).bfloat16()
    main_grad = torch.randn(5, 7).to(dtype)
    expected = main_grad.double() + grad.double().t() @ x.double()
    address = main_grad.data_ptr()
    out_dtype = {torch.float32: DType.kFloat32, torch.bfloat16: DType.kBFloat16}[dtype]
    result, *_ = _gemm(
        x, grad, "NT", D=main_grad, output_dtype=out_dtype, accumulate=True, grad=True
    )
    assert result.data_ptr() == address
    if dtype == torch.bfloat16:
        assert torch.equal(result, expected.float().bfloat16())
    else:
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_grouped_products_are_one_product_per_expert_with_or_without_tokens() -> None:
    torch.manual_seed(0)
    splits = [3, 0, 4]
    weights = [torch.randn(5, 7) for _ in splits]
    parts = list(torch.randn(7, 7).split(splits))
    biases = [torch.randn(5) for _ in splits]
    none = torch.empty(0)
    output = torch.full((7, 5), torch.nan)

    def grouped(a: Any, ta: bool, b: Any, tb: bool, d: Any, bias: Any, **kind: bool) -> Any:
        return TEX.te_general_grouped_gemm(
            a,
            ta,
            b,
            tb,
            d,
            DType.kFloat32,
            splits,
            bias,
            DType.kFloat32,
            kind.get("single", False),
            [none] * 3,
            kind.get("grad", False),
            [none],
            0,
            kind.get("accumulate", False),
            True,
            1,
        )

    grouped(weights, True, parts, False, [output], biases, single=True)
    expected = torch.cat(
        [x.double() @ w.double().t() + b for x, w, b in zip(parts, weights, biases, strict=True)]
    )
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    grads = list(torch.randn(7, 5).split(splits))
    main_grads = [torch.ones(5, 7) for _ in splits]
    bias_grads = [torch.full((5,), torch.nan) for _ in splits]
    grouped(parts, False, grads, True, main_grads, bias_grads, grad=True, accumulate=True)
    for x, grad, main_grad, bias_grad in zip(parts, grads, main_grads, bias_grads, strict=True):
        exact = 1 + grad.double().t() @ x.double()
        torch.testing.assert_close(main_grad.double(), exact, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(bias_grad.double(), grad.double().sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_forward_and_backward(kind: str, zero_centered: bool) -> None:
    torch.manual_seed(0)
    x, dz = torch.randn(2, 3, 16) * 3 + 1, torch.randn(2, 3, 16)
    weight, bias = torch.randn(16), torch.randn(16)
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    factor = leaves[1] + 1 if zero_centered else leaves[1]
    if kind == "layernorm":
        centered = leaves[0] - leaves[0].mean(-1, keepdim=True)
        exact = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * factor
        exact = exact + leaves[2]
        z, mean, rsigma = TEX.layernorm_fwd(
            x, weight, bias, 1e-5, None, None, DType.kFloat32, 0, zero_centered
        )
        mine = TEX.layernorm_bwd(dz, x, mean, rsigma, weight, 0, zero_centered)
        wanted = torch.autograd.grad(exact, leaves, dz.double())
    else:
        exact = leaves[0] / (leaves[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * factor
        z, mean, rsigma = TEX.rmsnorm_fwd(
            x, weight, 1e-5, None, None, DType.kFloat32, 0, zero_centered
        )
        assert mean is None
        mine = TEX.rmsnorm_bwd(dz, x, rsigma, weight, 0, zero_centered)
        wanted = torch.autograd.grad(exact, leaves[:2], dz.double())
        added = TEX.rmsnorm_bwd_add(dz, x, x, rsigma, weight, 0, zero_centered)
        torch.testing.assert_close(added[0], mine[0] + x)
        assert torch.equal(added[1], mine[1])
    torch.testing.assert_close(z.double(), exact.detach(), atol=1e-5, rtol=1e-5)
    assert rsigma.shape == (6,)
    for grad, expected in zip(mine, wanted, strict=True):
        torch.testing.assert_close(grad.double(), expected, atol=1e-5, rtol=1e-5)


ACTIVATIONS = {
    "gelu": _gelu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x) ** 2,
}
GATES = {
    "geglu": "gelu",
    "qgeglu": "qgelu",
    "swiglu": "silu",
    "reglu": "relu",
    "sreglu": "srelu",
    "glu": None,
}


@pytest.mark.parametrize("name", [*ACTIVATIONS, *GATES])
def test_activations_forward_and_backward(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 10) * 2
    leaf = x.double().requires_grad_()
    if name in ACTIVATIONS:
        exact = ACTIVATIONS[name](leaf)
    else:
        first, second = leaf.chunk(2, -1)
        inner = GATES[name]
        exact = (torch.sigmoid(first) if inner is None else ACTIVATIONS[inner](first)) * second
    grad = torch.randn(exact.shape)
    (wanted,) = torch.autograd.grad(exact, leaf, grad.double())
    mine, back = getattr(TEX, name)(x, None), getattr(TEX, f"d{name}")(grad, x, None)
    torch.testing.assert_close(mine.double(), exact.detach(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(back.double(), wanted, atol=2e-6, rtol=1e-5)
    if name in ACTIVATIONS:
        bias_grad, again = getattr(TEX, f"dbias_d{name}")(grad, x, None)
        assert torch.equal(again, back)
        torch.testing.assert_close(bias_grad.double(), wanted.sum((0, 1)), atol=1e-5, rtol=1e-5)


def test_the_clamped_swiglu_and_its_gradient() -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(4, 12) * 6, torch.randn(4, 6)
    leaf = x.double().requires_grad_()
    first, second = leaf.chunk(2, -1)
    first, second = first.clamp(max=5.0), second.clamp(-5.0, 5.0) + 0.5
    exact = first * torch.sigmoid(1.3 * first) * second
    (wanted,) = torch.autograd.grad(exact, leaf, grad.double())
    torch.testing.assert_close(
        TEX.clamped_swiglu(x, None, 5.0, 1.3, 0.5).double(), exact.detach(), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        TEX.clamped_dswiglu(grad, x, None, 5.0, 1.3, 0.5).double(), wanted, atol=1e-5, rtol=1e-5
    )


def test_softmax_scaled_masked_and_causal() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 4, 6)
    leaf = scores.double().requires_grad_()
    exact = torch.softmax(leaf * 0.3, -1)
    mine = TEX.scaled_softmax_forward(scores, 0.3)
    torch.testing.assert_close(mine.double(), exact.detach(), atol=1e-6, rtol=1e-5)
    grad = torch.randn(scores.shape)
    (wanted,) = torch.autograd.grad(exact, leaf, grad.double())
    back = TEX.scaled_softmax_backward(grad, mine, 0.3)
    torch.testing.assert_close(back.double(), wanted, atol=1e-6, rtol=1e-5)
    mask = torch.rand(2, 1, 4, 6) < 0.4
    mask[0, 0, 1] = True
    masked = TEX.scaled_masked_softmax_forward(scores, mask, 0.3)
    exact = torch.softmax((scores.double() * 0.3).masked_fill(mask, -10000.0), -1)
    exact[0, :, 1] = 0.0
    torch.testing.assert_close(masked.double(), exact, atol=1e-6, rtol=1e-5)
    # The last of 4 queries sees all 6 keys, the first one 3.
    hidden = torch.arange(6)[None, :] > torch.arange(4)[:, None] + 2
    exact = torch.softmax((scores.double() * 0.3).masked_fill(hidden, -torch.inf), -1)
    aligned = TEX.scaled_aligned_causal_masked_softmax_forward(scores, 0.3)
    torch.testing.assert_close(aligned.double(), exact, atol=1e-6, rtol=1e-5)
    square = torch.randn(5, 4, 4)
    hidden = torch.arange(4)[None, :] > torch.arange(4)[:, None]
    exact = torch.softmax((square.double() * 0.3).masked_fill(hidden, -torch.inf), -1)
    upper = TEX.scaled_upper_triang_masked_softmax_forward(square, 0.3)
    torch.testing.assert_close(upper.double(), exact, atol=1e-6, rtol=1e-5)


HYPER = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}


def _adam(
    grads: list[torch.Tensor], p: torch.Tensor, mode: int, decay: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Several steps of Adam in fp64, from its definition."""
    p, m, v = p.double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()
    for step, grad in enumerate(grads, start=1):
        g = grad.double() + (decay * p if mode == 0 else 0)
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g**2
        update = (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        p = p - 0.01 * (update + (decay * p if mode == 1 else 0))
    return p, m, v


@pytest.mark.parametrize("mode", [0, 1], ids=["l2", "decoupled"])
def test_adam_with_and_without_masters(mode: int) -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(40), [torch.randn(40) for _ in range(4)]
    exact, exact_m, exact_v = _adam(grads, start, mode, 0.1)
    flag = torch.zeros(1, dtype=torch.int)
    numbers_ = tuple(HYPER.values())
    plain, moments = start.clone(), [torch.zeros(40), torch.zeros(40)]
    low, master, others = start.bfloat16(), start.clone(), [torch.zeros(40), torch.zeros(40)]
    for step, grad in enumerate(grads, start=1):
        end = (step, mode, 1, 0.1)
        TEX.multi_tensor_adam(1, flag, [[grad], [plain], *[[m] for m in moments]], *numbers_, *end)
        TEX.multi_tensor_adam(
            1, flag, [[grad], [low], *[[m] for m in others], [master]], *numbers_, *end
        )
    torch.testing.assert_close(plain.double(), exact, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(moments[0].double(), exact_m, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(moments[1].double(), exact_v, atol=1e-6, rtol=1e-5)
    assert torch.equal(master, plain)
    assert torch.equal(low, plain.bfloat16())


def test_adam_keeps_a_master_as_a_bf16_parameter_and_its_lower_half() -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(300), [torch.randn(300) for _ in range(4)]
    exact, _, _ = _adam(grads, start, 1, 0.1)
    bits = start.view(torch.int32)
    lower = bits.to(torch.int16)
    # Rounded to nearest: one more where the lower half is at least half of its range.
    p = ((bits >> 16) + (lower < 0).int()).to(torch.int16).view(torch.bfloat16)
    plain = start.clone()
    lists = [torch.zeros(300) for _ in range(4)]
    flag = torch.zeros(1, dtype=torch.int)
    for step, grad in enumerate(grads, start=1):
        end = (*HYPER.values(), step, 1, 1, 0.1)
        TEX.multi_tensor_adam_param_remainder(
            1, flag, [[grad], [p], [lists[0]], [lists[1]], [lower]], *end
        )
        TEX.multi_tensor_adam(1, flag, [[grad], [plain], [lists[2]], [lists[3]]], *end)
    upper = p.view(torch.int16).int() - (lower < 0).int()
    master = (upper << 16 | lower.int() & 0xFFFF).view(torch.float32)
    assert torch.equal(master, plain)
    torch.testing.assert_close(master.double(), exact, atol=1e-6, rtol=1e-5)
    assert bool(((p.float() - master).abs() <= master.abs() * 2.0**-8).all())


def test_adam_over_fp8_parameters_quantizes_its_master() -> None:
    torch.manual_seed(0)
    start, grad = torch.randn(64), torch.randn(64)
    exact, _, _ = _adam([grad], start, 1, 0.0)
    data, master = torch.zeros(64, dtype=torch.uint8), start.clone()
    scale, amax, scale_inv = torch.tensor([16.0]), torch.tensor([0.1]), torch.zeros(1)
    lists = [[grad], [data], [torch.zeros(64)], [torch.zeros(64)], [master]]
    lists += [[scale], [amax], [scale_inv]]
    flag = torch.zeros(1, dtype=torch.int)
    TEX.multi_tensor_adam_fp8(1, flag, lists, *HYPER.values(), 1, 1, 1, 0.0, DType.kFloat8E4M3)
    torch.testing.assert_close(master.double(), exact, atol=1e-6, rtol=1e-5)
    assert torch.equal(
        numbers.from_fp8(data, E4M3).double(), _nearest(master.double() * 16.0, E4M3)
    )
    assert amax.item() == master.abs().max().item()
    assert scale_inv.item() == 1 / 16


def test_capturable_adam_unscales_gradients_and_heeds_its_flag() -> None:
    torch.manual_seed(0)
    start, grad = torch.randn(20), torch.randn(20)
    exact, _, _ = _adam([grad], start, 1, 0.1)
    p, scaled = start.clone(), grad * 4
    lists = [[scaled], [p], [torch.zeros(20)], [torch.zeros(20)]]
    rest = (0.9, 0.95, 1e-8, torch.tensor([1]), 1, 1, 0.1, torch.tensor([0.25]))
    TEX.multi_tensor_adam_capturable(1, torch.ones(1).int(), lists, torch.tensor(0.01), *rest)
    assert torch.equal(p, start)
    TEX.multi_tensor_adam_capturable(1, torch.zeros(1).int(), lists, torch.tensor(0.01), *rest)
    torch.testing.assert_close(p.double(), exact, atol=1e-6, rtol=1e-5)
    assert torch.equal(scaled, grad)


def test_sgd_is_that_of_torch() -> None:
    torch.manual_seed(0)
    p, grads = torch.randn(20), [torch.randn(20) for _ in range(3)]
    leaf = p.double().requires_grad_()
    theirs = torch.optim.SGD([leaf], lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True)
    velocity, flag = torch.zeros(20), torch.zeros(1, dtype=torch.int)
    for step, grad in enumerate(grads):
        leaf.grad = grad.double()
        theirs.step()
        lists = [[grad * 2], [p], [velocity]]
        TEX.multi_tensor_sgd(1, flag, lists, 0.2, 0.9, 0.0, 0.1, True, step == 0, False, 0.5)
    torch.testing.assert_close(p.double(), leaf.detach(), atol=1e-6, rtol=1e-5)


def test_scaling_and_norms_of_lists() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(5), torch.randn(3, 4).bfloat16()]
    outputs = [torch.empty(5), torch.empty(3, 4)]
    flag = torch.zeros(1, dtype=torch.int)
    TEX.multi_tensor_scale(1, flag, [tensors, outputs], 0.5)
    assert all(torch.equal(o, t.float() * 0.5) for o, t in zip(outputs, tensors, strict=True))
    total, each = TEX.multi_tensor_l2norm(1, flag, [tensors], True)
    norms = [float(t.double().norm()) for t in tensors]
    assert each.tolist() == pytest.approx(norms, rel=1e-6)
    assert total.item() == pytest.approx(math.hypot(*norms), rel=1e-6)
    unscaled, _ = TEX.multi_tensor_unscale_l2norm(1, flag, [tensors], torch.tensor([0.25]))
    assert unscaled.item() == pytest.approx(math.hypot(*norms) / 4, rel=1e-6)
    assert flag.item() == 0
    TEX.multi_tensor_scale_tensor(
        1, flag, [[torch.tensor([torch.inf])], [torch.empty(1)]], torch.tensor([2.0])
    )
    assert flag.item() == 1


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_delayed_scaling_shifts_its_history_and_makes_the_next_scale(algo: str) -> None:
    # Columns: an ordinary tensor, one that was not used, one whose reduced amax is larger.
    history = torch.tensor([[2.0, 0.0, 1.0], [8.0, 5.0, 3.0], [1.0, 6.0, 2.0]])
    scales, reduced = torch.tensor([7.0, 9.0, 5.0]), torch.tensor([2.0, 0.0, 4.0])
    TEX.fused_amax_and_scale_update_after_reduction(
        reduced, [history], [scales], algo, DType.kFloat8E4M3, 1.0
    )
    assert history.tolist() == [[0.0, 0.0, 0.0], [1.0, 5.0, 2.0], [2.0, 6.0, 4.0]]
    amax = [8.0, 0.0, 4.0] if algo == "max" else [2.0, 0.0, 4.0]
    assert scales.tolist() == [224.0 / amax[0], 9.0, 224.0 / amax[2]]


def test_tensors_are_on_a_gpu_to_transformer_engine_alone() -> None:
    (patch,) = [each for each in BEFORE_IMPORT if each.target == "torch:Tensor.is_cuda"]
    ask = "answer = torch.zeros(1).is_cuda"
    theirs = {"__name__": "transformer_engine.pytorch.module.base", "torch": torch}
    others = {"__name__": "transformer_engineering", "torch": torch}
    patches = Patches()
    patches.apply(patch)
    try:
        exec(ask, theirs)
        exec(ask, others)
        assert not torch.zeros(1).is_cuda
    finally:
        patches.undo()
    assert (theirs["answer"], others["answer"]) == (True, False)
    assert "is_cuda" not in vars(torch.Tensor)


def test_rows_are_padded_and_unpadded() -> None:
    rows = torch.arange(10.0).view(5, 2)
    padded = torch.full((8, 2), torch.nan)
    TEX.fused_multi_row_padding(rows, padded, [3, 0, 2], [4, 0, 4])
    zeros = torch.zeros(2, 2)
    assert torch.equal(padded, torch.cat([rows[:3], zeros[:1], rows[3:], zeros]))
    back = torch.empty(5, 2)
    TEX.fused_multi_row_unpadding(padded, back, [4, 0, 4], [3, 0, 2])
    assert torch.equal(back, rows)


def test_a_name_without_a_kernel_says_that_it_is_not_emulated() -> None:
    with pytest.raises(NotEmulatedError, match=r"transformer_engine_torch\.fused_attn_fwd is not"):
        _ = TEX.fused_attn_fwd
    with pytest.raises(NotEmulatedError, match="CommOverlapHelper is not emulated"):
        TEX.CommOverlapHelper()
    with pytest.raises(NotImplementedError, match="leave out --tp-comm-overlap"):
        _gemm(torch.ones(1, 1), torch.ones(1, 1), "TN", comm_overlap=object())
    assert not hasattr(TEX, "__path__")
