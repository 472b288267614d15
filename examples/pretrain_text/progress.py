"""How far a run is: a bar on a terminal, lines anywhere else."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from examples.pretrain_text.training_log import Iteration

# Without a terminal there is no bar to move. This many lines tell the progress of a run, and more
# where nothing would be said for this many seconds.
_NUM_LINES = 10
_MAX_SILENT_SECONDS = 30.0


@contextmanager
def progress(
    console: Console,
    title: str,
    iterations: range,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[Iteration], None]]:
    """Shows the progress of a run: what it measured, the time it took, and an estimate of the rest.

    Args:
        console: Where it is shown.
        title: What the run is called.
        iterations: The iterations the run is going to do.
        clock: Tells the time in seconds.

    Yields:
        What to call with every iteration that is done.
    """
    if not console.is_terminal:
        console.print(
            f"{title}: starting Megatron on iterations {iterations.start} to {iterations.stop - 1}"
        )
        yield _Lines(console, iterations, clock).show
        return

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[measured]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=len(iterations), measured="starting Megatron")

        def move_bar(iteration: Iteration) -> None:
            done = iteration.number - iterations.start + 1
            bar.update(task, completed=done, measured=_measured(iteration))

        yield move_bar


class _Lines:
    """Progress in lines."""

    def __init__(self, console: Console, iterations: range, clock: Callable[[], float]) -> None:
        self._console, self._iterations, self._clock = console, iterations, clock
        self._every = max(1, len(iterations) // _NUM_LINES)
        self._started = self._last_line = clock()
        self._first_done: float | None = None

    def show(self, iteration: Iteration) -> None:
        """Prints a line of an iteration, if it is time for one."""
        now = self._clock()
        done = iteration.number - self._iterations.start + 1
        if self._first_done is None:
            self._first_done = now
        is_silent = now - self._last_line >= _MAX_SILENT_SECONDS
        if not (done == 1 or done % self._every == 0 or is_silent):
            return
        self._last_line = now
        # Starting takes part of the time that went by and none of the rest.
        per_iteration = (
            (now - self._first_done) / (done - 1) if done > 1 else iteration.elapsed_ms / 1000
        )
        left = (len(self._iterations) - done) * per_iteration
        self._console.print(
            f"  iteration {iteration.number}: {_measured(iteration)}, "
            f"{_minutes(now - self._started)} elapsed, about {_minutes(left)} left"
        )


def _measured(iteration: Iteration) -> str:
    return f"loss {float(iteration.loss):.3f}, {iteration.elapsed_ms:.0f} ms"


def _minutes(seconds: float) -> str:
    """`m:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
