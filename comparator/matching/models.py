"""Models: with several models in one run (an actor and its reference, a draft), sites are prefixed by their model."""

from collections.abc import Sequence

from msgspec import structs

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.runs.series import Series


def name_by_model(pairs: Sequence[Pair]) -> tuple[list[Pair], tuple[str, ...]]:
    """(the pairs, their sites named ``MODEL.PATH:PORT`` if there are several models; these models)."""
    models = dict.fromkeys(_series(pair).group[0] for pair in pairs)
    if len(models) < 2:
        return list(pairs), ()
    return [_named(pair) for pair in pairs], tuple(filter(None, models))


def _series(pair: Pair) -> Series:
    found = pair.baseline or pair.target
    assert found is not None
    return found


def _named(pair: Pair) -> Pair:
    series = _series(pair)
    model, site = series.group[0], pair.site or series.site
    if not model:
        return pair
    return structs.replace(pair, site=f"{model}{site}" if site.startswith(":") else f"{model}.{site}")
