"""Site: *where* a tensor is observed, as module path and port.

Grammar::

    site  = path ":" port
    path  = dotted module path as in named_modules(); empty for the root
    port  = kind [ "[" name "]" ] [ ".grad" ]
    kind  = "in" | "out" | "tap" | "param" | "buffer"      (all but "out" need a name)

    model.layers.12.self_attn.o_proj:out        lm_head:in[input]        :out[logits]
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from msgspec import Struct

from tapscope.core.errors import SiteError

MAX_RANGE = 1_000_000
"""Maximum length of a range of layers, steps or ranks."""
_PORT = re.compile(r"(?P<kind>in|out|tap|param|buffer)(\[(?P<name>[^\[\]]+)\])?(?P<grad>\.grad)?")
_CALL = re.compile(r"#(\d+)(?=(?:\.grad)?$)")


class Site(Struct, frozen=True, order=True):
    """A parsed site; ``str(site)`` returns the string that was parsed."""

    path: str
    port: str

    def __post_init__(self) -> None:
        match = _PORT.fullmatch(self.port)
        if match is None or (match["kind"] != "out" and match["name"] is None):
            raise SiteError(
                f"site {self.path}:{self.port} has no valid port; ports are in[NAME], out, out[PATH], tap[NAME], "
                "param[NAME], buffer[NAME], each optionally followed by .grad"
            )
        if ":" in self.path:
            raise SiteError(f"site {self.path}:{self.port} has more than one ':'; a module path has none")

    def __str__(self) -> str:
        return f"{self.path}:{self.port}"

    @property
    def kind(self) -> str:
        """``in``, ``out``, ``tap``, ``param`` or ``buffer``."""
        match = _PORT.fullmatch(self.port)
        assert match is not None
        return match["kind"]

    @property
    def name(self) -> str | None:
        """The name in the brackets of the port, or None."""
        match = _PORT.fullmatch(self.port)
        assert match is not None
        return match["name"]

    @property
    def is_grad(self) -> bool:
        """True if this site is the gradient of a port."""
        return self.port.endswith(".grad")

    @property
    def layer(self) -> int | None:
        """The layer number, see :func:`layer_of`: the first number in the path, because experts follow layers."""
        return layer_of(self.path)

    @property
    def parent(self) -> str:
        """Path of the enclosing module; empty for a top-level module and the root."""
        return self.path.rpartition(".")[0]


@lru_cache(maxsize=65536)
def parse(text: str) -> Site:
    """Parse ``path:port``; raises SiteError."""
    path, colon, port = text.rpartition(":")
    if not colon:
        raise SiteError(f"invalid site {text!r}: expected PATH:PORT, e.g. layers.3.mlp:out")
    return Site(path, port)


def split_call(site: str) -> tuple[str, int | None]:
    """Split a site into the site proper and the index of the call within the step, or None.

    ``cell:out#1.grad`` is ``cell:out.grad`` of the second call.
    """
    call = _CALL.search(site)
    return (site[: call.start()] + site[call.end() :], int(call[1])) if call else (site, None)


def module_of(site: str) -> str:
    """Return the module path of a site: ``model.norm`` for ``model.norm:out``; the site need not be valid."""
    return site.rpartition(":")[0]


def port_of(site: str) -> str:
    """Return the port of a site: ``in[input]`` for ``lm_head:in[input]``."""
    return site.rpartition(":")[2]


def is_parameter(site: str) -> bool:
    """Return whether the site is a parameter, a buffer or a gradient of one; these never have token rows, whatever
    their shape."""
    return port_of(site).startswith(("param[", "buffer["))


NUMBERED_LAYER = r"(?i:layers?|blocks?|h)[_-]?(\d{1,5})"
"""Regular expression for a path component with a layer number: ``layer2`` (torchvision's ResNet) or ``block_3``."""
_LAYER = re.compile(rf"(?:\A|\.)(?:(\d+)|{NUMBERED_LAYER}|mid|mid_block|middle_block)(?![^.])")


@lru_cache(maxsize=65536)
def layer_of(path: str) -> int | None:
    """Return the number in the first numbered component of a dotted path, or None.

    3 for ``layers.3.mlp.experts.1``, 2 for ``layer2.0.conv1``. The middle block of a diffusion model is a single block:
    the numbers of its parts (``mid_block.attentions.0``) are not layers.
    """
    match = _LAYER.search(path)
    return None if match is None or match.lastindex is None else int(match[match.lastindex])


class Glob:
    """A pattern over sites: ``*`` matches any sequence of characters, ``?`` any single character; brackets are literal.

    A pattern without ``:`` matches the path, with any port, or the whole site: ``*hidden_states*`` finds a port. A
    pattern may begin at any dot boundary of the path: ``layers.3.*`` and ``model.layers.3.*`` both match
    ``model.layers.3.mlp:out``.
    """

    __slots__ = ("_literal", "_regex", "text")

    def __init__(self, text: str) -> None:
        if not text:
            raise SiteError("an empty pattern selects nothing; '*' selects every site")
        self.text = text
        path, colon, _ = text.rpartition(":")
        bodies = [text] if colon or text.endswith("*") else [text, f"{text}:*"]
        # A pattern that names the root (":out") is anchored: otherwise it would match every module's port.
        if (not colon or path) and not text.startswith("*"):
            bodies += [f"*.{body}" for body in bodies]
        self._literal = max(re.split(r"[*?]", text), key=len)  # fast rejection: most sites do not contain it
        self._regex = re.compile("|".join(_translate(body) for body in bodies))

    def __repr__(self) -> str:
        return f"Glob({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Glob) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def matches(self, site: Site | str) -> bool:
        """Return whether the pattern matches the site."""
        text = str(site)
        return self._literal in text and self._regex.fullmatch(text) is not None


def _translate(glob: str) -> str:
    """Translate a glob to a regular expression without backtracking: the first match between two stars suffices."""
    first, *rest = (re.escape(chunk).replace(r"\?", ".") for chunk in re.split(r"\*+", glob))
    if not rest:
        return first
    return first + "".join(f"(?>.*?{chunk})" for chunk in rest[:-1]) + f".*{rest[-1]}"


def describe_layers(sites: Iterable[Site | str]) -> str:
    """Describe the layers of ``sites`` for error messages: ``layers are 0-27``, or the first paths if none is
    numbered."""
    sites = list(sites)
    paths = sorted({module_of(str(site)) for site in sites})
    layers = sorted({layer for path in paths if (layer := layer_of(path)) is not None})
    if layers:
        return f"layers are {compact_ranges(layers)}"
    if paths == [""]:  # only explicit dumps and arguments
        names = sorted({str(site) for site in sites})
        return f"sites are {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
    shown = ", ".join(path or "(root)" for path in paths[:6])
    return f"modules are {shown}{', ...' if len(paths) > 6 else ''}" if paths else "there are no sites"


def describe_sites(glob: str, sites: Iterable[Site | str]) -> str:
    """Suggest alternatives for a ``glob`` that matches none of ``sites``: the ports of its module, if that module
    exists.

    Otherwise returns the result of :func:`describe_modules`.
    """
    names = sorted({str(site) for site in sites})
    path = module_of(glob)
    ports = [port_of(name) for name in names if path and module_of(name) == path]
    if not ports:
        return describe_modules(glob, names)
    return f"{path} has {', '.join(ports[:6])}{', ...' if len(ports) > 6 else ''}"


def describe_modules(glob: str, sites: Iterable[Site | str]) -> str:
    """List the children of the innermost existing module on the path of ``glob``: ``mid contains conv1, conv2``.

    If the children are numbered layers, or no such module exists, returns the result of :func:`describe_layers`.
    """
    names = {str(site) for site in sites}
    parent = re.split(r"[*?:]", glob, maxsplit=1)[0]
    while parent := parent.rpartition(".")[0]:
        inside = re.compile(rf"(?:.*\.)?{re.escape(parent)}\.([^.:]+)")
        children = sorted({part[1] for name in names if (part := inside.match(name))})
        if any(map(str.isdigit, children)):
            break
        if children:
            return f"{parent} contains {', '.join(children[:8])}{', ...' if len(children) > 8 else ''}"
    return describe_layers(names)


def compact_ranges(numbers: Iterable[int]) -> str:
    """Format integers as ranges: ``[0, 1, 2, 5]`` -> ``0-2,5``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def parse_ranges(text: str) -> frozenset[int]:
    """Parse integer ranges: ``0-2,5`` -> {0, 1, 2, 5}; raises SiteError for anything else."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise SiteError(f"{text!r} is not a list of numbers; write e.g. 0-3,27")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise SiteError(f"range {part.strip()} in {text!r} ends before it begins")
        if last - first >= MAX_RANGE:
            raise SiteError(f"range {part.strip()} in {text!r} has more than {MAX_RANGE:,} numbers")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)
