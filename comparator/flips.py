"""Flips: unequal token ids that rounding explains.

Integers must be equal. Two things excuse a sampled token that is not: the request forks right behind it (then the
rows behind are set aside, and the fork is reported), or the logits of that row are so close together that the error
of that row decides between them.
"""

from collections.abc import Mapping, Sequence

from tapscope.comparator.examine import Examined
from tapscope.comparator.requests import Fork


def explain_flips(examined: Sequence[Examined], forks: Sequence[Fork]) -> Mapping[str, str]:
    """Site -> sentence, for sites all of whose unequal integers are the last tokens before a fork."""
    parted = {(fork.request, fork.position - 1) for fork in forks if not fork.in_prompt}
    excused: dict[str, str] = {}
    for one in examined:
        if not one.is_exact or not one.num_unequal or one.num_unequal > len(one.unequal):
            continue
        if all((place.request, place.position) in parted for place in one.unequal):
            excused[one.site] = f"{one.num_unequal} unequal, each where its request's tokens part"
    return excused
