"""Site patterns as accepted by --site and --skip: a glob, or ``re:`` and a regular expression."""

import re

from tapscope.core.errors import RuleError
from tapscope.core.site import Glob, Site, split_call
from tapscope.expr.safe_regex import safe_pattern

PREFIX = "re:"


class SiteRegex:
    """A regular expression searched anywhere in a site, such as ``layers\\.[0-3]\\.mlp:out``."""

    __slots__ = ("_pattern", "text")

    def __init__(self, text: str) -> None:
        """``text`` begins with ``re:``. Raises RuleError if the expression is invalid or potentially too slow."""
        self.text = text
        try:
            self._pattern: re.Pattern[str] = safe_pattern(text.removeprefix(PREFIX))
        except ValueError as error:
            raise RuleError(f"site pattern {text!r}: {error}") from None

    def matches(self, site: Site | str) -> bool:
        """Return whether the expression matches anywhere in the site."""
        return self._pattern.search(str(site)) is not None


def site_pattern(text: str, *, any_call: bool = False) -> Glob | SiteRegex:
    """Parse a site pattern; with ``any_call``, the call index after a glob is dropped. Raises RuleError."""
    if text.startswith(PREFIX):
        return SiteRegex(text)
    return Glob(split_call(text)[0] if any_call else text)


SitePattern = Glob | SiteRegex
