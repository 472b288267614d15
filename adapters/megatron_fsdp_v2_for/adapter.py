"""The patches of one framework by version: checked, applied and removed together."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2_patching import Patch, Patches

__all__ = ["Adapter", "with_options"]


class Adapter:
    """The patches that a framework's module installs.

    Args:
        package: Name of the framework's distribution.
        patches: Patches by version of the framework; `0.3` stands for every 0.3.x.
    """

    def __init__(self, package: str, patches: Mapping[str, tuple[Patch, ...]]) -> None:
        self._package = package
        self._patches = dict(patches)
        self._applied = Patches()

    def install(self, sharding_strategy: str | None = "optim_grads_params", **options: Any) -> None:
        """Make the framework shard with this package, in place of an earlier installation.

        Call it before the framework shards a model.

        Args:
            sharding_strategy: See `megatron_fsdp_v2.fully_shard`. None, where a framework has a
                setting for it: that setting.
            options: Further arguments of `fully_shard` that the framework does not give.

        Raises:
            RuntimeError: The framework is not installed, its version is not supported, or a patch
                does not fit. An earlier installation stays in these cases.
        """
        supported = " and ".join(f"{version}.x" for version in self._patches)
        try:
            found = importlib.metadata.version(self._package)
        except importlib.metadata.PackageNotFoundError as error:
            raise RuntimeError(
                f"{self._package} is not installed; supported is {supported}"
            ) from error
        fitting = [v for v in self._patches if f"{found}.".startswith(f"{v}.")]
        if not fitting:
            raise RuntimeError(f"{self._package} {found} is installed; supported is {supported}")
        patches = self._patches[fitting[0]]
        for patch in patches:
            patch.check(f"Installed is {self._package} {found}; supported is {supported}")
        self.uninstall()
        given = {"sharding_strategy": sharding_strategy, **options}
        try:
            for patch in patches:
                # The functions of the adapter of Megatron take no options.
                takes_none = patch.wrap.startswith("megatron_fsdp_v2_mcore.")
                self._applied.apply(patch, *([] if takes_none else [given]))
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Remove the patches of `install()`. Sharded models do not change."""
        self._applied.undo()


def with_options(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a replacement of FSDP2's `fully_shard` that adds options to every call.

    Args:
        original: FSDP2's function.
        options: Arguments of this package's `fully_shard` that the framework does not give.
    """

    def sharded(module: Any, **given: Any) -> Any:
        return fully_shard(module, **given, **options)

    return sharded
