"""The kit for a machine with GPUs: every check in processes of its own, and one report.

    python -m tests.gpu.kit --device cuda --out out/gpu

`running` says what a check is and what may come of it, and runs one after the other; `checks` lists
them; `on_ranks` and `trainings` do the work, in worker processes and in commands; `machine` says
where; `report` writes it all down. With `--device cpu` the same code runs as far as
it can, and what only a GPU shows is reported as that, never as passed.
"""
