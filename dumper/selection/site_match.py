"""Site matching: sites split into parts, and rules with compiled globs."""

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
    """The name passed to ``dump()`` for an explicit value; the site for all others."""

    @classmethod
    def of(cls, site: str, name: str | None = None) -> "SiteParts":
        """Split ``PATH:PORT``; ``name`` is the name of the explicit value, if the site belongs to one."""
        path, _, port = site.rpartition(":")
        grad = ".grad" if port.endswith(".grad") else ""
        kind, bracket, inside = port.removesuffix(grad).partition("[")
        if name is None:
            name = inside.removesuffix("]") if kind == "tap" and bracket else site
        return cls(site, path, port, kind + grad, name)

    @property
    def has_grad(self) -> bool:
        """Whether the port may have a gradient."""
        return "." not in self.kind and self.kind != "buffer"

    def names(self) -> dict[str, Any]:
        """Return the values of the names that an expression may use and that the site determines."""
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
    """A rule with its compiled glob."""

    rule: Rule
    glob: Glob
    is_plain: bool
    """Whether the rule applies to every firing of a matching site, because it has no conditions on the firing."""

    @classmethod
    def of(cls, rule: Rule) -> "CompiledRule":
        """Compile the glob of ``rule``."""
        return cls(rule, Glob(rule.glob), rule.is_unconditional)

    def matches(self, place: SiteParts) -> bool:
        """Return whether the rule matches the site, for some rank and firing."""
        return self._fits(place.path, place.kind) and self.glob.matches(place.site)

    def names_kind(self, kind: str) -> bool:
        """Return whether the rule names this kind of port explicitly, by ``port=`` or in its glob."""
        if self.rule.ports and self._has_kind(kind):
            return True
        port = self.rule.glob.rpartition(":")[2]
        if kind.endswith(".grad"):
            return port.endswith(".grad")
        return port.startswith(kind) if ":" in self.rule.glob else f"{kind}[" in port

    def may_match_unseen(self, path: str, kind: str, *, unnamed: bool) -> bool:
        """Return whether the rule may match a port of ``kind`` at ``path`` that is unknown before it fires.

        With ``unnamed``, the module may have ports with any name.
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
