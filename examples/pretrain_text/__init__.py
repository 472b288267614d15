"""Pretrain a small byte-level GPT with Megatron-Core, sharded by this package.

`python -m examples.pretrain_text` collects real text, makes a Megatron indexed dataset of it,
trains, saves half-way, resumes from what it saved, and shows that the resumed run repeats the first
one.

The modules: `text` collects documents, `dataset` writes them for Megatron, `settings` holds what
the run is made of and spells it as Megatron's flags, `training_log` reads what Megatron prints,
`progress` shows how far it is, `launch` runs it, `report` draws and sums up.
"""
