"""Operators of torch's OpInfo database on sharded parameters: a correct result or a clear error."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from megatron_fsdp_v2.dtensor.row_shards import RowShards
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.cases import longer
from tests.distributed.wrapping import mesh_of, whole
from tests.ranks import RankPools

pytest.importorskip("expecttest", reason="torch's OpInfo needs it; `make setup` installs it")

SOME = """
add __getitem__ __rpow__ __rsub__ amax argsort bmm cat chunk clone contiguous copysign cov cumsum
diagonal einsum expand flatten fmod gather index_add index_copy index_select kthvalue lerp
linalg.norm linalg.qr linalg.svd linalg.vector_norm log_softmax logsumexp masked_fill masked_select
matmul max.binary max.reduction_with_dim mean median mode nan_to_num narrow nn.functional.gelu
nn.functional.layer_norm nn.functional.linear nn.functional.mse_loss nn.functional.normalize
nn.functional.pad.constant nn.functional.glu norm norm.fro norm.inf outer prod quantile reshape
resize_ roll round.decimals_3 scatter_add select slice softmax sort split squeeze stack std sum t
take_along_dim tensordot tile to_sparse topk transpose tril unbind unfold unique unsqueeze var_mean
view vsplit where zeros_like
"""
"""One or two operators of every kind."""

OF_ONE_TENSOR = """
abs acos alias_copy amax amin angle asin asinh atan atanh atleast_1d atleast_2d atleast_3d ceil
cholesky_inverse clone conj conj_physical contiguous corrcoef cos cosh cov cumulative_trapezoid
deg2rad diag diag_embed diagflat diagonal diagonal_copy digamma erf erfc erfinv exp exp2 expm1
fft.fft fft.fftn fft.fftshift fft.hfft fft.hfft2 fft.hfftn fft.ifft fft.ifftn fft.ifftshift
fft.ihfft fft.ihfftn fft.irfft fft.irfftn fft.rfft fft.rfftn flatten fliplr flipud floor frac frexp
i0 lgamma linalg.cond linalg.det linalg.diagonal linalg.qr linalg.svdvals linalg.vander log1p
matrix_exp mean median mode msort nan_to_num nanmean nanmedian nansum neg nn.functional.celu
nn.functional.elu nn.functional.hardshrink nn.functional.hardsigmoid nn.functional.hardswish
nn.functional.hardtanh nn.functional.leaky_relu nn.functional.logsigmoid nn.functional.mish
nn.functional.pdist nn.functional.relu nn.functional.relu6 nn.functional.selu nn.functional.silu
nn.functional.softshrink nn.functional.softsign nn.functional.tanhshrink pinverse positive prod qr
rad2deg ravel real reciprocal resolve_conj resolve_neg rot90 round rsqrt sigmoid sign sin sinc sinh
sort special.erfcx special.i0e special.i1 special.i1e special.log_ndtr special.ndtr sqrt square std
std_mean sum t t_copy tan tanh trace trapezoid trapz tril triu trunc var var_mean
"""
"""Functions and methods of a single tensor. Random cases compute losses of parameters with them, so
they must be correct on sharded tensors, draw no random numbers and keep the precision."""

FEWEST, FEWEST_MIXED = 0.9, 0.6
"""Minimum shares of correct operators: with all tensors sharded, and with plain tensors too. The
other operators raise named errors."""


ROWS = ("even", "uneven", "empty")
"""Distributions of rows: as even as possible, most rows on rank 0, no rows on rank 0."""

RIGHT, WRONG, REFUSED, SKIPPED = "right", "wrong", "refused", "skipped"
NOT_COMPARED = (
    *("empty", "rand", "dropout", "bernoulli", "uniform", "normal", "cauchy", "exponential"),
    "geometric",
)
"""Parts of names of operators that return uninitialized memory or random numbers."""


@functools.cache
def operators() -> dict[str, Any]:
    """OpInfo entries that support fp32, by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op
        for op in op_db
        if torch.float32 in op.dtypes and not op.name.startswith(("_refs", "_native", "ops."))
    }


def sharded_at(length: int, ranks: int, rows: str) -> list[tuple[int, int]]:
    """Row range of every rank."""
    if rows == "even":
        step = -(-length // ranks)
        cuts = [min(step * rank, length) for rank in range(ranks + 1)]
    elif rows == "uneven":
        cuts = [0, *(max(length - ranks + 1 + rank, 0) for rank in range(ranks))]
    else:
        cuts = [0, 0, *(length - ranks + 2 + rank for rank in range(ranks - 1))]
        cuts = [max(cut, 0) for cut in cuts]
    return list(itertools.pairwise(cuts))


def sharded(full: torch.Tensor, rows: str) -> torch.Tensor:
    """A tensor, sharded as in this package."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ranges = sharded_at(full.shape[0], ranks, rows)
    start, end = ranges[rank]
    local = full.detach()[start:end].clone()
    shards = RowShards(tuple(ranges), (1,))
    return UnevenDTensor.from_rows(local, mesh_of(ranks), shards, full.shape)


def samples(name: str, most: int) -> Iterator[Any]:
    """Inputs, identical across ranks, of which the first is a parameter of 1 to 3 dimensions."""
    op, found = operators()[name], set()
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
        first = sample.input
        is_dense = isinstance(first, torch.Tensor) and first.layout is torch.strided
        if not is_dense or not first.is_floating_point():
            continue
        if not 1 <= first.ndim <= 3 or first.shape[0] < 2 or not first.numel():
            continue
        kind = first.ndim, len(sample.args), tuple(sorted(sample.kwargs))
        if kind not in found:
            found.add(kind)
            yield sample
        if len(found) == most:
            return


def _outcome(func: Callable[..., Any], param: torch.Tensor, rest: Any, trains: bool) -> Any:
    """Results and the gradient, as full plain tensors."""
    args, kwargs = rest
    torch.manual_seed(0)
    found = [leaf for leaf in tree_flatten(func(param, *args, **kwargs))[0] if leaf is not None]
    for leaf in found:
        if type(leaf) is DTensor and isinstance(param, UnevenDTensor):
            assert all(p.is_replicate() for p in leaf.placements), f"DTensor {leaf.placements}"
    wholes = [whole(leaf) for leaf in found]
    trained = [w for w in wholes if isinstance(w, torch.Tensor) and w.requires_grad]
    grad = None
    if trains and trained:
        generator = torch.Generator().manual_seed(1)
        terms = [
            (w.abs() * torch.rand(w.shape, generator=generator)).sum() for w in trained if w.numel()
        ]
        sum(terms).backward()
        grad = param.grad
        if type(grad) is DTensor and isinstance(param, UnevenDTensor):
            raise AssertionError("gradient is a DTensor")
        grad = None if grad is None else whole(grad)
    return [w.detach() if isinstance(w, torch.Tensor) else w for w in wholes], grad


def _same(mine: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(mine, torch.Tensor)
            and mine.shape == expected.shape
            and torch.allclose(mine, expected.to(mine.dtype), 1e-3, 1e-4, equal_nan=True)
        )
    return bool(mine == expected) or str(mine) == str(expected) == "nan"


def verdict(name: str, rows: str, *, mixed: bool = False, most: int = 3) -> list[tuple[str, str]]:
    """Outcomes of an operator's forward and backward for some samples.

    Args:
        name: One of `operators`.
        rows: One of `ROWS`.
        mixed: Whether other tensors stay plain instead of being sharded.
        most: Maximum number of samples.
    """
    op = operators()[name]
    trains = op.supports_autograd
    found = []
    for sample in samples(name, most):
        rest = sample.args, sample.kwargs

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or mixed or leaf.ndim == 0:
                return leaf
            has_rows = leaf.layout is torch.strided and leaf.shape[0]
            return sharded(leaf, rows) if has_rows else leaf

        plain = torch.nn.Parameter(sample.input.detach().clone(), requires_grad=trains)
        try:
            copies = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, rest)
            expected = _outcome(op.op, plain, copies, trains)
        except Exception:
            found.append((SKIPPED, "the unsharded one fails"))
            continue
        param = torch.nn.Parameter(sharded(sample.input, rows), requires_grad=trains)
        try:
            mine = _outcome(op.op, param, tree_map(wrapped, rest), trains)
        except AssertionError as error:
            found.append((WRONG, str(error)))
            continue
        except Exception as error:
            found.append((REFUSED, f"{type(error).__name__}: {str(error)[:300]}"))
            continue
        if any(word in name for word in NOT_COMPARED):
            found.append((SKIPPED, "random"))
            continue
        what = ""
        if len(mine[0]) != len(expected[0]) or not all(map(_same, mine[0], expected[0])):
            what = "values"
        elif (mine[1] is None) != (expected[1] is None) or not (
            mine[1] is None or _same(mine[1], expected[1])
        ):
            what = "gradient"
        found.append((WRONG, what) if what else (RIGHT, ""))
    return found


def verdicts(names: Sequence[str], rows: str, **options: Any) -> dict[str, Any]:
    """`verdict` of several operators."""
    return {name: verdict(name, rows, **options) for name in names}


def _check(pools: RankPools, names: list[str], rows: str, ranks: int, mixed: bool) -> None:
    found: dict[str, list[Any]] = {}
    for start in range(0, len(names), 60):
        batch = names[start : start + 60]
        per_rank = pools(ranks).run(verdicts, batch, rows, mixed=mixed, timeout_s=240.0)
        for name in batch:
            found[name] = [[(kind, text) for kind, text in one[name]] for one in per_rank]
    wrong = {
        name: verdicts
        for name, verdicts in found.items()
        if any([v[0] for v in one] != [v[0] for v in verdicts[0]] for one in verdicts)
        or any(kind == WRONG for one in verdicts for kind, _ in one)
    }
    kinds = [{kind for kind, _ in verdicts[0]} for verdicts in found.values()]
    right = sum(RIGHT in kind and REFUSED not in kind for kind in kinds)
    decided = sum(bool(kind & {RIGHT, REFUSED}) for kind in kinds)
    assert not wrong
    if not mixed:
        assert not {n for n in OF_ONE_TENSOR.split() if REFUSED in dict(found.get(n, [[]])[0])}
    assert right >= (FEWEST_MIXED if mixed else FEWEST) * decided, (right, decided)


@pytest.mark.slow
def test_selected_operators_equal_the_unsharded_ones_forward_and_backward(pools: RankPools) -> None:
    _check(pools, SOME.split(), "empty", 3, mixed=False)


@pytest.mark.parametrize(
    ("rows", "ranks", "mixed"),
    [longer(rows, 2 + place % 2, place == 0) for place, rows in enumerate(ROWS)],
)
def test_every_operator_equals_the_unsharded_one_or_raises_on_all_ranks(
    pools: RankPools, rows: str, ranks: int, mixed: bool
) -> None:
    _check(pools, sorted(operators()), rows, ranks, mixed)
