"""Workload: the requests of a case, with all tokens fixed, so that both sides compute the same rows."""

import random
from dataclasses import dataclass, replace

VOCAB = 256
BOS = 0
_LENGTHS = {
    "short": ((13, 4), (7, 4), (10, 4)),
    "one": ((16, 4),),
    "long": ((40, 3), (5, 3)),
    "longest": ((600, 2), (9, 2)),
    "token": ((1, 1),),
    "many": ((3, 2), (17, 2), (1, 2), (9, 2), (30, 2), (12, 2), (5, 2), (21, 2)),
    "shared": ((28, 3), (31, 3), (24, 3)),
}
"""(prompt tokens, generated tokens) of each request."""
_SHARED = 20
"""Length of the common prefix of the workload ``shared``."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its prompt, and the forced tokens that follow regardless of the model's predictions."""

    name: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and generated tokens."""
        return self.prompt + self.forced


def requests(name: str, seed: int = 0, order: str = "given") -> list[Request]:
    """Return the requests of a workload; all start with the same token, and some tokens repeat, as in natural text."""
    draw = random.Random(f"{name} {seed}")
    found = []
    for i, (prompt, forced) in enumerate(_LENGTHS[name]):
        tokens = [BOS]
        while len(tokens) < prompt + forced:
            again = len(tokens) > 3 and draw.random() < 0.3
            tokens.append(draw.choice(tokens[1:]) if again else draw.randrange(1, VOCAB))
        found.append(Request(f"r{i}", tuple(tokens[:prompt]), tuple(tokens[prompt:])))
    if name == "shared":
        head = found[0].prompt[:_SHARED]
        found = [replace(r, prompt=head + r.prompt[_SHARED:]) for r in found]
    return found[::-1] if order == "reversed" else found
