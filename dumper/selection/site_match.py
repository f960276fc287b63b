"""Matching of sites against rules: the parts of a site, and rules with compiled globs."""

from functools import lru_cache
from typing import Any, NamedTuple

from tapscope.core.site import Glob, layer_of
from tapscope.dumper.rules.rule import Rule

_glob = lru_cache(maxsize=4096)(Glob)


class SiteParts(NamedTuple):
    """A site, split into its parts."""

    site: str
    path: str
    port: str
    kind: str
    """``in``, ``out``, ``tap``, ``param`` or ``buffer``, with ``.grad`` for a gradient."""
    name: str
    """The name an explicit value was dumped under; for all others the site."""

    @classmethod
    def of(cls, site: str, name: str | None = None) -> "SiteParts":
        """The parts of ``PATH:PORT``; ``name`` is that of the explicit value that the port belongs to."""
        path, _, port = site.rpartition(":")
        grad = ".grad" if port.endswith(".grad") else ""
        kind, bracket, inside = port.removesuffix(grad).partition("[")
        if name is None:
            name = inside.removesuffix("]") if kind == "tap" and bracket else site
        return cls(site, path, port, kind + grad, name)

    @property
    def has_grad(self) -> bool:
        """Whether this port may have a gradient."""
        return "." not in self.kind and self.kind != "buffer"

    def names(self) -> dict[str, Any]:
        """The names that an expression may use."""
        layer = layer_of(self.path)
        return {
            "name": self.name,
            "site": self.site,
            "path": self.path,
            "port": self.port,
            "kind": self.kind,
            "layer": layer,
            "layer_id": layer,
        }


class CompiledRule(NamedTuple):
    """A rule with its glob."""

    rule: Rule
    glob: Glob
    is_plain: bool
    """Whether it decides wherever it matches: no condition depends on the firing."""

    @classmethod
    def of(cls, rule: Rule) -> "CompiledRule":
        """Compile the glob."""
        return cls(rule, Glob(rule.glob), rule.is_unconditional)

    def matches(self, place: SiteParts) -> bool:
        """Whether the rule matches this site, for some rank and firing."""
        return self._fits(place.path, place.kind) and self.glob.matches(place.site)

    def names_kind(self, kind: str) -> bool:
        """Whether the rule names this kind of port explicitly."""
        if self.rule.ports and self._has_kind(kind):
            return True
        port = self.rule.glob.rpartition(":")[2]
        if kind.endswith(".grad"):
            return port.endswith(".grad")
        return port.startswith(kind) if ":" in self.rule.glob else f"{kind}[" in port

    def may_match_unseen(self, path: str, kind: str, *, unnamed: bool) -> bool:
        """Whether the rule may match a port of ``kind`` at ``path`` that is unknown before it fires.

        ``unnamed``: the module may have ports with any name.
        """
        if not self._fits(path, kind):
            return False
        base, _, grad = kind.partition(".")
        head, colon, port = self.rule.glob.rpartition(":")
        if not colon:
            return unnamed and self.glob.matches(f"{path}:out")
        if grad and not port.endswith((".grad", "*")):
            return False
        port = port.removesuffix(".grad")
        if not port.startswith(f"{base}[") and not (unnamed and base != "out" and port.startswith((base, "*"))):
            return False
        return (unnamed or "." in port or base == "out") and _glob(f"{head}:*").matches(f"{path}:out")

    def _fits(self, path: str, kind: str) -> bool:
        layers = self.rule.layers
        return self._has_kind(kind) and (layers is None or layer_of(path) in layers)

    def _has_kind(self, kind: str) -> bool:
        ports = self.rule.ports
        return not ports or kind in ports or (kind.endswith(".grad") and "grad" in ports)
