"""Sums: vLLM's and SGLang's decoder layers pass on a hidden state and the residual that the next norm adds to it.

What other frameworks call the output of a layer, the input of a layer or of a norm is the sum of both.
"""

from collections.abc import Iterator, Mapping

from tapscope.comparator.names import common
from tapscope.comparator.recipe import Sum
from tapscope.comparator.series import Series, fire_together, made_of

_RESIDUAL = "in[residual]"


def sums(series: Mapping[str, Series], others: Mapping[str, Series]) -> Iterator[tuple[str, tuple[str, str], Series]]:
    """(name, the two names it is made of, the sum) for every pair that the ``others`` do not record as a pair."""
    known = {common(name) for name in others}
    for name in series:
        pair = _outputs(name, series) or _inputs(name, series)
        if pair is None or common(pair[2]) in known:
            continue
        one, two = series[pair[1]], series[pair[2]]
        if one.is_float and two.is_float and one.first.shape == two.first.shape and fire_together((one, two)):
            yield pair[0], pair[1:], made_of(pair[0], Sum(), (one, two))


def _outputs(name: str, series: Mapping[str, Series]) -> tuple[str, str, str] | None:
    """(sum, hidden, residual) where ``name`` is the second output of a layer."""
    path, _, port = name.rpartition(":")
    hidden = f"{path}:out[0]"
    if port != "out[1]" or not path.rpartition(".")[2].isdigit() or hidden not in series:
        return None
    return f"{path}:out", hidden, name


def _inputs(name: str, series: Mapping[str, Series]) -> tuple[str, str, str] | None:
    """(sum, hidden, residual) where ``name`` is a residual that goes into a layer or norm beside one other input."""
    path, _, port = name.rpartition(":")
    if port != _RESIDUAL:
        return None
    beside = [f"{path}:in[{what}]" for what in ("hidden_states", "x", "input") if f"{path}:in[{what}]" in series]
    return (f"{path}:in[hidden_states]", beside[0], name) if len(beside) == 1 else None
