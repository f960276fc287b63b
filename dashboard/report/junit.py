"""JUnit report of a comparison: one test case per site, for the test view of a CI system."""

from collections.abc import Iterable
from xml.etree import ElementTree

from tapscope.dashboard.model.diff import DiffView
from tapscope.dashboard.model.finding import FindingView
from tapscope.dashboard.model.schema import escaped

_SKIPPED = ("only-baseline", "only-target")


def junit_report(view: DiffView) -> str:
    """Return JUnit XML: a bad site is a failure, a site of one run only is skipped, missing data is an error of the
    suite."""
    view = escaped(view)
    failures = sum(finding.is_bad for finding in view.findings)
    skipped = sum(finding.verdict in _SKIPPED for finding in view.findings)
    missing = [fact.text for fact in view.account if fact.label == "missing"]
    totals = {"tests": str(len(view.findings) + bool(missing)), "failures": str(failures)}
    totals |= {"errors": str(int(bool(missing))), "skipped": str(skipped)}
    suites = ElementTree.Element("testsuites", {"name": "tapscope diff", **totals})
    suite = ElementTree.SubElement(suites, "testsuite", {"name": view.title, **totals})
    properties = ElementTree.SubElement(suite, "properties")
    for fact in (*view.answer, *view.options):
        ElementTree.SubElement(properties, "property", name=fact.label, value=fact.text)
    for finding in view.findings:
        _case(suite, finding, view)
    if missing:
        _error(suite, missing)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, finding: FindingView, view: DiffView) -> None:
    path, _, port = finding.site.rpartition(":")
    case = ElementTree.SubElement(suite, "testcase", classname=path or "(root)", name=port or finding.site)
    if finding.verdict in _SKIPPED:
        ElementTree.SubElement(case, "skipped", message=finding.verdict)
    elif finding.is_bad:
        facts = f"error ÷ floor {finding.ratio.text}, max |Δ| {finding.max_abs.text}, worst at {finding.where}"
        role = f", {finding.role}" if finding.role else ""
        failure = ElementTree.SubElement(case, "failure", type=finding.verdict, message=f"{facts}{role}")
        cause = next((each for each in view.causes if each.order == finding.order), None)
        lines = [*finding.notes, *([cause.headline, cause.cause, cause.evidence] if cause else []), finding.link]
        failure.text = "\n".join(line for line in lines if line)


def _error(suite: ElementTree.Element, missing: Iterable[str]) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="tapscope", name="coverage")
    error = ElementTree.SubElement(case, "error", type="partial", message="the data are partial")
    error.text = "\n".join(missing)
