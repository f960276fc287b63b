"""Text of a site's series over steps: sparklines with their ranges."""

from collections.abc import Sequence

from rich.text import Text

from tapscope.dashboard.model.series import SiteSeries, sparkline


def series_lines(series: Sequence[SiteSeries], width: int) -> list[Text]:
    """Return one sparkline with its range per series, and a line with the range of steps."""
    if not series:
        return [Text("Reading all steps ...", style="dim")]
    shown = [
        (each, f"{each.name}{'' if each.rank is None else f' rank {each.rank}'}")
        for one in series
        for each in one.series
    ]
    label = max((len(name) for _, name in shown), default=0)
    lines = []
    for each, name in shown:
        room = max(width - label - len(each.text) - 3, 8)
        lines.append(Text(f"{name:<{label}} {sparkline(each, room)}  {each.text}"))
    steps = [point.step for each, _ in shown for point in each.points]
    axis = f"steps {min(steps)} to {max(steps)}" if steps else "no statistics in any step"
    return [*lines, Text(axis, style="dim")]
