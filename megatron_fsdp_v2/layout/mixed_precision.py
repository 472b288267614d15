"""The precision policy of a unit. A leaf: it knows dtypes and nothing of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["GroupDtypes", "MixedPrecisionPolicy"]


@dataclass(frozen=True, slots=True)
class GroupDtypes:
    """The policy applied to parameters of one dtype; every entry is decided.

    Attributes:
        model_weight: Compute and gather dtype.
        main_weight: Dtype the optimizer steps.
        main_grad: Dtype gradients rest and accumulate in.
        grad_comm: Communication dtype of a gradient reduction.
        sums_in_fp32: Whether a reduce-scatter adds up in fp32 what travels in fewer bits.
    """

    model_weight: torch.dtype
    main_weight: torch.dtype
    main_grad: torch.dtype
    grad_comm: torch.dtype
    sums_in_fp32: bool = False

    @property
    def smallest_itemsize(self) -> int:
        """Bytes of the smallest element; what is aligned in these elements is so in all."""
        weights = min(self.model_weight.itemsize, self.main_weight.itemsize)
        return min(weights, self.main_grad.itemsize, self.grad_comm.itemsize)


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of parameters, gradients, inputs and outputs of a unit.

    `None` means "as the parameter is": `param_dtype` and `main_params_dtype` follow the dtype a
    parameter was given with, `main_grads_dtype` follows the main parameter, and
    `grad_comm_dtype` follows the main gradient.

    Attributes:
        param_dtype: Dtype the forward and backward compute with, and parameters are gathered in.
        main_params_dtype: Dtype of the main (master) weights, which the optimizer steps.
        main_grads_dtype: Dtype of the reduced gradient (`param.grad`) and of its accumulation.
        grad_comm_dtype: Communication dtype of gradients.
        cast_forward_inputs: Cast floating-point tensors among a unit's forward inputs to
            `param_dtype`.
        output_dtype: Cast floating-point tensors among a unit's forward outputs to this dtype.
        reduce_scatter_with_fp32_accumulation: Reduce-scatter gradients that travel in bf16 or fp16
            by an all-to-all and a sum in fp32: as many bytes, and one rounding where NCCL makes one
            for every rank. All-reduces (the outer axis of HSDP) stay in the communication dtype.
    """

    param_dtype: torch.dtype | None = None
    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    output_dtype: torch.dtype | None = None
    reduce_scatter_with_fp32_accumulation: bool = False

    def __post_init__(self) -> None:
        for name in (f.name for f in dataclasses.fields(self) if f.name.endswith("_dtype")):
            dtype = getattr(self, name)
            is_fit = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if dtype is not None and not is_fit:
                raise ValueError(
                    f"MixedPrecisionPolicy.{name} must be a floating-point torch.dtype or None, "
                    f"got {dtype!r}"
                )

    @staticmethod
    def of(policy: object) -> MixedPrecisionPolicy:
        """This policy for one of another library, or for None.

        It has to have `param_dtype`; whatever else it has counts under the names of this class.
        What it calls `reduce_dtype` is the communication dtype. Where that is None, gradients
        travel in `param_dtype`; of the class that torch has from 2.15 on, in the dtype of the
        parameter. So FSDP2 has it.

        Raises:
            ValueError: It is no policy, or asks for something that has no meaning here.
        """
        if policy is None:
            return MixedPrecisionPolicy()
        if isinstance(policy, MixedPrecisionPolicy):
            return policy
        name = f"{type(policy).__module__}.{type(policy).__name__}"
        if isinstance(policy, type) or not hasattr(policy, "param_dtype"):
            raise ValueError(
                "mp_policy must be a MixedPrecisionPolicy of megatron_fsdp_v2 or of "
                f"torch.distributed.fsdp, got {policy!r}"
            )
        known = [field.name for field in dataclasses.fields(MixedPrecisionPolicy)]
        unknown = [n for n in _chosen(policy) if n not in (*known, "reduce_dtype", "resolve")]
        if unknown:
            raise ValueError(
                f"mp_policy is a {name}, whose {', '.join(unknown)} cannot be honored; give a "
                f"megatron_fsdp_v2.MixedPrecisionPolicy, which has {', '.join(known)}"
            )
        values = {name: getattr(policy, name) for name in known if hasattr(policy, name)}
        if values.get("grad_comm_dtype") is None and hasattr(policy, "reduce_dtype"):
            # That class is known by the field that came with the change.
            is_new = hasattr(policy, "param_dtype_override_fn")
            follows = None if is_new else policy.param_dtype
            values["grad_comm_dtype"] = policy.reduce_dtype or follows
        return MixedPrecisionPolicy(**values)

    def resolve(self, dtype: torch.dtype) -> GroupDtypes:
        """Decide every dtype for parameters that were given in `dtype`.

        Parameters that are not floating point (frozen index tables, say) keep their dtype, and so
        do quantized ones of 8 bits: their values mean nothing without a scale that the module has.
        """
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return GroupDtypes(dtype, dtype, dtype, dtype)
        main_weight = self.main_params_dtype or dtype
        main_grad = self.main_grads_dtype or main_weight
        grad_comm = self.grad_comm_dtype or main_grad
        return GroupDtypes(
            model_weight=self.param_dtype or dtype,
            main_weight=main_weight,
            main_grad=main_grad,
            grad_comm=grad_comm,
            sums_in_fp32=self.reduce_scatter_with_fp32_accumulation and grad_comm.itemsize == 2,
        )


def _chosen(policy: object) -> Iterator[str]:
    """Names of what somebody chose in a policy: it is set, and not to its default."""
    if dataclasses.is_dataclass(policy):
        for field in dataclasses.fields(policy):
            if getattr(policy, field.name) not in (field.default, None, False):
                yield field.name
        return
    for name, value in getattr(policy, "__dict__", {}).items():
        if value not in (None, False):
            yield name
