"""Residual sums: decoder layers of vLLM and SGLang return a hidden state and a residual, which the next norm adds.

Other frameworks record the sum of both as the output or input of a layer, or as the input of a norm. SGLang's dumper
numbers positional arguments; there, the two are recognized as the floating-point inputs of equal shape.
"""

import re
from collections.abc import Iterator, Mapping

from tapscope.comparator.runs.derived_tensor import SumOfSites
from tapscope.comparator.runs.names import canonical_name
from tapscope.comparator.runs.series import Series, derived_series, fire_together
from tapscope.core.site import module_of

HIDDEN_INPUT = "in[hidden_states]"
_RESIDUAL = ":in[residual]"
_POSITIONAL = re.compile(r"in\[args\.\d+\]")

Offer = tuple[str, tuple[str, ...], Series]
"""(name, names replaced, derived series)."""


def residual_sums(series: Mapping[str, Series], others: Mapping[str, Series]) -> Iterator[Offer]:
    """Yield sums of hidden state and residual, and positional hidden states under the usual name.

    Skipped where ``others`` also record the residual or the positional argument.
    """
    offers: list[Offer] = [
        (trio[0], trio[1:], derived_series(trio[0], SumOfSites(), (series[trio[1]], series[trio[2]])))
        for name in series
        if (trio := _outputs(name, series) or _inputs(name, series)) and _are_alike(series[trio[1]], series[trio[2]])
    ]
    for path, names in _positional(series).items():
        target = f"{path}:{HIDDEN_INPUT}"
        if target in series:
            continue
        if len(names) == 1:
            offers.append((target, (names[0],), series[names[0]]))
        elif len(names) == 2 and not path.endswith("attn") and _are_alike(series[names[0]], series[names[1]]):
            made = derived_series(target, SumOfSites(), (series[names[0]], series[names[1]]))
            offers.append((target, (names[0], names[1]), made))
    known = {canonical_name(name) for name in others} if offers else set()
    for name, parts, one in offers:
        if canonical_name(parts[-1]) not in known:  # parts[-1]: the residual, or the positional argument
            yield name, parts, one


def _are_alike(one: Series, two: Series) -> bool:
    return one.is_float and two.is_float and one.first.shape == two.first.shape and fire_together((one, two))


def _outputs(name: str, series: Mapping[str, Series]) -> tuple[str, str, str] | None:
    """Return (name of the sum, hidden state, residual) if ``name`` is the second output of a layer; otherwise None."""
    if not name.endswith(":out[1]"):
        return None
    path = module_of(name)
    hidden = f"{path}:out[0]"
    return (f"{path}:out", hidden, name) if _is_layer(path) and hidden in series else None


def _inputs(name: str, series: Mapping[str, Series]) -> tuple[str, str, str] | None:
    """Return (name of the sum, hidden state, residual) if ``name`` is the residual input of a layer or norm with one
    other input; otherwise None."""
    if not name.endswith(_RESIDUAL):
        return None
    path = module_of(name)
    inputs = [f"{path}:in[{what}]" for what in ("hidden_states", "x", "input") if f"{path}:in[{what}]" in series]
    return (f"{path}:{HIDDEN_INPUT}", inputs[0], name) if len(inputs) == 1 else None


def _positional(series: Mapping[str, Series]) -> dict[str, list[str]]:
    """Return the names of positional floating-point inputs of layers, norms and attention modules, by module path."""
    names: dict[str, list[str]] = {}
    for name, one in series.items():
        if ":in[args." not in name:
            continue
        path, _, port = name.rpartition(":")
        if _POSITIONAL.fullmatch(port) and one.is_float and (_is_layer(path) or path.endswith(("norm", "attn"))):
            names.setdefault(path, []).append(name)
    return names


def _is_layer(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()
