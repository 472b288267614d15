"""GPT pretraining on Megatron's training loop: `python -m megatron_fsdp_v2_mcore.pretrain_gpt`."""
