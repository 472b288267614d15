"""Shows the progress of a run: a bar on a terminal, lines elsewhere."""

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

# Without a terminal: number of progress lines of a run, and the maximum number of seconds between
# two lines.
_NUM_LINES = 10
_MAX_SILENT_SECONDS = 30.0


@contextmanager
def progress(
    console: Console,
    title: str,
    iterations: range,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[Iteration], None]]:
    """Shows the progress of a run: its measurements, elapsed time and estimated remaining time.

    Args:
        console: Output for progress.
        title: Name of the run.
        iterations: The iterations of the run.
        clock: Returns the time in seconds.

    Yields:
        A function to call after every iteration.
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
        """Prints a line for an iteration if a line is due."""
        now = self._clock()
        done = iteration.number - self._iterations.start + 1
        if self._first_done is None:
            self._first_done = now
        is_silent = now - self._last_line >= _MAX_SILENT_SECONDS
        if not (done == 1 or done % self._every == 0 or is_silent):
            return
        self._last_line = now
        # The elapsed time includes startup; the remaining time does not.
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
    """Formats seconds as `m:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
