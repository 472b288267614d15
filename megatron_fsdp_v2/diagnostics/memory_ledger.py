"""A ledger of bytes by role and unit: live bytes, and the moments with the most."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


class Role(enum.Enum):
    """Purpose of memory."""

    MAIN_WEIGHT = "main weight"
    """Weights that the optimizer steps."""
    MODEL_WEIGHT = "model weight"
    """Weights that the forward computes with, if they have a separate storage."""
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
        total: Total bytes.
        accounts: Bytes by role and unit.
    """

    phase: str
    unit: str
    total: int
    accounts: Mapping[Account, int]

    def of_role(self, role: Role) -> int:
        """Bytes of a role."""
        return sum(n for account, n in self.accounts.items() if account.role is role)

    def of_unit(self, unit: str) -> dict[Role, int]:
        """Bytes of a unit by role."""
        return {a.role: n for a, n in self.accounts.items() if a.unit == unit}


class Ledger:
    """Counts bytes by role and unit.

    Attributes:
        live: Live bytes by role and unit.
        total: Their sum.
        by_role: Live bytes by role.
        role_peaks: The most bytes of each role, at any moment.
        unit_peaks: The most bytes of each unit, at any moment.
        peak: The moment with the most bytes.
        intervals: The peak of each phase of each unit, in the order of time, by role.
    """

    def __init__(self) -> None:
        self.live: Counter[Account] = Counter()
        self.total = 0
        self.by_role: dict[Role, int] = dict.fromkeys(Role, 0)
        self.role_peaks: dict[Role, int] = dict.fromkeys(Role, 0)
        self.unit_peaks: Counter[str] = Counter()
        self.peak = Moment("start", "", 0, {})
        self.intervals = [self.peak]
        self._by_unit: Counter[str] = Counter()

    def add(self, account: Account, nbytes: int) -> None:
        """Book allocated bytes."""
        self._change(account, nbytes)
        role, unit = account.role, account.unit
        self.role_peaks[role] = max(self.role_peaks[role], self.by_role[role])
        self.unit_peaks[unit] = max(self.unit_peaks[unit], self._by_unit[unit])
        self._compare()

    def remove(self, account: Account, nbytes: int) -> None:
        """Book freed bytes."""
        self._change(account, -nbytes)

    def enter(self, phase: str, unit: str) -> None:
        """Enter a phase of a unit."""
        now = self.intervals[-1]
        if (now.phase, now.unit) != (phase, unit):
            self.intervals.append(Moment(phase, unit, 0, {}))
            self._compare()

    def _change(self, account: Account, nbytes: int) -> None:
        self.live[account] += nbytes
        if not self.live[account]:
            del self.live[account]
        self.by_role[account.role] += nbytes
        self._by_unit[account.unit] += nbytes
        self.total += nbytes

    def _compare(self) -> None:
        """Update the peaks with the current moment."""
        now = self.intervals[-1]
        if self.total > self.peak.total:
            self.peak = Moment(now.phase, now.unit, self.total, dict(self.live))
        if self.total > now.total:
            # By role only, since there are many intervals.
            accounts = {Account(role, ""): nbytes for role, nbytes in self.by_role.items()}
            self.intervals[-1] = Moment(now.phase, now.unit, self.total, accounts)
