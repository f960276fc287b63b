"""Tree: the modules that sites hang on."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tapscope.run_format.record import Record


@dataclass(slots=True)
class SiteNode:
    """One module of the site tree."""

    path: str
    name: str
    children: dict[str, "SiteNode"] = field(default_factory=dict)


def contains(path: str, site: str) -> bool:
    """Whether the site belongs to the module or to one of its submodules."""
    return not path or site.startswith((path + ".", path + ":"))


def relative(path: str, site: str) -> str:
    """The site as seen from the module: ``o_proj:out`` under ``layers.3.attn``; its own ports as ``attn:out``."""
    if not path:
        return site
    if site.startswith(path + "."):
        return site[len(path) + 1 :]
    return path.rpartition(".")[2] + site[len(path) :]


def ancestors(path: str) -> list[str]:
    """The path and every module around it, the root (empty) first."""
    parts = path.split(".") if path else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def build_tree(records: Iterable[Record]) -> SiteNode:
    """Modules in order of first firing; numbered ones by number."""
    root = SiteNode("", "")
    seen: set[str] = set()
    for record in records:
        path = record.key.site.rpartition(":")[0]
        if path in seen:
            continue
        seen.add(path)
        node = root
        for parent, full in zip(ancestors(path), ancestors(path)[1:], strict=False):
            name = full[len(parent) + 1 :] if parent else full
            node = node.children.setdefault(name, SiteNode(full, name))
    _sort_numbered(root)
    return root


def _sort_numbered(node: SiteNode) -> None:
    if node.children and all(name.isdigit() for name in node.children):
        node.children = dict(sorted(node.children.items(), key=lambda item: int(item[0])))
    for child in node.children.values():
        _sort_numbered(child)
