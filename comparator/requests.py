"""Requests: which request of the target is which of the baseline, and where their tokens part."""

from dataclasses import dataclass

from tapscope.run import Run


@dataclass(frozen=True, slots=True)
class Fork:
    """The first position at which two runs of one request hold different tokens."""

    index: int
    """Which of the paired requests."""
    request: str
    """Its name in the baseline."""
    position: int
    baseline_token: int
    target_token: int
    in_prompt: bool
    """Whether the tokens part within the prompt: the runs were given different text."""


def match_requests(
    baseline: Run, target: Run, left: list[str], right: list[str]
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Pair the requests ``left`` and ``right`` by name, then by equal prompts.

    Returns (pairs of names, notes, problems).
    """
    names = set(right)
    pairs = [(name, name) for name in left if name in names]
    taken = {name for name, _ in pairs}
    rest_left, rest_right = [n for n in left if n not in taken], [n for n in right if n not in taken]
    by_tokens = _by_prompt(baseline, target, rest_left, rest_right) if rest_left and rest_right else []
    notes = [f"{len(by_tokens)} requests with different names paired by equal prompts"] if by_tokens else []
    lost = [
        (baseline.name, [n for n in rest_left if n not in {a for a, _ in by_tokens}]),
        (target.name, [n for n in rest_right if n not in {b for _, b in by_tokens}]),
    ]
    problems = [f"requests only in {run}: {_some(missing)}" for run, missing in lost if missing]
    return pairs + by_tokens, notes, problems


def _by_prompt(baseline: Run, target: Run, left: list[str], right: list[str]) -> list[tuple[str, str]]:
    prompts = baseline.prompts(), target.prompts()
    waiting: dict[tuple[int, ...], list[str]] = {}
    for name in reversed(right):
        waiting.setdefault(tuple(prompts[1].get(name, ())), []).append(name)
    waiting.pop((), None)  # unknown prompts are not equal prompts
    pairs = []
    for name in left:
        same = waiting.get(tuple(prompts[0].get(name, ())))
        if same:
            pairs.append((name, same.pop()))
    return pairs


def find_forks(baseline: Run, target: Run, requests: list[tuple[str, str]]) -> tuple[tuple[Fork, ...], list[str]]:
    """Where the paired ``requests`` part, and notes on those whose tokens are unknown."""
    tokens, prompts = (baseline.tokens(), target.tokens()), (baseline.prompts(), target.prompts())
    forks, unknown = [], []
    for index, (a, b) in enumerate(requests):
        left, right = tokens[0].get(a, {}), tokens[1].get(b, {})
        both = left.keys() & right.keys()
        if not both:
            unknown.append(a)
            continue
        position = min((p for p in both if left[p] != right[p]), default=None)
        if position is not None:
            # What one side was given the other may have generated: only the part that both were given is prompt.
            given = min(min(left) + len(prompts[0].get(a, ())), min(right) + len(prompts[1].get(b, ())))
            forks.append(Fork(index, a, position, left[position], right[position], position < given))
    notes = [f"token ids unknown, so prefixes were not checked, for requests {_some(unknown)}"] if unknown else []
    return tuple(forks), notes


def _some(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
