"""A ledger of bytes by role and unit: live bytes, and the moments with the most."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Account", "Ledger", "Moment", "Role"]


class Role(enum.Enum):
    """Purpose of memory."""

    MAIN_WEIGHT = "main weight"
    """Weights that the optimizer steps."""
    MODEL_WEIGHT = "model weight"
    """Weights that the forward computes with, if they have storage of their own."""
    MAIN_GRAD = "main gradient"
    """Gradients that the optimizer reads."""
    OPTIMIZER = "optimizer"
    """Optimizer state, and temporaries of the optimizer's step."""
    OTHER = "other"
    """Parameters and buffers of the model that are not sharded."""
    GATHERED = "gathered"
    """Gathered weights of units that compute, or are prefetched."""
    GRAD_BUFFER = "gradient buffer"
    """Full gradients before their reduction, and shards between the two axes of a mesh."""
    COMMUNICATION = "communication"
    """Copies in the communication dtype, and receive buffers of a CPU."""
    POOL = "idle in the pool"
    """Memory of the traced pool that no live buffer uses."""
    ACTIVATIONS = "activations"
    """Everything else."""


@dataclass(frozen=True, slots=True)
class Account:
    """Role and unit of some bytes.

    Attributes:
        role: Their role.
        unit: Name of the unit; empty for the root and for bytes of no unit.
    """

    role: Role
    unit: str


@dataclass(frozen=True, slots=True)
class Moment:
    """Live bytes at one moment.

    Attributes:
        phase: Phase of the step, such as `backward`.
        unit: Name of the unit in that phase; empty for the root.
        accounts: Bytes by role and unit.
    """

    phase: str
    unit: str
    accounts: Mapping[Account, int]

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.accounts.values())

    def of_role(self, role: Role) -> int:
        """Bytes of a role."""
        return sum(n for account, n in self.accounts.items() if account.role is role)

    def of_unit(self, unit: str) -> dict[Role, int]:
        """Bytes of a unit by role."""
        return {a.role: n for a, n in self.accounts.items() if a.unit == unit and n}


class _Highest:
    """The moment with the most bytes; copied when bytes fall again."""

    def __init__(self) -> None:
        self.total = 0
        self.moment: Moment | None = None
        self._is_now = False

    def rise(self, total: int) -> None:
        if total > self.total:
            self.total, self._is_now = total, True

    def settle(self, phase: str, unit: str, accounts: Mapping[Account, int]) -> None:
        if self._is_now:
            self.moment = Moment(phase, unit, {a: n for a, n in accounts.items() if n})
            self._is_now = False


class Ledger:
    """Books bytes.

    Attributes:
        live: Live bytes by role and unit.
        total: Their sum.
        role_peaks: The most bytes of each role, at any moment.
        unit_peaks: The most bytes of each unit, at any moment.
    """

    def __init__(self) -> None:
        self.live: Counter[Account] = Counter()
        self.total = 0
        self.role_peaks: dict[Role, int] = dict.fromkeys(Role, 0)
        self.unit_peaks: Counter[str] = Counter()
        self._of_role: Counter[Role] = Counter()
        self._of_unit: Counter[str] = Counter()
        self._now = ("start", "")
        self._highest = _Highest()
        self._interval = _Highest()
        self._intervals: list[Moment] = []

    def add(self, account: Account, nbytes: int) -> None:
        """Book allocated bytes."""
        self._change(account, nbytes)
        role, unit = account.role, account.unit
        self.role_peaks[role] = max(self.role_peaks[role], self._of_role[role])
        self.unit_peaks[unit] = max(self.unit_peaks[unit], self._of_unit[unit])
        self._highest.rise(self.total)
        self._interval.rise(self.total)

    def remove(self, account: Account, nbytes: int) -> None:
        """Book freed bytes."""
        self._settle()
        self._change(account, -nbytes)

    def enter(self, phase: str, unit: str) -> None:
        """Enter a phase of a unit."""
        if self._now == (phase, unit):
            return
        self._settle()
        if self._interval.moment is not None:
            self._intervals.append(self._interval.moment)
        self._interval = _Highest()
        self._now = (phase, unit)
        self._interval.rise(self.total)

    @property
    def by_role(self) -> dict[Role, int]:
        """Live bytes by role."""
        return {role: self._of_role[role] for role in Role}

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes."""
        self._settle()
        return self._highest.moment or Moment(*self._now, {})

    def intervals(self) -> Iterator[Moment]:
        """The peak of each phase of each unit, in the order of time, by role."""
        self._settle()
        yield from self._intervals
        if self._interval.moment is not None:
            yield self._interval.moment

    def _change(self, account: Account, nbytes: int) -> None:
        self.live[account] += nbytes
        self._of_role[account.role] += nbytes
        self._of_unit[account.unit] += nbytes
        self.total += nbytes

    def _settle(self) -> None:
        self._highest.settle(*self._now, self.live)
        # By role alone, since there are many intervals.
        by_role = {Account(role, ""): n for role, n in self._of_role.items()}
        self._interval.settle(*self._now, by_role)
