"""Encode Prometheus metrics in the text format that the scraper requests."""

from collections.abc import Sequence

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

_END = b"# EOF\n"  # terminates an OpenMetrics exposition and must occur only once


def exposition(collectors: Sequence[Collector], accept: str = "") -> bytes:
    """Encode all ``collectors`` as one exposition, in Prometheus' text format 0.0.4 by default.

    The format is OpenMetrics 1.0 if the header ``accept`` contains ``application/openmetrics-text``.
    """
    encode, _ = choose_encoder(accept)
    return joined([encode(collector) for collector in collectors])


def content_type(accept: str = "") -> str:
    """Return the Content-Type of :func:`exposition` for the header ``accept``."""
    return choose_encoder(accept)[1]


def joined(parts: Sequence[bytes]) -> bytes:
    """Join expositions of the same format; their metric names must be distinct."""
    is_open = any(text.endswith(_END) for text in parts)
    return b"".join(text.removesuffix(_END) for text in parts) + (_END if is_open else b"")
