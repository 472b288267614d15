"""Small configurations of torchtitan's models that are large, or that read files, in its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

IMAGE, TEXT = 32, 8
"""Side of an image in pixels, and tokens of its text."""


def write_files(model: str, folder: str) -> None:
    """Write the files of other libraries that a model reads. Collective."""
    if model in _FILES and dist.get_rank() == 0:
        torch.manual_seed(0)
        _FILES[model](folder)
    dist.barrier()


def _write_encoders(folder: str) -> None:
    import safetensors.torch
    import transformers

    texts = {"num_layers": 1, "d_model": 256, "d_ff": 64, "d_kv": 16, "num_heads": 2}
    t5 = transformers.T5Config(**texts, vocab_size=64)
    transformers.T5EncoderModel(t5).save_pretrained(f"{folder}/t5")
    texts = {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 64}
    clip = transformers.CLIPTextConfig(**texts, num_attention_heads=2, vocab_size=64)
    transformers.CLIPTextModel(clip).save_pretrained(f"{folder}/clip")
    images = _autoencoder().build()
    safetensors.torch.save_file(images.state_dict(), f"{folder}/ae.safetensors")


def _write_qwen3(folder: str) -> None:
    import transformers

    options = {"tie_word_embeddings": True, "architectures": ["Qwen3ForCausalLM"]}
    config = transformers.Qwen3Config(vocab_size=2048, **options)
    config.save_pretrained(f"{folder}/qwen3")


_FILES = {"flux": _write_encoders, "transformers_modeling_backend": _write_qwen3}


def _autoencoder() -> Any:
    from torchtitan.models.flux.model.autoencoder import AutoEncoder

    return AutoEncoder.Config(resolution=IMAGE, ch=32, ch_mult=(1, 1, 1, 1), num_res_blocks=1)


def shrink_flux(config: Any, folder: str) -> None:
    """Divide the sizes of flux by 16, and read its encoders from a folder of `write_files`."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.nn_modules import RMSNorm

    model = config.model_spec.model
    for part in (model, model.final_layer_config, *model.double_blocks, *model.single_blocks):
        part.hidden_size //= 16
    model.axes_dim = model.pe_config.axes_dim = (2, 2, 4)
    for _, norm, _, _ in model.traverse(RMSNorm.Config):
        norm.normalized_shape //= 16
    for _, linear, _, _ in model.traverse(Linear.Config):
        # Zeros would leave most gradients zero in the first steps.
        linear.param_init = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
        for name in ("in_features", "out_features"):
            # Those of pixels and of embedded times are fixed.
            if (size := getattr(linear, name)) not in (64, 256):
                setattr(linear, name, size // 16)
    model.autoencoder = _autoencoder()
    config.encoder.t5_encoder, config.encoder.clip_encoder = f"{folder}/t5", f"{folder}/clip"
    config.encoder.autoencoder_path = f"{folder}/ae.safetensors"


def pictures() -> Any:
    """Return a dataloader of images with the tokens of their texts."""
    from torchtitan.components.dataloader import BaseDataLoader

    class Pictures(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            img_size: int = IMAGE

        def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            self.rank, self.batch = dp_rank, local_batch_size

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            numbers = torch.Generator().manual_seed(self.rank)
            while True:
                texts = torch.randint(0, 64, (2, self.batch, 1, TEXT), generator=numbers)
                images = torch.randn(self.batch, 3, IMAGE, IMAGE, generator=numbers)
                yield {"t5": texts[0], "clip": texts[1]}, images

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    return Pictures
