"""How SGLang's dumper names a value, and the site that it means.

A file is named by its tags, ``step=0___rank=1___dump_index=7___name=NAME___layer_id=3.pt``, and NAME is what was given
to ``dump()``, or what a hook made up: ``non_intrusive__MODULE.PATH.output``, ``….inputs.0``, ``grad__NAME``,
``param__NAME``.
"""

from typing import Any

HOOK = "non_intrusive__"
GRAD = "grad__"
PARAM = "param__"
CORE = frozenset(
    {
        *("input_ids", "positions", "seq_lens", "req_pool_indices", "rids"),
        *("position_ids", "cu_seqlens_q", "cu_seqlens_kv", "qkv_format"),
    }
)
"""Arguments of the model that the hooks dump under their bare names."""

_IN_SITES = str.maketrans("[]:", "();")


def tags_of_name(stem: str) -> dict[str, str]:
    """The tags in a file's name (without ``.pt``); a part without ``=`` is none."""
    return dict([part.split("=", 1) for part in stem.split("___") if "=" in part])


def is_dump_name(name: str) -> bool:
    """Whether a file is named like a dump: ``k=v___k=v.pt`` with a step, a rank or a name among the tags."""
    return name.endswith(".pt") and are_dump_tags(tags_of_name(name.removesuffix(".pt")))


def are_dump_tags(tags: dict[str, str]) -> bool:
    """Whether the tags in a file's name are those of a dump."""
    return "step" in tags or "rank" in tags or "name" in tags


def site_of(name: str, tags: dict[str, Any]) -> str:
    """The site of a dumped name; ``tags`` may hold its layer."""
    if name.startswith(GRAD):
        return f"{site_of(name.removeprefix(GRAD), tags)}.grad"
    if name.startswith(PARAM):
        path, _, last = name.removeprefix(PARAM).rpartition(".")
        return f"{_path(path)}:param[{clean_part(last)}]"
    if name.startswith(HOOK):
        return _hooked(name.removeprefix(HOOK))
    if name in CORE:
        return f":in[{name}]"
    layer = tags.get("layer_id", tags.get("layer"))
    return f"{f'layers.{layer}' if _is_layer(layer) else ''}:tap[{clean_part(name)}]"


def _hooked(name: str) -> str:
    """``MODULE.inputs.KEY`` is ``MODULE:in[KEY]``, ``MODULE.output`` ``:out``, ``MODULE.output.KEY`` ``:out[KEY]``.

    A position becomes ``args.N``: the dumper does not say what the argument is called. The last ``inputs`` or
    ``output`` counts, for modules are called so too.
    """
    parts = name.split(".")
    places = [i for i, part in enumerate(parts) if part == "output" or (part == "inputs" and i < len(parts) - 1)]
    if not places:
        return f"{_path(name)}:out"
    place = places[-1]
    if len(places) > 1 and places[-2] == place - 1 and parts[place - 1] == "inputs":
        place -= 1  # an argument called "output"
    path, rest = _path(".".join(parts[:place])), clean_part(".".join(parts[place + 1 :]))
    if parts[place] == "output":
        return f"{path}:out[{rest}]" if place < len(parts) - 1 else f"{path}:out"
    return f"{path}:in[{f'args.{rest}' if rest[0].isdecimal() else rest}]"


def _path(text: str) -> str:
    return clean_part(text) if text else ""


def clean_part(text: str) -> str:
    """The text as it may stand in a site: one line, without the characters that mean something there."""
    clean = text.translate(_IN_SITES).encode(errors="replace").decode()
    return "".join(each if each.isprintable() else "?" for each in clean)[:512] or "(empty)"


def _is_layer(value: Any) -> bool:
    return str(value).isdecimal() and len(str(value)) < 7
