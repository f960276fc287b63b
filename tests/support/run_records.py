"""Records of a small run."""

from hypothesis import strategies as st

from tapscope.core import dtypes
from tapscope.run_format.record import Entry, Key, Record, Slice, Stats, StoredSketch

_floats = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))


_sizes = st.integers(0, 1 << 40)


_stats = st.builds(
    Stats, *[_sizes] * 6, _floats, _floats, _floats, _floats.map(lambda x: x or 0.0), _floats.map(lambda x: x or 0.0)
)


_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=4,
)


_keys = st.builds(
    Key,
    st.sampled_from(["layers.0.mlp:out", ":out[logits]", 'we"ird:in[ü]']),
    _sizes,
    st.just(3),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from(["forward", "recompute"]),
    st.sampled_from(["", "draft"]),
)


sketches = st.none() | st.builds(
    StoredSketch, st.booleans(), st.integers(0, (1 << 32) - 1), st.just(Entry("seg-000000.safetensors", 131136, 1024))
)


def one_payload(record: Record) -> Record:
    """Drop the payload of a record with a sketch: a record has at most one of them."""
    return record if record.sketch is None else record._replace(entry=None)


_records = st.builds(
    Record,
    _keys,
    _sizes,
    st.sampled_from([*dtypes.NAMES, None]),
    st.just((2, 3)),
    st.sampled_from([None, "t h[tp]"]),
    st.sampled_from([None, ((0, 4), (9, 1))]),
    st.one_of(st.none(), _stats),
    st.sampled_from([None, "00ff" * 8]),
    st.sampled_from([None, "00ff" * 4]),
    st.sampled_from([None, Entry("seg-000000.safetensors", 131072, 24)]),
    st.sampled_from([None, {"type": "int", "value": 3}]),
    st.sampled_from([None, Slice((0, 10, 2), (12, 3))]),
    st.sampled_from([None, 1 << 20]),
    st.one_of(st.none(), st.dictionaries(st.text(max_size=4), _json, max_size=3)),
    sketches,
).map(one_payload)
