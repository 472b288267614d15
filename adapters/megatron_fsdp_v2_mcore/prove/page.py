"""The report of a proof as a page with curves, drawn by plotly."""

from __future__ import annotations

import html
from itertools import batched

from megatron_fsdp_v2_mcore.prove.report import ProofReport, lines
from megatron_fsdp_v2_trace.drawing import library

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>{title}</title></head>
<body style="font-family: sans-serif; margin: 1em"><h1 style="font-size: 1.2em">{title}</h1>
{figures}<pre style="white-space: pre-wrap">{text}</pre></body></html>
"""


def html_page(report: ProofReport) -> str:
    """Return a page with the report, and the losses and norms of both sides of every comparison.

    Raises:
        ValueError: plotly is not installed.
    """
    graph_objects, subplots = library("plotly.graph_objects"), library("plotly.subplots")
    figures: list[str] = []
    for number, _, phase in report.phases:
        if not phase.curves:
            continue
        figure = subplots.make_subplots(rows=1, cols=2, subplot_titles=("loss", "gradient norm"))
        for column, (mine, theirs) in enumerate(batched(phase.curves, 2), start=1):
            for name, values, dash in (
                ("reference", theirs, "solid"),
                ("this package", mine, "dot"),
            ):
                curve = graph_objects.Scatter(
                    x=list(range(phase.first, phase.first + len(values))),
                    y=list(values),
                    name=name,
                    line={"dash": dash},
                    showlegend=column == 1,
                )
                figure.add_trace(curve, row=1, col=column)
        figure.update_xaxes(title="iteration", dtick=1)
        figure.update_layout(title=f"run {number}: {phase.name}", height=320)
        script = "inline" if not figures else False
        figures.append(figure.to_html(full_html=False, include_plotlyjs=script))
    title, text = html.escape(report.verdict), html.escape("\n".join(lines(report)))
    return _PAGE.format(title=title, figures="".join(figures), text=text)
