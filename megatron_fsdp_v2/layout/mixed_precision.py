"""The mixed-precision policy of a unit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Dtypes by their short names, on command lines and in reports."""


@dataclass(frozen=True, slots=True)
class GroupDtypes:
    """The policy resolved for parameters of one dtype.

    Attributes:
        model_weight: Compute and gather dtype.
        main_weight: Dtype of the main weights, which the optimizer steps.
        main_grad: Dtype in which gradients are kept and accumulated.
        grad_comm: Communication dtype of a gradient reduction.
        sums_in_fp32: Whether a reduce-scatter sums 16-bit gradients in fp32.
    """

    model_weight: torch.dtype
    main_weight: torch.dtype
    main_grad: torch.dtype
    grad_comm: torch.dtype
    sums_in_fp32: bool = False

    @property
    def smallest_itemsize(self) -> int:
        """Bytes of the smallest dtype; alignment in its elements is alignment in all dtypes."""
        weights = min(self.model_weight.itemsize, self.main_weight.itemsize)
        return min(weights, self.main_grad.itemsize, self.grad_comm.itemsize)


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of parameters, gradients, inputs and outputs of a unit.

    `None` selects a default: `param_dtype` and `main_params_dtype` default to the original dtype
    of a parameter, `main_grads_dtype` to the `grad_dtype` that was set on the parameter, or else to
    the dtype of the main weight, and `grad_comm_dtype` to the dtype of the main gradient.

    Attributes:
        param_dtype: Dtype of gathered parameters, and of computation in the forward and backward.
        main_params_dtype: Dtype of the main (master) weights, which the optimizer steps.
        main_grads_dtype: Dtype of the reduced gradient (`param.grad`) and of its accumulation.
        grad_comm_dtype: Communication dtype of gradients. If it is wider than `main_grads_dtype`,
            gradients are accumulated in it until the synchronized backward.
        cast_forward_inputs: Cast floating-point tensors among a unit's forward inputs to
            `param_dtype`.
        output_dtype: Cast floating-point tensors among a unit's forward outputs to this dtype.
        reduce_scatter_with_fp32_accumulation: Reduce-scatter gradients communicated in bf16 or fp16
            by an all-to-all and a sum in fp32: the same bytes, and one rounding where NCCL rounds
            once per rank. All-reduces (the outer axis of HSDP) stay in the communication dtype.
    """

    param_dtype: torch.dtype | None = None
    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    output_dtype: torch.dtype | None = None
    reduce_scatter_with_fp32_accumulation: bool = False
    reduce_dtype: dataclasses.InitVar[None] = None

    def __post_init__(self, reduce_dtype: None) -> None:
        if reduce_dtype is not None:
            raise TypeError(
                "MixedPrecisionPolicy has no reduce_dtype; the communication dtype of gradients is "
                "grad_comm_dtype, and the dtype in which they are accumulated main_grads_dtype"
            )
        for name in (f.name for f in dataclasses.fields(self) if f.name.endswith("_dtype")):
            dtype = getattr(self, name)
            is_fit = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if dtype is not None and not is_fit:
                raise ValueError(
                    f"MixedPrecisionPolicy.{name} must be a floating-point torch.dtype or None, "
                    f"got {dtype!r}"
                )

    @staticmethod
    def of(policy: Any) -> MixedPrecisionPolicy:
        """Convert a policy of another library, or None, to this class.

        The policy is a dataclass with `param_dtype`; other fields are read under the names of this
        class. Its `reduce_dtype` is the communication dtype. If that is None, gradients are
        communicated in `param_dtype`, or, for torch's class from 2.15 on, in the dtype of the
        parameter, as in FSDP2.

        Raises:
            ValueError: `policy` is not a policy, or sets an unsupported field.
        """
        if policy is None:
            return MixedPrecisionPolicy()
        if isinstance(policy, MixedPrecisionPolicy):
            return policy
        name = f"{type(policy).__module__}.{type(policy).__name__}"
        is_policy = dataclasses.is_dataclass(policy) and hasattr(policy, "param_dtype")
        if isinstance(policy, type) or not is_policy:
            raise ValueError(
                "mp_policy must be a MixedPrecisionPolicy of megatron_fsdp_v2 or of "
                f"torch.distributed.fsdp, got {policy!r}"
            )
        known = [field.name for field in dataclasses.fields(MixedPrecisionPolicy)]
        unknown = [
            field.name
            for field in dataclasses.fields(policy)
            if getattr(policy, field.name) not in (field.default, None, False)
            and field.name not in (*known, "reduce_dtype")
        ]
        if unknown:
            raise ValueError(
                f"mp_policy is a {name}, whose {', '.join(unknown)} cannot be honored; give a "
                f"megatron_fsdp_v2.MixedPrecisionPolicy, which has {', '.join(known)}"
            )
        values = {name: getattr(policy, name) for name in known if hasattr(policy, name)}
        if values.get("grad_comm_dtype") is None and hasattr(policy, "reduce_dtype"):
            # The class of torch 2.15 is recognized by a field that it introduced.
            is_new = hasattr(policy, "param_dtype_override_fn")
            follows = None if is_new else policy.param_dtype
            values["grad_comm_dtype"] = policy.reduce_dtype or follows
        return MixedPrecisionPolicy(**values)

    def resolve(self, dtype: torch.dtype, grad_dtype: torch.dtype | None = None) -> GroupDtypes:
        """Resolve every dtype for parameters whose original dtype is `dtype`.

        Integer parameters (frozen index tables, for example) keep their dtype, and so do 8-bit
        quantized parameters: their values are meaningless without the module's scale.

        Args:
            dtype: Original dtype of the parameters.
            grad_dtype: Dtype that was set for their gradients, if any.
        """
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return GroupDtypes(dtype, dtype, dtype, dtype)
        main_weight = self.main_params_dtype or dtype
        main_grad = self.main_grads_dtype or grad_dtype or main_weight
        grad_comm = self.grad_comm_dtype or main_grad
        return GroupDtypes(
            model_weight=self.param_dtype or dtype,
            main_weight=main_weight,
            main_grad=main_grad,
            grad_comm=grad_comm,
            sums_in_fp32=self.reduce_scatter_with_fp32_accumulation and grad_comm.itemsize == 2,
        )
