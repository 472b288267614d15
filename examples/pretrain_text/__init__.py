"""Pretrain a small byte-level GPT with Megatron-Core, sharded by this package.

`python -m examples.pretrain_text` collects text, writes it as a Megatron indexed dataset, trains,
saves half-way, resumes from the checkpoint, and checks that the resumed run repeats the first run.

The modules: `text` collects documents, `dataset` writes them for Megatron, `settings` holds the
settings of a run and converts them to Megatron's flags, `training_log` parses Megatron's output,
`progress` shows progress, `launch` runs the training, `report` draws and summarizes the results.
"""
