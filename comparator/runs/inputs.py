"""Single inputs: argument names differ by framework, but a module's only input matches the other run's only input."""

from collections import Counter
from collections.abc import Mapping

from tapscope.comparator.runs.names import canonical_name
from tapscope.comparator.runs.series import Series

Names = Mapping[str, Series]

ARGUMENTS = frozenset({"input_ids", "position_ids", "positions", "attention_mask", "residual", "rotary_pos_emb"})
"""Names with one meaning: an input with one of these names never matches one with another name."""


def only_inputs(left: tuple[Names, Names], everything: tuple[Names, Names]) -> list[tuple[str, str]]:
    """(baseline's name, target's) of inputs that are the only ones of a module and unmatched (``left``) on both
    sides."""
    one, two = (_single(mine, every) for mine, every in zip(left, everything, strict=True))
    both = [(one[module], name) for module, name in two.items() if module in one]
    return [pair for pair in both if not {_argument(name) for name in pair} <= ARGUMENTS]


def _single(series: Mapping[str, Series], everything: Mapping[str, Series]) -> dict[tuple[str, bool], str]:
    """(common path, whether of gradients) -> name of the only tensor input of a module, if it is unmatched.

    An input whose siblings are matched already is excluded: the rest may be anything.
    """
    inputs = Counter(_input_of(name) for name, one in everything.items() if one.first.dtype is not None)
    found: dict[tuple[str, bool], list[str]] = {}
    for name, one in series.items():
        place = _input_of(name)
        if place is not None and one.first.dtype is not None and inputs[place] == 1:
            found.setdefault((canonical_name(f"{place[0]}:"), place[1]), []).append(name)
    return {path: names[0] for path, names in found.items() if len(names) == 1}


def _argument(name: str) -> str:
    return name.rpartition(":in[")[2].removesuffix(".grad").removesuffix("]")


def _input_of(name: str) -> tuple[str, bool] | None:
    """(module path, whether a gradient) of an input's site; None for other sites."""
    path, _, port = name.rpartition(":")
    return (path, port.endswith(".grad")) if port.startswith("in[") else None
