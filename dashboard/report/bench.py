"""Self-contained HTML report of benchmark results: one file that needs no network and no server."""

import msgspec
from markupsafe import Markup

from tapscope._version import __version__
from tapscope.dashboard.model.bench_history import BenchComparison, BenchHistory
from tapscope.dashboard.model.schema import escaped
from tapscope.dashboard.report.html import STATIC, bundled, content_policy, embedded, environment


def bench_report(history: BenchHistory, compared: BenchComparison | None = None) -> str:
    """Render the page of a history, with the comparison of two commits if given."""
    history, script = escaped(history), bundled("bench_report.js")
    return (
        environment()
        .get_template("bench.html.j2")
        .render(
            history=history,
            compared=escaped(compared) if compared else None,
            version=__version__,
            style=Markup((STATIC / "vendor" / "uplot.css").read_text() + (STATIC / "style.css").read_text()),
            script=Markup(script),
            csp=content_policy(script),
            data=embedded(msgspec.to_builtins(history)),
        )
    )
