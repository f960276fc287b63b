"""Markdown report of a comparison: a pull-request comment that fits on a screen."""

import re
from collections.abc import Iterable, Iterator

from tapscope.dashboard.model.diff import CauseView, DiffView
from tapscope.dashboard.model.schema import escaped

MAX_CAUSES = 5
MAX_ROWS = 20
"""Maximum number of findings in the table."""
MAX_LAYERS = 80
"""Maximum number of rows in the heat map."""

_MARKUP = re.compile(r"[\\`*_\[\]|~<>#&]")
_AUTOLINK = re.compile(r"(?<=\w)(://)|@")


def markdown_report(view: DiffView) -> str:
    """Render the comment, with a final newline. Names are escaped: they cannot add markup, links or mentions."""
    view = escaped(view)
    return "\n".join(_blocks(view)) + "\n"


def _blocks(view: DiffView) -> Iterator[str]:
    mark = "✅" if view.state == "AGREES" else "❌" if view.state == "DIFFERS" else "⚠️"
    yield f"### {mark} tapscope: {plain(view.title)} – {view.state.lower()}"
    yield ""
    for fact in view.answer:
        yield f"- **{plain(fact.label)}** {code(fact.text) if fact.label == 'next' else plain(fact.text)}"
    yield ""
    yield " · ".join(f"{each.count:,} {each.verdict}" for each in view.counts)
    if view.causes:
        yield ""
        yield from map(_cause, view.causes[:MAX_CAUSES])
        if len(view.causes) > MAX_CAUSES:
            yield f"{len(view.causes) - MAX_CAUSES} more causes"
    yield from _table(view)
    yield from _details("Error ÷ floor by layer and step", _heat_map(view))
    yield from _details("Coverage and options", _account(view))


def _cause(cause: CauseView) -> str:
    sentences = [plain(cause.headline)]
    sentences += [plain(cause.cause)] if cause.cause else []
    sentences += [f"{len(cause.downstream):,} downstream"] if cause.downstream else []
    sentences += [f"value {code(cause.link)}"]
    return f"{cause.number}. {'; '.join(sentences)}"


def _table(view: DiffView) -> Iterator[str]:
    bad = [finding for finding in view.findings if finding.is_bad]
    bad.sort(key=lambda finding: (finding.role != "producer", finding.order))
    if not bad:
        return
    yield ""
    yield "| site | verdict | ÷ floor | max \\|Δ\\| | worst at |"
    yield "|---|---|--:|--:|---|"
    for f in bad[:MAX_ROWS]:
        name = f"**{code(f.site)}**" if f.role == "producer" else code(f.site)
        yield f"| {name} | {f.verdict} | {plain(f.ratio.text)} | {plain(f.max_abs.text)} | {plain(f.where)} |"
    if len(bad) > MAX_ROWS:
        yield ""
        yield f"{len(bad) - MAX_ROWS:,} more sites differ."


def _heat_map(view: DiffView) -> Iterator[str]:
    rows = view.layers.rows[:MAX_LAYERS]
    if not rows or not view.layers.columns:
        return
    wide = max(len(row.label) for row in rows)
    yield "```text"
    for row in rows:
        label = row.label.replace("`", "'")
        yield f"{label:<{wide}}  {row.glyphs}{'  < cause' if row.is_cause else ''}"
    yield "```"
    yield "1-9: decades above the floor, ~ within it, = equal, % not finite, # not comparable, · not compared"


def _account(view: DiffView) -> Iterator[str]:
    for fact in view.account:
        yield f"- **{plain(fact.label)}** {plain(fact.text)}"
    yield f"- **command** {code(view.command)}"
    yield f"- **version** tapscope {plain(view.version)}"


def _details(title: str, lines: Iterable[str]) -> Iterator[str]:
    body = list(lines)
    if body:
        yield from ("", f"<details><summary>{title}</summary>", "", *body, "", "</details>")


def plain(text: str) -> str:
    """Escape text so that Markdown, HTML and GitHub recognize no markup, link or mention in it."""
    text = _MARKUP.sub(lambda match: f"\\{match[0]}" if match[0] not in "<>#&" else f"&#{ord(match[0])};", text)
    return _AUTOLINK.sub(lambda match: "&#64;" if match[0] == "@" else "&#58;//", text)


def code(text: str) -> str:
    """Return a code span; bars are escaped for table cells."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if text.startswith("`") or text.endswith("`") or not text.strip() else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")
