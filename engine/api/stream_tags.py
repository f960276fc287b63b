"""Finds tags in streamed text, independent of how it is split."""

from collections.abc import Sequence


def split_at_tag(text: str, tags: Sequence[str], *, is_final: bool) -> tuple[str, str, str]:
    """(text before the first tag, that tag, text after it); of two tags at one position, the longer.

    Without a tag the second is empty and the third is a suffix that may be the beginning of a tag; with ``is_final``
    the suffix is empty.
    """
    places = [(text.find(tag), -len(tag), tag) for tag in tags if tag in text]
    if places:
        at, _, tag = min(places)
        return text[:at], tag, text[at + len(tag) :]
    cut = len(text) - (0 if is_final else _num_pending(text, tags))
    return text[:cut], "", text[cut:]


def _num_pending(text: str, tags: Sequence[str]) -> int:
    """Characters at the end of ``text`` that may be the beginning of a tag."""
    longest = min(max((len(tag) for tag in tags), default=1) - 1, len(text))
    sizes = (size for size in range(longest, 0, -1) if any(tag.startswith(text[-size:]) for tag in tags))
    return next(sizes, 0)
