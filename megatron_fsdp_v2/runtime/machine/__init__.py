"""Controls a step: decides what happens next, without tensors.

A step is a sequence of events, each answered by commands. Hooks translate torch's calls into
events; units, contexts and groups hold tensors and execute the commands.

| event | reported by | answered by |
|---|---|---|
| `enter_module`, `begin_graph` | hooks before a forward | refresh, gather, wait; gather ahead |
| `leave_module`, `end_unit_forward`, `end_graph` | hooks after a forward | free |
| `fail_forward` | hook after a forward that raised | nothing: the next pass repairs |
| `first_gradient` | hook on the outputs of a forward | gather, wait; gather ahead; make room |
| `make_room`, `expect_gradient` | hook on a gathered parameter | wait for the oldest reduction |
| `last_gradient`, `defer` | hook on the inputs of a forward | free; reduce what is due |
| `end` | callback of the engine | reduce the rest, wait; free; drop gradients of no rank |
| `engine_dropped` | death of that callback | nothing: the next pass or backward repairs |
| `begin_direct_use`, `direct_gradient`, `end_direct_use` | sharded parameters | make room; reduce |
| `begin_schedule`, `begin_use`, `release`, `reduce`, `end_scheduled` | a schedule | as above |
| `weights_changed`, `graph_replayed`, `begin_capture` | steps of optimizers, users | nothing |
| `synchronize`, `discard`, `make_idle`, `repair`, `reset` | methods that users call | as named |
| `unshard`, `begin_reading` | methods that users call | refresh; free what is outdated; gather |
| `gather`, `free` | methods that users call, loads | as named |
| `abandon` | `abort()` and `rebuild()` | nothing that communicates; a new root follows |

`commands.py` lists the commands, and the facts about tensors that decide between them. `state.py`
has the state; `orders.py` the orders of uses and reductions, `weights.py` gathers, `reductions.py`
backwards and repairs, `events.py` what is reported.
"""
