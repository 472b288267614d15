"""Golden records: the collectives, memory and numbers of reference trainings.

`parity.json`, `meshes.json` and `features.json` hold one record for each case of `cases.py`.

* **events**: One list per micro-batch, in the order of issue; a number refers to the list at that
  index, a string to a list of another case. A collective is one line: its kind, dtype, bytes of the
  full buffer, mesh axis and stream (`-` on a CPU). `matmul` stands for any number of consecutive
  matrix products; it shows before which computation a collective is issued. `forward`, `backward`
  and `optimizer step` mark where these begin. Only collectives in groups of the mesh are recorded.
  No case clips gradients, so the collectives of norms are not part of any record.
* **bytes**: Bytes that are live after the last optimizer step, and the peak of all steps: shards,
  gradients, optimizer states, activations and temporary buffers.
* **bits**: Losses as hexadecimal floats, a digest of the full gradients for each step, a digest of
  the full weights after the last step, and `plain`, a digest of the same training in one process
  without sharding. A string refers to the bits of another case.

Events and bytes do not depend on the machine or the version of torch. Bits do: torch chooses its
kernels by the processor. A test compares them if `plain` equals the recorded one, because torch
then computes the same bits on this machine. Otherwise it warns and compares the losses alone, with
a tolerance; `tests/parity` compares gradients and weights with the unsharded training anyway.

`make golden` writes the records. Equal values are stored once, so a diff shows a change once.
"""
