"""InjectionRule: the sites, steps and requests whose values are overwritten with stored ones.

As text: ``SITE[=STORED] [steps=0-3,7] [request=ID,ID]``. ``SITE`` may be a glob if the stored run has the same names::

    layers.3.mlp:out
    model.layers.*:in[hidden_states] steps=4-
    layers.3.mlp:out=model.layers.3.feed_forward:out request=r1
"""

from dataclasses import dataclass

from tapscope.core.errors import RuleError, SiteError
from tapscope.core.site import Glob, parse
from tapscope.dumper.rules.int_ranges import Ranges

_OPTIONS = ("steps", "request")


@dataclass(frozen=True, slots=True)
class InjectionRule:
    """One injection rule; ``str(rule)`` parses to an equal rule."""

    site: str
    """Site of the live model, or a glob of sites."""
    stored: str | None = None
    """Site of the stored run; None if it has the same name."""
    steps: Ranges | None = None
    """Steps of the live model; None for all."""
    requests: tuple[str, ...] = ()
    """Live requests whose rows are overwritten; empty for all."""

    @classmethod
    def parse(cls, text: object) -> "InjectionRule":
        """Parse ``text``, which may already be a rule; raises RuleError that names the text and the valid forms."""
        if isinstance(text, InjectionRule):
            return text
        if not isinstance(text, str) or not text.split():
            raise RuleError(f"inject: {text!r} must be a string SITE[=STORED] [steps=0-3] [request=ID]")
        target, *options = text.split()
        site, equals, stored = target.partition("=")
        given: dict[str, str] = {}
        for option in options:
            name, is_given, value = option.partition("=")
            if name not in _OPTIONS or not is_given or name in given:
                raise RuleError(f"inject: {text!r}: {option!r} must be steps=0-3 or request=ID, once each")
            given[name] = value
        try:
            for name in (site, *([stored] if equals else [])):
                Glob(name)
                if equals:
                    parse(name)
            steps = Ranges.parse(given["steps"].split(",")) if "steps" in given else None
        except (SiteError, ValueError) as error:
            raise RuleError(f"inject: {text!r}: {error}") from None
        if equals and any(character in site + stored for character in "*?"):
            raise RuleError(f"inject: {text!r}: a glob cannot have =STORED; SITE=STORED names one site in each run")
        requests = tuple(name for name in given.get("request", "").split(",") if name)
        return cls(site, stored if equals else None, steps, requests)

    def __str__(self) -> str:
        parts = [self.site if self.stored is None else f"{self.site}={self.stored}"]
        parts += [f"steps={self.steps}"] if self.steps is not None else []
        parts += [f"request={','.join(self.requests)}"] if self.requests else []
        return " ".join(parts)
