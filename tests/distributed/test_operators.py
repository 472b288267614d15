"""Operators of torch's OpInfo database on sharded parameters: right, or a clear error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import longer
from tests.distributed import operators_on_ranks
from tests.distributed.operators_on_ranks import REFUSED, RIGHT, ROWS, WRONG
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
"""Of every kind one or two."""

FEWEST = 0.9
"""Share of the operators that are right; others are an error by name."""


def _check(pools: RankPools, names: list[str], rows: str, ranks: int, mixed: bool) -> None:
    found: dict[str, list[Any]] = {}
    for start in range(0, len(names), 60):
        batch = names[start : start + 60]
        per_rank = pools(ranks).run(
            operators_on_ranks.verdicts, batch, rows, mixed=mixed, timeout_s=240.0
        )
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
    assert mixed or right >= FEWEST * decided, (right, decided)


@pytest.mark.parametrize(("rows", "ranks"), [("uneven", 2), ("empty", 3)])
def test_some_operators_are_those_of_the_whole_forward_and_backward(
    pools: RankPools, rows: str, ranks: int
) -> None:
    _check(pools, SOME.split(), rows, ranks, mixed=False)


@pytest.mark.parametrize(
    ("rows", "ranks", "mixed"),
    [longer(rows, ranks, m) for rows in ROWS for ranks in (2, 3) for m in (False, True)],
)
def test_every_operator_is_that_of_the_whole_or_an_error_on_all_ranks(
    pools: RankPools, rows: str, ranks: int, mixed: bool
) -> None:
    _check(pools, sorted(operators_on_ranks.operators()), rows, ranks, mixed)
