"""Stage boundaries: with pipeline parallelism, ancestors of layers fire on every stage, with intermediate values.

The output of the model is that of the last stage, and its input that of the first; the others get a stage suffix.
"""

from collections.abc import Mapping, Sequence

from tapscope.run_format.record import Record


def name_stage_boundaries(records: Sequence[Record], stage: Mapping[int, int], holders: set[str]) -> list[Record]:
    """The records; those of ``holders`` (paths of the ancestors of layers) that differ between stages are named
    ``out[stage0]``, ``in[hidden_states.stage1]``, except on the stage that has the model's own value."""
    apart = _apart(records, stage, holders)
    return [_named(record, stage, apart) for record in records]


def _apart(records: Sequence[Record], stage: Mapping[int, int], holders: set[str]) -> dict[str, tuple[int, int]]:
    """Site -> (first, last stage), for sites with different values on different stages."""
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
