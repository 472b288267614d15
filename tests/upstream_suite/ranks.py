"""Upstream's tests on the ranks of a pool: pytest collects and runs them in each process."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

import tests
from benchmarks.live_bytes import LiveBytes
from tests.upstream_suite import shim

FOLDER = "tests/unit_tests/distributed"

OPTIONS = ["-q", "--noconftest", "--tb=short", "-c", os.devnull]
OPTIONS += [word for name in ("cacheprovider", "faulthandler") for word in ("-p", f"no:{name}")]


class _Generator(torch.Generator):
    """A generator of the CPU."""

    def __new__(cls, device: object = None) -> Self:
        del device
        return super().__new__(cls)


class Plugin:
    """Upstream's fixtures without downloads and GPUs, and a record of the run.

    Args:
        folder: A folder that all ranks share.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nodes: list[str] = []
        self.errors: list[str] = []

    @pytest.fixture
    def distributed_setup(self, request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
        """The existing process group; tests of memory count that of the CPU."""
        setup = SimpleNamespace(
            rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu")
        )
        if request.path.name != "test_memory.py":
            yield setup
            return
        with (
            LiveBytes() as meter,
            mock.patch.multiple(
                torch.cuda,
                memory_allocated=lambda device: meter.now,
                max_memory_allocated=lambda device: meter.peak,
                reset_peak_memory_stats=lambda device: setattr(meter, "peak", meter.now),
            ),
        ):
            yield setup

    @pytest.fixture
    def tmp_path_dist_ckpt(self) -> Path:
        """The shared folder."""
        return self._folder

    @pytest.fixture(autouse=True)
    def on_cpu(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """A CPU and the shared folder, for tests that name CUDA devices and another folder."""
        make = device_mesh.init_device_mesh
        monkeypatch.setattr(device_mesh, "init_device_mesh", lambda _, **axes: make("cpu", **axes))
        monkeypatch.setattr(torch, "Generator", _Generator)
        monkeypatch.setattr(request.module, "SHARED_TMP_DIR", str(self._folder), raising=False)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the collected tests."""
        self.nodes = [item.nodeid for item in session.items]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be imported."""
        if report.failed:
            self.errors.append(report.longreprtext)

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        """Record an error."""
        del node, call
        self.errors.append(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a skip."""
        if report.skipped:
            self.errors.append(f"SkipTest: {report.longrepr}")


@functools.cache
def _substitute(checkout: Path) -> None:
    """Replace upstream's modules, and find its tests' helpers."""
    sys.modules.update(shim.modules())
    tests.__path__.append(str(checkout / "tests"))


def collect(checkout: Path, files: list[str]) -> list[str]:
    """Return the names of the tests in some files."""
    _substitute(checkout)
    plugin = Plugin(checkout)
    paths = [str(checkout / FOLDER / file) for file in files]
    rootdir = f"--rootdir={checkout / FOLDER}"
    pytest.main([*OPTIONS, rootdir, "--collect-only", *paths], plugins=[plugin])
    assert plugin.nodes, plugin.errors
    assert not plugin.errors, "\n".join(plugin.errors)
    return plugin.nodes


def run(checkout: Path, node: str, folder: Path) -> None:
    """Run a test on this rank; an error or a skip is an AssertionError."""
    _substitute(checkout)
    plugin = Plugin(folder)
    rootdir = f"--rootdir={checkout / FOLDER}"
    pytest.main([*OPTIONS, rootdir, str(checkout / FOLDER / node)], plugins=[plugin])
    assert plugin.nodes, node
    assert not plugin.errors, "\n".join(plugin.errors)
