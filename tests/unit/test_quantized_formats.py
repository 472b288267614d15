"""Which Transformer Engine the formats of quantized weights are for."""

from __future__ import annotations

import sys
import types

import pytest

from megatron_fsdp_v2_mcore import formats


@pytest.fixture(autouse=True)
def _anew() -> None:
    formats._register.cache_clear()


def test_without_transformer_engine_there_is_nothing_to_register(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert formats.register_formats() is False


def test_an_untested_version_is_said_and_what_it_lacks_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its package is there and has no tensors that are known."""
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.delitem(sys.modules, "megatron_fsdp_v2_mcore.formats.quantized", raising=False)
    monkeypatch.setattr(formats.metadata, "version", lambda name: "3.1.0")
    untested = r"tested with Transformer Engine 2\.20, and 3\.1\.0 is installed"
    lacking = r"3\.1\.0 lacks the classes of quantized weights"
    with pytest.warns(UserWarning, match=untested), pytest.raises(RuntimeError, match=lacking):
        formats.register_formats()
