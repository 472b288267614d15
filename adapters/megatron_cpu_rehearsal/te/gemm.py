"""Products of matrices, plain or quantized, single or grouped.

A tensor is viewed as a matrix `(M, K)`, where `K` is its last dimension. The kernels have the
interface of a library with column-major matrices; in row-major terms, `D = op(B) @ op(A)`:

* `TN`, a forward: `A` weight `(out, in)`, `B` input `(tokens, in)`, `D` `(tokens, out)`;
* `NN`, a gradient of an input: `A` weight, `B` gradient `(tokens, out)`, `D` `(tokens, in)`;
* `NT`, a gradient of a weight: `A` input, `B` gradient, `D` `(out, in)`.

For a quantized operand, the payload with blocks along the contracted dimension is read: the
row-wise payload of a transposed `A` and of a non-transposed `B`, otherwise the column-wise payload.
Sums are computed in fp32 and rounded once, after adding the bias, applying the activation and
accumulating. The summation order of a tensor core (`use_split_accumulator`) is not emulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_cpu_rehearsal.te import quant, storages
from megatron_cpu_rehearsal.te.activations import gelu_slope, gelu_value
from megatron_cpu_rehearsal.te.enums import TORCH_DTYPES

__all__ = ["generic_gemm", "te_general_grouped_gemm"]


def _operand(tensor: Any, way: str) -> torch.Tensor:
    """Dequantize an operand's payload to a matrix of fp32 values."""
    if storages.is_quantized(tensor):
        return storages.dequantized(tensor, way)
    plain: torch.Tensor = tensor.detach()
    return plain.reshape(-1, plain.shape[-1]).float()


def _output_shape(a: Any, trans_a: bool, b: Any, trans_b: bool) -> tuple[int, ...]:
    """Return the shape of `D`, which has the leading dimensions of a non-transposed `B`."""
    last_of_a = storages.shape_of(a)[-1]
    rows_of_a = 1
    for size in storages.shape_of(a)[:-1]:
        rows_of_a *= size
    columns = rows_of_a if trans_a else last_of_a
    return (storages.shape_of(b)[-1], columns) if trans_b else (*storages.shape_of(b)[:-1], columns)


def _product(a: Any, trans_a: bool, b: Any, trans_b: bool) -> torch.Tensor:
    """Compute `op(B) @ op(A)` in fp32, as a matrix."""
    left = _operand(b, "columnwise" if trans_b else "rowwise")
    right = _operand(a, "rowwise" if trans_a else "columnwise")
    return (left.t() if trans_b else left) @ (right.t() if trans_a else right)


def _column_sums(b: Any, trans_b: bool) -> torch.Tensor:
    """Compute the gradient of a bias: the sum of a gradient over its rows, in fp32.

    Raises:
        NotImplementedError: The payload is a transform of the gradient.
    """
    way = "columnwise" if trans_b else "rowwise"
    if storages.is_transformed(b, way):
        raise NotImplementedError(
            "a bias's gradient cannot be computed from the Hadamard transform of a gradient"
        )
    return _operand(b, way).sum(0)


def _is_empty(*operands: Any) -> bool:
    return any(0 in storages.shape_of(operand) for operand in operands)


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: int | None,
    bias: torch.Tensor | None,
    bias_type: int,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Compute `D = alpha * op(B) @ op(A) + beta * D` with fused operations.

    Args:
        A: Operand; see the module's docstring.
        transA: Whether `A` is transposed.
        B: Operand.
        transB: Whether `B` is transposed.
        D: A tensor to write into.
        quantizer: Quantizes the result.
        output_dtype: A `DType`; if None, that of `A`.
        bias: Forward: added to every row. Backward: if given, the gradient of the bias is computed,
            which is the sum of `B` over its rows.
        bias_type: A `DType`: the dtype of the saved gelu input for FP8 operands.
        gelu: Forward: a gelu follows. Backward: the result is multiplied by its slope.
        gelu_in: Input of the gelu, for its slope.
        grad: Whether this is a backward.
        workspace: Workspace of a GPU; ignored.
        workspace_size: Ignored.
        accumulate: Whether to add to the values of `D`.
        use_split_accumulator: Ignored: every sum is computed in fp32.
        comm_overlap: Not emulated.
        comm_type: Not emulated.
        extra_output: Not emulated.
        bulk_overlap: Not emulated.
        alpha: Factor of the product.
        beta: Factor of the values in `D`; 1 with `accumulate`.

    Returns:
        `D`; the gradient of the bias `(N,)` or None; the input of the gelu or None;
        `extra_output`.

    Raises:
        NotImplementedError: An overlap with a collective is requested.
    """
    del workspace, workspace_size, use_split_accumulator, comm_type, bulk_overlap
    if comm_overlap is not None:
        raise NotImplementedError(
            "the CPU rehearsal does not emulate user buffers: leave out --tp-comm-overlap"
        )
    shape = _output_shape(A, transA, B, transB)
    dtype = _result_dtype(A, D, output_dtype)
    if _is_empty(A, B):
        values = torch.zeros(shape, dtype=torch.float32)
    else:
        values = alpha * _product(A, transA, B, transB).reshape(shape)
    bias_grad = pre_gelu = None
    if grad:
        if gelu:
            assert gelu_in is not None
            values = values * gelu_slope(gelu_in.float().view(shape))
        if bias is not None:
            summed = (
                values.reshape(-1, values.shape[-1]).sum(0) if gelu else _column_sums(B, transB)
            )
            bias_grad = summed.to(dtype)
    else:
        if bias is not None and bias.numel():
            values = values + bias.float()
        if gelu:
            is_fp8 = storages.is_quantized(A) or storages.is_quantized(B)
            pre_gelu = values.to(TORCH_DTYPES[int(bias_type)] if is_fp8 else dtype)
            values = gelu_value(values)
    if accumulate:
        values = values + (1.0 if beta is None else beta) * D.float().view(shape)
    return [_stored(values, dtype, D, quantizer), bias_grad, pre_gelu, extra_output]


def _result_dtype(a: Any, d: Any, output_dtype: int | None) -> torch.dtype:
    """Return the dtype of a product that is not quantized."""
    if output_dtype is not None:
        dtype = TORCH_DTYPES[int(output_dtype)]
        if d is not None and not storages.is_quantized(d) and d.dtype != dtype:
            raise ValueError(f"a product of {dtype} cannot be written to a tensor of {d.dtype}")
        return dtype
    return a.dtype if isinstance(a, torch.Tensor) else a._dtype


def _stored(values: torch.Tensor, dtype: torch.dtype, output: Any, quantizer: Any) -> Any:
    """Round a result into `output` or a new tensor, and quantize it if a quantizer is given."""
    if quantizer is None:
        return values.to(dtype) if output is None else output.copy_(values.view(output.shape))
    return quant.finished(values, dtype, quantizer, output)


def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor] | None,
    D_type: int,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: int,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Sequence[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[torch.Tensor]:
    """Compute one product per expert, `D[i] = op(B[i]) @ op(A[i])`; see `generic_gemm`.

    Args:
        A: Operands, one per expert.
        transa: Whether the operands `A` are transposed.
        B: Operands.
        transb: Whether the operands `B` are transposed.
        D: Tensors to write into, or one tensor for the concatenated results.
        D_type: A `DType`.
        m_splits: Rows of each expert; ignored, since the operands have this number of rows.
        bias: Forward: biases. Backward: tensors into which the biases' gradients are written. An
            empty tensor means no bias.
        bias_type: A `DType`; ignored.
        single_output: Whether `D` has one tensor for all experts.
        pre_gelu_out: Tensors into which the inputs of a gelu are written; empty without a gelu.
        grad: Whether this is a backward.
        workspace: Workspace of a GPU; ignored.
        workspace_size: Ignored.
        accumulate: Whether to add to the values of `D`.
        use_split_accumulator: Ignored.
        math_sm_count: Ignored.

    Returns:
        `bias`.
    """
    del m_splits, bias_type, workspace, workspace_size, use_split_accumulator, math_sm_count
    start = 0
    outputs: list[torch.Tensor] = []
    for expert, (a, b) in enumerate(zip(A, B, strict=True)):
        shape = _output_shape(a, transa, b, transb)
        if single_output:
            assert D is not None, "a single output has to exist"
            numel = torch.Size(shape).numel()
            outputs.append(D[0].view(-1)[start : start + numel].view(shape))
            start += numel
        else:
            outputs.append(
                torch.empty(shape, dtype=TORCH_DTYPES[int(D_type)]) if D is None else D[expert]
            )
        _grouped_product(
            a, transa, b, transb, outputs[-1], bias[expert], pre_gelu_out[expert], grad, accumulate
        )
    return list(bias)


def _grouped_product(
    a: Any,
    trans_a: bool,
    b: Any,
    trans_b: bool,
    output: torch.Tensor,
    bias: torch.Tensor,
    pre_gelu: torch.Tensor,
    grad: bool,
    accumulate: bool,
) -> None:
    """One expert's product, bias and gelu, written into `output`."""
    if _is_empty(a, b):
        if not accumulate:
            output.zero_()
        if grad:
            bias.zero_()
        pre_gelu.zero_()
        return
    values = _product(a, trans_a, b, trans_b)
    if grad and bias.numel():
        bias.copy_(_column_sums(b, trans_b))
    elif bias.numel():
        values = values + bias.float()
    if pre_gelu.numel():
        if grad:
            values = values * gelu_slope(pre_gelu.float().view_as(values))
        else:
            pre_gelu.copy_(values.view_as(pre_gelu))
            values = gelu_value(values)
    if accumulate:
        values = values + output.float().view_as(values)
    output.copy_(values.view(output.shape))
