"""Model mismatch: detect runs of different models, by hyperparameters and by the shapes of their sites."""

from collections.abc import Sequence

from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.core.errors import NothingInCommonError
from tapscope.run_format.run import Run

MIN_SITES = 4
"""Minimum number of mismatched sites that indicate different models: a single one may have its own reason."""


def check_models(runs: tuple[Run, Run], results: Sequence[PairResult]) -> None:
    """Raise NothingInCommonError if most tensors of the two runs have different widths."""
    tensors = [one for one in results if one.is_matched and one.dtypes[0] and not one.is_exact]
    odd = [one for one in tensors if one.problem and _widths(one)]
    if len(odd) < MIN_SITES or 2 * len(odd) <= len(tensors):
        return
    facts = differences(*runs)
    why = f"are of different models ({', '.join(facts)})" if facts else "do not look like runs of the same model"
    first = odd[0]
    raise NothingInCommonError(
        f"{runs[0].path} and {runs[1].path} {why}: {len(odd)} of the {len(tensors)} tensors they share have different "
        f"widths, e.g. {first.site}: {first.problem}; compare runs of one checkpoint, or select sites with --site"
    )


def differences(baseline: Run, target: Run) -> list[str]:
    """Return ``hidden_size 64 against 128`` for each hyperparameter whose recorded values differ."""
    left, right = baseline.model_config, target.model_config
    return [f"{key} {left[key]:g} against {right[key]:g}" for key in left if key in right and left[key] != right[key]]


def _widths(result: PairResult) -> bool:
    """Return whether the last axes differ in a way that shards or fused axes cannot explain."""
    assert result.baseline is not None
    assert result.target is not None
    shapes = result.baseline.shape, result.target.shape
    ranks = max(len(result.baseline.ranks), len(result.target.ranks))
    return ranks == 1 and all(shapes) and len(shapes[0]) == len(shapes[1]) and shapes[0][-1] != shapes[1][-1]
