"""Find tags in streamed text, regardless of how the stream splits the text."""

from collections.abc import Sequence


def split_at_tag(text: str, tags: Sequence[str], *, is_final: bool) -> tuple[str, str, str]:
    """Return (text before the first tag, the tag, text after the tag); the longest tag wins at equal positions.

    If ``text`` contains no tag, the second item is empty and the third is the suffix that may be the start of a tag;
    with ``is_final`` this suffix is empty.
    """
    places = [(text.find(tag), -len(tag), tag) for tag in tags if tag in text]
    if places:
        at, _, tag = min(places)
        return text[:at], tag, text[at + len(tag) :]
    cut = len(text) - (0 if is_final else _num_pending(text, tags))
    return text[:cut], "", text[cut:]


def _num_pending(text: str, tags: Sequence[str]) -> int:
    """Return the number of characters at the end of ``text`` that may be the start of a tag."""
    longest = min(max((len(tag) for tag in tags), default=1) - 1, len(text))
    sizes = (size for size in range(longest, 0, -1) if any(tag.startswith(text[-size:]) for tag in tags))
    return next(sizes, 0)
