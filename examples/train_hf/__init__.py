"""A research trainer of Hugging Face causal language models, with DDP or sharded: one switch.

    torchrun --nproc-per-node 2 -m examples.train_hf --parallel-strategy fsdp --model llama

`__main__` reads the command line, `setup` builds model, optimizer and data, `loop` trains.
"""
