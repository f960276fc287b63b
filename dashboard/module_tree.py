"""Module tree of a run, built from its sites."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class SiteNode:
    """One module of the site tree. Modules are numbered in preorder, so a subtree is the range from ``first`` to
    ``stop``."""

    path: str
    name: str
    children: dict[str, "SiteNode"] = field(default_factory=dict)
    first: int = 0
    """Preorder number of the module; smaller than the numbers of its submodules."""
    stop: int = 0
    """One more than the largest number in the module's subtree."""


def contains(path: str, site: str) -> bool:
    """Return whether the site belongs to the module or to one of its submodules; an empty path contains every site."""
    return not path or site.startswith((path + ".", path + ":"))


def relative(path: str, site: str) -> str:
    """Return the site relative to the module: ``o_proj:out`` under ``layers.3.attn``; its own ports as ``attn:out``."""
    if not path:
        return site
    if site.startswith(path + "."):
        return site[len(path) + 1 :]
    return path.rpartition(".")[2] + site[len(path) :]


def modules_of(sites: Iterable[str]) -> dict[str, SiteNode]:
    """Build the module tree; return path -> module, including the root (empty path).

    Children are in order of first firing, or sorted by number if all their names are numbers.
    """
    nodes = {"": SiteNode("", "")}
    for site in sites:
        _module(site.rpartition(":")[0], nodes)
    _number(nodes[""])
    return nodes


def _module(path: str, nodes: dict[str, SiteNode]) -> SiteNode:
    missing = []
    while path not in nodes:
        missing.append(path)
        path = path.rpartition(".")[0]
    node = nodes[path]
    for full in reversed(missing):
        name = full[len(node.path) + 1 :] if node.path else full
        node.children[name] = nodes[full] = node = SiteNode(full, name)
    return node


def _number(root: SiteNode) -> None:
    """Sort and number all modules in preorder. Iterative, because module paths of a foreign run may nest deeply."""
    order: list[SiteNode] = []
    stack = [root]
    while stack:
        node = stack.pop()
        if len(node.children) > 1 and all(map(str.isdecimal, node.children)):
            node.children = dict(sorted(node.children.items(), key=lambda item: int(item[0])))
        node.first = len(order)
        order.append(node)
        stack += reversed(node.children.values())
    for node in reversed(order):
        node.stop = max((child.stop for child in node.children.values()), default=node.first + 1)
