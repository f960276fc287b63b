"""Gated activations: modules that multiply one half of their input by a function of the other, such as ``SiluAndMul``.

vLLM and SGLang name the module ``act_fn``, a name that Hugging Face uses for the function of the gate alone. The
product is the input of ``down_proj`` in every framework.
"""

import re
from collections.abc import Iterator, Mapping

from tapscope.comparator.runs.hints import Hints
from tapscope.comparator.runs.names import canonical_name
from tapscope.comparator.runs.series import Series

_CLASS = re.compile(r"AndMul|MulAnd")
_NAME = re.compile(r"(?:^|\.)(?:act|act_fn|activation|activation_fn|activation_func)$")
PRODUCT = (
    "not compared: it also multiplies by up; the other run's module of this name is the function of the gate alone"
)
FUNCTION = "not compared: the function of the gate alone; the other run's module of this name multiplies by up"


def gated(series: Mapping[str, Series], hints: Hints) -> dict[str, str]:
    """Return common path -> path of the gated activation modules.

    A module counts as gated by its class. If the class is unknown, its output must be half as wide as its input. If no
    input was recorded either, the framework must have only gated activations next to a fused linear.
    """
    paths: dict[str, str] = {}
    for name, one in series.items():
        path, _, port = name.rpartition(":")
        if port.startswith("out") and not port.endswith(".grad") and _is_gated(path, one, series, hints):
            paths[canonical_name(f"{path}:")] = path
    return paths


def _is_gated(path: str, made: Series, series: Mapping[str, Series], hints: Hints) -> bool:
    if cls := hints.class_of(made.site):
        return _CLASS.search(cls) is not None
    if not _NAME.search(path) or not made.is_float or not made.shape:
        return False
    given = [one for name, one in series.items() if name.startswith(f"{path}:in[") and one.is_float and one.shape]
    if given:
        return any(one.shape[-1] == 2 * made.shape[-1] for one in given)
    return hints.framework in ("sglang", "vllm") and any(
        name.startswith(f"{path.rpartition('.')[0]}.gate_up_proj:") for name in series
    )


def ports_of(path: str, series: Mapping[str, Series]) -> list[str]:
    """Return the names of all sites of the module ``path``."""
    return [name for name in series if name.startswith(f"{path}:")]


def down_proj_inputs(products: Mapping[str, Series], others: Mapping[str, Series]) -> Iterator[tuple[str, Series]]:
    """Yield (product name, down-projection input of the other run) for outputs of gated activations.

    A product is skipped unless the down projection has exactly one input.
    """
    inputs: dict[tuple[str, bool], list[Series]] = {}
    for name, one in others.items() if products else ():
        path, _, port = name.rpartition(":")
        if port.startswith("in[") and one.is_tensor:
            inputs.setdefault((canonical_name(f"{path}:"), port.endswith(".grad")), []).append(one)
    for name in products:
        path, _, port = name.rpartition(":")
        holder = path.rpartition(".")[0]
        candidates = inputs.get((canonical_name(f"{holder}.down_proj:"), port.endswith(".grad")), ())
        if len(candidates) == 1:
            yield name, candidates[0]
