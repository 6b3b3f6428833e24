"""Runs a script with each number of workers, shows progress, and writes the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shardwise.tools.report.output import check_can_draw, exit_on_sigterm
from shardwise.tools.scale import report as reports
from shardwise.tools.scale import runs
from shardwise.tools.scale.report import ScalingReport
from shardwise.tools.scale.runs import MeasuredRun, ScalingPlan


def measure(plan: ScalingPlan) -> int:
    """Measure all worker counts, write the results to `plan.out`, and return the exit code.

    The exit code is 1 if a run failed. If the measurement is interrupted, the results so far are
    written. Raises LaunchError if a package that the plots need is not installed.
    """
    check_can_draw("shardwise scale")  # before the runs, which take minutes
    console = Console(highlight=False, markup=False)
    # Create the folder before the first run, so that an error does not appear only after hours.
    plan.out.mkdir(parents=True, exist_ok=True)
    finished: list[MeasuredRun] = []
    with exit_on_sigterm():
        try:
            finished.extend(_all(plan, console))
        except (KeyboardInterrupt, SystemExit):
            # A measurement can take hours, so report the finished runs if it is interrupted.
            if finished:
                _tell(ScalingReport(plan=plan, runs=finished), console)
            raise
    _tell(ScalingReport(plan=plan, runs=finished), console)
    return 1 if any(run.error for run in finished) else 0


def _tell(report: ScalingReport, console: Console) -> None:
    """Write the results to files and print the table."""
    plan = report.plan
    reports.write(report, plan.out)
    from shardwise.tools.scale import plots  # imports matplotlib, which takes half a second

    plots.write_report_page(report, plots.draw(report, plan.out), plan.out / "scaling.html")
    console.print(reports.table(report))
    for note in report.notes():
        console.print(note, style="dim")
    console.print(
        f"report: {plan.out / 'scaling.html'} (JSON, CSV, PDF and PNG in the same folder)"
    )


def _all(plan: ScalingPlan, console: Console) -> Iterator[MeasuredRun]:
    """Run the script with each number of workers. Yield every finished run, even a failed one."""
    sizes = [(kind, size) for kind in plan.kinds for size in plan.sizes]
    alone: MeasuredRun | None = None
    with _bar(console) as bar:
        task = bar.add_task("", total=len(sizes), what="")
        for kind, size in sizes:
            # With one worker, strong and weak scaling are the same run, so measure it only once.
            if size == 1 and alone is not None:
                run = replace(alone, kind=kind)
            else:
                run = _one(plan, kind, size, bar, task)
                _say(run, console)
            if size == 1:
                alone = run
            bar.update(task, advance=1)
            yield run


def _one(plan: ScalingPlan, kind: str, size: int, bar: Progress, task: object) -> MeasuredRun:
    name = f"{kind}, {size} worker{'s' * (size > 1)}"
    of = "" if plan.limit is None else f" of {plan.limit}"

    def show(steps: int) -> None:
        bar.update(task, what=f"{name} · step {steps}{of}")  # type: ignore[arg-type]

    show(0)
    return runs.run(plan, kind, size, show)


def _say(run: MeasuredRun, console: Console) -> None:
    """Print a line with the result of a finished run."""
    name = f"{run.kind:>6} · {run.workers} worker{'s' * (run.workers > 1)} · {run.wall:.0f} s"
    measured = run.measured
    if measured is None:
        console.print(f"{name} · failed, {run.error}", style="red", soft_wrap=True)
        console.print(f"         output: {run.log}", soft_wrap=True)
        return
    rate = reports.figure(measured.rate.value)
    steps = f"{measured.steps - measured.dropped} steps"
    console.print(
        f"{name} · {rate} samples/s over {steps}, without the first {measured.dropped}",
        soft_wrap=True,
    )


def _bar(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total:.0f} · {task.fields[what]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
