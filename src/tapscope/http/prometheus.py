"""Prometheus: metrics as text, in the format that the scraper asks for."""

from collections.abc import Sequence

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

_END = b"# EOF\n"  # ends an OpenMetrics exposition, and may occur nowhere else


def exposition(collectors: Sequence[Collector], accept: str = "") -> bytes:
    """All ``collectors`` as one exposition: Prometheus' format 0.0.4, or what the header ``accept`` names.

    OpenMetrics 1.0 where ``accept`` has ``application/openmetrics-text``.
    """
    encode, _ = choose_encoder(accept)
    return joined([encode(collector) for collector in collectors])


def content_type(accept: str = "") -> str:
    """The Content-Type of :func:`exposition`."""
    return choose_encoder(accept)[1]


def joined(parts: Sequence[bytes]) -> bytes:
    """Join expositions of one format; their metrics have different names."""
    is_open = any(text.endswith(_END) for text in parts)
    return b"".join(text.removesuffix(_END) for text in parts) + (_END if is_open else b"")
