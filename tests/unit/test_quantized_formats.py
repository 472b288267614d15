"""Registration of quantized weight formats by version of Transformer Engine."""

from __future__ import annotations

import sys
import types

import pytest

from megatron_fsdp_v2_mcore import formats


@pytest.fixture(autouse=True)
def _clear_cache() -> None:
    formats._register.cache_clear()


def test_no_formats_are_registered_without_transformer_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert formats.register_formats() is False


def test_untested_version_warns_and_missing_classes_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package can be imported and has none of the known tensor classes."""
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.delitem(sys.modules, "megatron_fsdp_v2_mcore.formats.quantized", raising=False)
    monkeypatch.setattr(formats.metadata, "version", lambda name: "3.1.0")
    untested = r"tested with Transformer Engine 2\.20, and 3\.1\.0 is installed"
    lacking = r"3\.1\.0 lacks the classes of quantized weights"
    with pytest.warns(UserWarning, match=untested), pytest.raises(RuntimeError, match=lacking):
        formats.register_formats()
