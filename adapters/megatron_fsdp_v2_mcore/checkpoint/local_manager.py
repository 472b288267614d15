"""The resiliency extension's manager of local checkpoints, with failures that all ranks notice.

In the extension's own manager, an error in a rank's file or folder is raised on this rank alone,
and the others wait for it. At the end of a save, the extension compares what all ranks have, and
raises on all of them if a file is missing. So here, an error of a rank only leaves its file out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, override

from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    CheckpointingException,
    CkptID,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)

from megatron_fsdp_v2.checkpoint.errors import everyones
from megatron_fsdp_v2.checkpoint.saving import failure_reason
from megatron_fsdp_v2_mcore.checkpoint.failed_saves import report
from megatron_fsdp_v2_mcore.checkpoint.local import LocalSaveError


class CheckedManager(LocalCheckpointManager):
    """A manager whose saves fail on all ranks, with the error of the rank that caused it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Errors of this rank by the iteration of the save, until the save is complete.
        self._problems: dict[int, str] = {}

    @override
    def save(self, state_dict: Any, iteration: int, is_async: bool = False) -> Any:
        """Save a state, as the extension does. Collective.

        Raises:
            LocalSaveError: The save failed. Raised on all ranks; by the request's finalization, if
                it is asynchronous.
        """
        with self._checked(iteration, is_over=not is_async):
            request = super().save(state_dict, iteration, is_async)
        if request is None:
            return None

        def finalize() -> None:
            with self._checked(iteration, is_over=True):
                for function in request.finalize_fns:
                    function()

        return request._replace(finalize_fns=[finalize])

    @contextlib.contextmanager
    def _checked(self, iteration: int, *, is_over: bool) -> Iterator[None]:
        """Name the ranks' errors if the extension finds that files are missing. Collective."""
        try:
            yield
        except CheckpointingException as error:
            problems = everyones(self._problems.pop(iteration, ""))
            found = [f"on rank {rank}, {text}" for rank, text in enumerate(problems) if text]
            raise LocalSaveError(
                f"saving iteration {iteration} to {self.root_local_ckpt_dir} failed, and earlier "
                f"local checkpoints remain: {found[0] if found else error}"
            ) from error
        if is_over and (problem := self._problems.pop(iteration, "")):
            report(
                f"a file of iteration {iteration} in {self.local_ckpt_dir} could not be written, "
                f"and another rank has a copy: {problem}"
            )

    @override
    def _save(self, state_dict: Any, ckpt_id: CkptID) -> None:
        try:
            super()._save(state_dict, ckpt_id)
        except Exception as error:
            iteration, *_ = ckpt_id
            self._problems[iteration] = failure_reason(error)
            # A part of a file takes room that the next save may need.
            with contextlib.suppress(OSError):
                self._local_ckpt_path_from_id(ckpt_id, is_dirty=True).unlink(missing_ok=True)

    @override
    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        # All ranks exchange what they have.
        found: Iterable[CkptID] = []
        with contextlib.suppress(OSError):
            found = super()._my_ckpt_ids()
        return found

    @override
    def _cleanup(self, iteration: int) -> None:
        # A file that cannot be removed is removed, or fails, at the next save.
        with contextlib.suppress(OSError):
            super()._cleanup(iteration)

    @override
    def _cleanup_failed_save(self, iteration: int) -> None:
        with contextlib.suppress(OSError):
            super()._cleanup_failed_save(iteration)
