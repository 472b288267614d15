"""Reference kernels match the definitions of their formats and functions, computed in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_cpu_rehearsal.te import NotEmulatedError, fp4, module, numbers
from megatron_cpu_rehearsal.te.enums import DType
from megatron_cpu_rehearsal.te.patches import BEFORE_IMPORT
from megatron_fsdp_v2_patching import Patches

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TEX: Any = module.make()
WITH_BF16 = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def check(mine: torch.Tensor, exact: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Compare a kernel's result with its definition in fp64."""
    torch.testing.assert_close(mine.double(), exact.detach(), atol=tolerance, rtol=tolerance)


# -- formats --------------------------------------------------------------------------------------


def _every_value(exponents: int, mantissas: int, bias: int, largest: float) -> torch.Tensor:
    """Return all finite nonnegative values of a float format, from its definition, ascending.

    Args:
        exponents: Bits of the exponent.
        mantissas: Bits of the mantissa.
        bias: Bias of the exponent.
        largest: Largest finite value.
    """
    found = []
    for exponent in range(2**exponents):
        for mantissa in range(2**mantissas):
            fraction = mantissa / 2**mantissas
            if exponent == 0:
                found.append(math.ldexp(fraction, 1 - bias))
            else:
                found.append(math.ldexp(1 + fraction, exponent - bias))
    return torch.tensor([value for value in found if value <= largest], dtype=torch.float64)


VALUES = {
    E4M3: _every_value(4, 3, 7, 448.0),
    E5M2: _every_value(5, 2, 15, 57344.0),
    "E2M1": _every_value(2, 1, 1, 6.0),
}


def nearest(values: torch.Tensor, kind: Any) -> torch.Tensor:
    """Round to the nearest value of a format in fp64: ties to the even mantissa, saturating."""
    grid = VALUES[kind]
    size = values.double().abs().clamp(max=float(grid[-1]))
    above = torch.searchsorted(grid, size).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    up, down = grid[above] - size, size - grid[below]
    # A position in the grid is the bit pattern of the value: even positions have even mantissas.
    takes_above = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(takes_above, grid[above], grid[below]) * values.double().sign()


def _rounded(values: torch.Tensor, kind: Any) -> torch.Tensor:
    if kind == "E2M1":
        return fp4.from_e2m1(fp4.to_e2m1(values))
    return numbers.from_fp8(numbers.to_fp8(values, kind), kind)


@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_a_format_rounds_to_nearest_even_and_saturates(kind: Any) -> None:
    grid = VALUES[kind]
    halfway = (grid[1:] + grid[:-1]) / 2
    near = torch.cat([halfway * (1 + 1e-6), halfway * (1 - 1e-6)])
    largest = float(grid[-1])
    random = torch.randn(2000).double() * largest / 3
    small = torch.randn(500).double() * float(grid[1]) * 4
    beyond = torch.tensor([largest * 1.04, largest * 8, 3e38, torch.inf], dtype=torch.float64)
    values = torch.cat([grid, halfway, near, random, small, beyond]).float()
    values = torch.cat([values, -values])
    assert torch.equal(_rounded(values, kind).double(), nearest(values, kind))
    of_nan = _rounded(torch.tensor([torch.nan]), kind)
    assert of_nan.item() == 6.0 if kind == "E2M1" else of_nan.isnan().all()


def test_scale_is_the_largest_value_over_the_amax() -> None:
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


def test_e8m0_rounds_up_to_a_power_of_two() -> None:
    values = torch.cat([torch.rand(300) * 10.0 ** torch.randint(-30, 30, (300,)), torch.ones(1)])
    values = torch.cat([values, 2.0 ** torch.arange(-120, 120.0)])
    # log2 is exact for powers of two in fp64, and not an integer for other fp32 values.
    expected = [math.ceil(math.log2(float(v))) + 127 for v in values.double()]
    assert numbers.e8m0_of(values).tolist() == expected
    ends = torch.tensor([0.0, 2.0**-127, 2.0**-126, 3e38, torch.inf, torch.nan])
    assert numbers.e8m0_of(ends).tolist() == [0, 0, 1, 254, 254, 255]
    every = torch.arange(255).to(torch.uint8)
    exact = torch.pow(torch.tensor(2.0, dtype=torch.float64), every.double() - 127)
    assert torch.equal(numbers.power_of_e8m0(every).double(), exact)
    assert torch.equal(numbers.reciprocal_of_e8m0(every).double(), 1 / exact)


# -- products -------------------------------------------------------------------------------------


def _gemm(a: torch.Tensor, b: torch.Tensor, layout: str, **given: Any) -> list[Any]:
    options = {
        **dict.fromkeys(("D", "quantizer", "output_dtype", "bias", "gelu_in")),
        **dict.fromkeys(("gelu", "grad", "accumulate"), False),
        "bias_type": DType.kBFloat16,
        "workspace": torch.empty(0, dtype=torch.uint8),
        "workspace_size": 0,
        "use_split_accumulator": True,
    }
    return TEX.generic_gemm(a, layout[0] == "T", b, layout[1] == "T", **{**options, **given})


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def test_bias_and_gelu_are_applied_before_rounding() -> None:
    weight, x, bias = (torch.randn(*shape).bfloat16() for shape in ((5, 7), (6, 7), (5,)))
    y, _, before, _ = _gemm(weight, x, "TN", bias=bias, gelu=True)
    exact = x.double() @ weight.double().t() + bias.double()
    assert y.dtype == before.dtype == torch.bfloat16
    assert torch.equal(before, exact.float().bfloat16())
    torch.testing.assert_close(y.double(), _gelu(exact), atol=1e-6, rtol=2.0**-8)
    grad = torch.randn(6, 5).bfloat16()
    leaf = before.double().requires_grad_()
    (slope,) = torch.autograd.grad(_gelu(leaf).sum(), leaf)
    # An identity weight passes the gradient through, so that only the slope of GELU is left.
    options = {"grad": True, "gelu": True, "gelu_in": before, "bias": bias}
    result, bias_grad, *_ = _gemm(torch.eye(5, dtype=torch.bfloat16), grad, "NN", **options)
    check(result, grad.double() * slope, 1e-2)
    check(bias_grad, (grad.double() * slope).sum(0), 2e-2)


@pytest.mark.parametrize("dtype", WITH_BF16)
def test_weight_gradient_is_added_in_place_and_rounded_once(dtype: torch.dtype) -> None:
    x, grad = torch.randn(64, 7).bfloat16(), torch.randn(64, 5).bfloat16()
    main_grad = torch.randn(5, 7).to(dtype)
    expected = main_grad.double() + grad.double().t() @ x.double()
    out_dtype = {torch.float32: DType.kFloat32, torch.bfloat16: DType.kBFloat16}[dtype]
    options = {"D": main_grad, "output_dtype": out_dtype, "accumulate": True, "grad": True}
    result, *_ = _gemm(x, grad, "NT", **options)
    assert result.data_ptr() == main_grad.data_ptr()
    if dtype == torch.bfloat16:
        assert torch.equal(result, expected.float().bfloat16())
    else:
        check(result, expected)


def test_grouped_product_equals_one_product_per_expert() -> None:
    splits = [3, 0, 4]
    weights, biases = [torch.randn(5, 7) for _ in splits], [torch.randn(5) for _ in splits]
    parts, grads = (list(torch.randn(7, width).split(splits)) for width in (7, 5))
    none, fp32 = torch.empty(0), DType.kFloat32
    # One output or several, a backward or not, accumulation or not.
    kinds = (True, [none] * 3, False, [none], 0, False, True, 1)
    output = torch.full((7, 5), torch.nan)
    operands = (weights, True, parts, False, [output])
    TEX.te_general_grouped_gemm(*operands, fp32, splits, biases, fp32, *kinds)
    pairs = zip(parts, weights, biases, strict=True)
    check(output, torch.cat([x.double() @ w.double().t() + b for x, w, b in pairs]))
    main_grads = [torch.ones(5, 7) for _ in splits]
    bias_grads = [torch.full((5,), torch.nan) for _ in splits]
    kinds = (False, [none] * 3, True, [none], 0, True, True, 1)
    operands = (parts, False, grads, True, main_grads)
    TEX.te_general_grouped_gemm(*operands, fp32, splits, bias_grads, fp32, *kinds)
    for x, grad, main_grad, bias_grad in zip(parts, grads, main_grads, bias_grads, strict=True):
        check(main_grad, 1 + grad.double().t() @ x.double())
        check(bias_grad, grad.double().sum(0))


# -- functions and their gradients ----------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A differentiable function of tensors.

    Attributes:
        shapes: Shapes of the arguments.
        define: The definition of the function.
        forward: Returns the result and the tensors that are saved for the backward.
        backward: Returns the gradients of the arguments, from the gradient of the result, the
            arguments and the saved tensors.
    """

    shapes: tuple[tuple[int, ...], ...]
    define: Callable[..., torch.Tensor]
    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., Any] | None = None


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": _gelu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x) ** 2,
}
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geglu": ACTIVATIONS["gelu"],
    "qgeglu": ACTIVATIONS["qgelu"],
    "swiglu": ACTIVATIONS["silu"],
    "reglu": ACTIVATIONS["relu"],
    "sreglu": ACTIVATIONS["srelu"],
    "glu": torch.sigmoid,
}


def _gated(gate: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: gate(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def _activation(name: str, define: Callable[[torch.Tensor], torch.Tensor]) -> Kernel:
    return Kernel(
        ((3, 4, 10),),
        define,
        lambda x: (getattr(TEX, name)(x, None),),
        lambda grad, x: (getattr(TEX, f"d{name}")(grad, x, None),),
    )


def _clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    first, second = first.clamp(max=1.0), second.clamp(-1.0, 1.0) + 0.5
    return first * torch.sigmoid(1.3 * first) * second


def hadamard(size: int) -> torch.Tensor:
    """Return Sylvester's matrix: -1 where row and column share an odd number of bits, else 1."""
    signs = [[(-1) ** (row & col).bit_count() for col in range(size)] for row in range(size)]
    return torch.tensor(signs, dtype=torch.float64)


def layer_norm(one: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    centered = x - x.mean(-1, keepdim=True)
    spread = (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centered / spread * (weight + one) + bias


def rms_norm(one: int, x: torch.Tensor, weight: torch.Tensor) -> Any:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + one)


def _norms(one: int) -> dict[str, Kernel]:
    """Return norms that add `one`, 0 or 1, to their stored weight."""
    common, zero_centered = (None, None, DType.kFloat32, 0), bool(one)
    return {
        f"layernorm of weight + {one}": Kernel(
            ((2, 3, 16), (16,), (16,)),
            lambda *given: layer_norm(one, *given),
            lambda x, w, b: TEX.layernorm_fwd(x, w, b, 1e-5, *common, zero_centered),
            lambda dz, x, w, b, mean, rsigma: TEX.layernorm_bwd(
                dz, x, mean, rsigma, w, 0, zero_centered
            ),
        ),
        f"rmsnorm of weight + {one}": Kernel(
            ((2, 3, 16), (16,)),
            lambda *given: rms_norm(one, *given),
            lambda x, w: TEX.rmsnorm_fwd(x, w, 1e-5, *common, zero_centered),
            lambda dz, x, w, _, rsigma: TEX.rmsnorm_bwd(dz, x, rsigma, w, 0, zero_centered),
        ),
    }


# One query of the mask sees no keys.
_MASK = torch.arange(24).view(1, 1, 4, 6) % 5 == 0
_MASK[0, 0, 1] = True


def _softmax(hidden: torch.Tensor | None = None, value: float = -torch.inf) -> Callable[..., Any]:
    def define(scores: torch.Tensor) -> torch.Tensor:
        scaled = scores * 0.3
        return torch.softmax(scaled if hidden is None else scaled.masked_fill(hidden, value), -1)

    return define


def _softmax_of_mask(scores: torch.Tensor) -> torch.Tensor:
    exact: torch.Tensor = _softmax(_MASK, -10000.0)(scores)
    return exact * ~_MASK.all(-1, keepdim=True)


KERNELS: dict[str, Kernel] = {
    **{name: _activation(name, define) for name, define in ACTIVATIONS.items()},
    **{name: _activation(name, _gated(gate)) for name, gate in GATES.items()},
    "clamped_swiglu": Kernel(
        ((4, 12),),
        _clamped_swiglu,
        lambda x: (TEX.clamped_swiglu(x, None, 1.0, 1.3, 0.5),),
        lambda grad, x: (TEX.clamped_dswiglu(grad, x, None, 1.0, 1.3, 0.5),),
    ),
    **_norms(0),
    **_norms(1),
    "softmax": Kernel(
        ((2, 3, 4, 6),),
        _softmax(),
        lambda x: (TEX.scaled_softmax_forward(x, 0.3),),
        lambda grad, x: (
            TEX.scaled_softmax_backward(grad, TEX.scaled_softmax_forward(x, 0.3), 0.3),
        ),
    ),
    "masked softmax": Kernel(
        ((2, 3, 4, 6),),
        _softmax_of_mask,
        lambda x: (TEX.scaled_masked_softmax_forward(x, _MASK.expand(2, -1, -1, -1), 0.3),),
    ),
    # The last of 4 queries sees all 6 keys, the first one 3.
    "aligned causal softmax": Kernel(
        ((2, 3, 4, 6),),
        _softmax(torch.ones(4, 6).triu(3).bool()),
        lambda x: (TEX.scaled_aligned_causal_masked_softmax_forward(x, 0.3),),
    ),
    "causal softmax": Kernel(
        ((5, 4, 4),),
        _softmax(torch.ones(4, 4).triu(1).bool()),
        lambda x: (TEX.scaled_upper_triang_masked_softmax_forward(x, 0.3),),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_and_its_gradient_match_their_definition(name: str) -> None:
    kernel = KERNELS[name]
    inputs = [torch.randn(shape) * 2 + 0.5 for shape in kernel.shapes]
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    exact = kernel.define(*leaves)
    result, *kept = kernel.forward(*inputs)
    check(result, exact)
    if kernel.backward is not None:
        grad = torch.randn(exact.shape)
        wanted = torch.autograd.grad(exact, leaves, grad.double())
        for mine, theirs in zip(kernel.backward(grad, *inputs, *kept), wanted, strict=True):
            check(mine, theirs, 2e-5)


def test_rms_norm_backward_adds_a_gradient() -> None:
    x, dz, weight = torch.randn(6, 16), torch.randn(6, 16), torch.randn(16)
    _, _, rsigma = TEX.rmsnorm_fwd(x, weight, 1e-5, None, None, DType.kFloat32, 0, False)
    mine = TEX.rmsnorm_bwd(dz, x, rsigma, weight, 0, False)
    added = TEX.rmsnorm_bwd_add(dz, x, x, rsigma, weight, 0, False)
    torch.testing.assert_close(added[0], mine[0] + x)
    assert torch.equal(added[1], mine[1])


# -- optimizers -----------------------------------------------------------------------------------

HYPER = (0.01, 0.9, 0.95, 1e-8)
FLAG = torch.zeros(1, dtype=torch.int)


def _adam(
    grads: list[torch.Tensor], p: torch.Tensor, mode: int, decay: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make several steps of Adam in fp64, from its definition."""
    p, m, v = p.double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()
    for step, grad in enumerate(grads, start=1):
        g = grad.double() + (decay * p if mode == 0 else 0)
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g**2
        update = (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        p = p - 0.01 * (update + (decay * p if mode == 1 else 0))
    return p, m, v


@pytest.mark.parametrize("mode", [0, 1], ids=["l2", "decoupled"])
def test_adam_steps_without_and_with_main_weights_or_remainders(mode: int) -> None:
    """A remainder is the lower half of a main weight, whose upper half is the bf16 parameter."""
    start, grads = torch.randn(300), [torch.randn(300) for _ in range(4)]
    exact = _adam(grads, start, mode, 0.1)
    bits = start.view(torch.int32)
    lower = bits.to(torch.int16)
    # Rounded to nearest: one more where the lower half is at least half of its range.
    split = ((bits >> 16) + (lower < 0).int()).to(torch.int16).view(torch.bfloat16)
    plain, low, master = start.clone(), start.bfloat16(), start.clone()
    moments, *others = ([torch.zeros(300), torch.zeros(300)] for _ in range(3))
    for step, grad in enumerate(grads, start=1):
        for function, lists in (
            (TEX.multi_tensor_adam, [grad, plain, *moments]),
            (TEX.multi_tensor_adam, [grad, low, *others[0], master]),
            (TEX.multi_tensor_adam_param_remainder, [grad, split, *others[1], lower]),
        ):
            function(1, FLAG, [[tensor] for tensor in lists], *HYPER, step, mode, 1, 0.1)
    for mine, theirs in zip((plain, *moments), exact, strict=True):
        check(mine, theirs)
    assert torch.equal(master, plain)
    assert torch.equal(low, plain.bfloat16())
    upper = split.view(torch.int16).int() - (lower < 0).int()
    assert torch.equal((upper << 16 | lower.int() & 0xFFFF).view(torch.float32), plain)
    assert bool(((split.float() - plain).abs() <= plain.abs() * 2.0**-8).all())


def test_adam_of_fp8_parameters_quantizes_the_main_weight() -> None:
    start, grad = torch.randn(64), torch.randn(64)
    data, master = torch.zeros(64, dtype=torch.uint8), start.clone()
    scale, amax, scale_inv = torch.tensor([16.0]), torch.tensor([0.1]), torch.zeros(1)
    lists = [grad, data, torch.zeros(64), torch.zeros(64), master, scale, amax, scale_inv]
    end = (*HYPER, 1, 1, 1, 0.0, DType.kFloat8E4M3)
    TEX.multi_tensor_adam_fp8(1, FLAG, [[tensor] for tensor in lists], *end)
    check(master, _adam([grad], start, 1, 0.0)[0])
    assert torch.equal(numbers.from_fp8(data, E4M3).double(), nearest(master.double() * 16, E4M3))
    assert amax.item() == master.abs().max().item()
    assert scale_inv.item() == 1 / 16


def test_capturable_adam_unscales_gradients_and_skips_if_flagged() -> None:
    start, grad = torch.randn(20), torch.randn(20)
    p, scaled = start.clone(), grad * 4
    lists = [[scaled], [p], [torch.zeros(20)], [torch.zeros(20)]]
    rest = (0.9, 0.95, 1e-8, torch.tensor([1]), 1, 1, 0.1, torch.tensor([0.25]))
    TEX.multi_tensor_adam_capturable(1, torch.ones(1).int(), lists, torch.tensor(0.01), *rest)
    assert torch.equal(p, start)
    TEX.multi_tensor_adam_capturable(1, FLAG, lists, torch.tensor(0.01), *rest)
    check(p, _adam([grad], start, 1, 0.1)[0])
    assert torch.equal(scaled, grad)


def test_sgd_matches_torch() -> None:
    p, grads = torch.randn(20), [torch.randn(20) for _ in range(3)]
    leaf = p.double().requires_grad_()
    theirs = torch.optim.SGD([leaf], lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True)
    velocity = torch.zeros(20)
    for step, grad in enumerate(grads):
        leaf.grad = grad.double()
        theirs.step()
        lists = [[grad * 2], [p], [velocity]]
        TEX.multi_tensor_sgd(1, FLAG, lists, 0.2, 0.9, 0.0, 0.1, True, step == 0, False, 0.5)
    check(p, leaf)


def test_scaling_and_norms_of_tensor_lists() -> None:
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
    infinite = [[torch.tensor([torch.inf])], [torch.empty(1)]]
    TEX.multi_tensor_scale_tensor(1, flag, infinite, torch.tensor([2.0]))
    assert flag.item() == 1


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_delayed_scaling_shifts_its_history_and_computes_the_next_scale(algo: str) -> None:
    # Columns: an ordinary tensor, one that was not used, one whose reduced amax is larger.
    history = torch.tensor([[2.0, 0.0, 1.0], [8.0, 5.0, 3.0], [1.0, 6.0, 2.0]])
    scales, reduced = torch.tensor([7.0, 9.0, 5.0]), torch.tensor([2.0, 0.0, 4.0])
    TEX.fused_amax_and_scale_update_after_reduction(
        reduced, [history], [scales], algo, DType.kFloat8E4M3, 1.0
    )
    assert history.tolist() == [[0.0, 0.0, 0.0], [1.0, 5.0, 2.0], [2.0, 6.0, 4.0]]
    amax = [8.0, 0.0, 4.0] if algo == "max" else [2.0, 0.0, 4.0]
    assert scales.tolist() == [224.0 / amax[0], 9.0, 224.0 / amax[2]]


# -- others ---------------------------------------------------------------------------------------


def test_is_cuda_is_true_only_in_transformer_engine() -> None:
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


def test_name_without_a_kernel_raises_not_emulated() -> None:
    with pytest.raises(NotEmulatedError, match=r"transformer_engine_torch\.fused_attn_fwd is not"):
        _ = TEX.fused_attn_fwd
    with pytest.raises(NotEmulatedError, match="CommOverlapHelper is not emulated"):
        TEX.CommOverlapHelper()
    with pytest.raises(NotImplementedError, match="leave out --tp-comm-overlap"):
        _gemm(torch.ones(1, 1), torch.ones(1, 1), "TN", comm_overlap=object())
    assert not hasattr(TEX, "__path__")


def test_packed_sequences_are_rows_of_a_padded_batch() -> None:
    packed, starts = torch.arange(1.0, 13.0).view(6, 2), torch.tensor([0, 4, 4, 5])
    batch = TEX.convert_thd_to_bshd(packed, starts, 3, 4)
    rows = packed[:5].split([4, 0, 1])
    assert torch.equal(batch, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
    back = TEX.convert_bshd_to_thd(batch, starts, 6)
    assert torch.equal(back, torch.cat([packed[:5], torch.zeros(1, 2)]))
