"""Passages: under pipeline parallelism a module around the layers fires on every stage, with what that stage passes on.

The model's own output is the last stage's and its input the first one's; the others get names that say their stage.
"""

from collections.abc import Mapping, Sequence

from tapscope.run_format.record import Record


def name_stage_boundaries(records: Sequence[Record], stage: Mapping[int, int], holders: set[str]) -> list[Record]:
    """The records, where those of ``holders`` (paths of modules around the layers) that differ between stages are
    named ``out[stage0]``, ``in[hidden_states.stage1]`` but for the stage that stands for the model."""
    apart = _apart(records, stage, holders)
    return [_named(record, stage, apart) for record in records]


def _apart(records: Sequence[Record], stage: Mapping[int, int], holders: set[str]) -> dict[str, tuple[int, int]]:
    """Site -> (first, last stage), for those that hold other values on another stage."""
    seen: dict[str, set[int]] = {}
    values: dict[tuple[str, int, int, int, str], set[str | None]] = {}
    for record in records:
        key = record.key
        if key.site.rpartition(":")[0] in holders and record.dtype is not None:
            seen.setdefault(key.site, set()).add(stage[key.rank])
            firing = (key.site, key.step, key.micro, key.occurrence, key.pass_)
            values.setdefault(firing, set()).add(record.hash)
    differ = {firing[0] for firing, hashes in values.items() if len(hashes) > 1}
    return {site: (min(stages), max(stages)) for site, stages in seen.items() if len(stages) > 1 and site in differ}


def _named(record: Record, stage: Mapping[int, int], apart: Mapping[str, tuple[int, int]]) -> Record:
    site, here = record.key.site, stage[record.key.rank]
    if site not in apart:
        return record
    path, _, port = site.rpartition(":")
    if here == apart[site][0 if port.startswith("in[") else 1]:
        return record
    bare, grad = port.removesuffix(".grad"), ".grad" if port.endswith(".grad") else ""
    named = f"{bare[:-1]}.stage{here}]" if bare.endswith("]") else f"{bare}[stage{here}]"
    return record._replace(key=record.key._replace(site=f"{path}:{named}{grad}"))
