"""Imports of the rank processes of these tests before they are forked."""

from unittest import mock

# torchtitan asks torch for an accelerator when it is imported, and assumes CUDA without one.
with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
    import torchtitan.experiments.transformers_modeling_backend.config_registry
    import torchtitan.models.deepseek_v3.config_registry
    import torchtitan.models.flux.config_registry
    import torchtitan.models.llama3.config_registry
    import torchtitan.models.qwen3.config_registry  # noqa: F401
