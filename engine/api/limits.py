"""Limits: how much one request may ask for, checked before anything is computed for it."""

from dataclasses import dataclass

from tapscope.core.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Settings of a server that bound one request, so that it cannot delay the others for long."""

    max_generations: int = 512
    """Generations: prompts times ``n``."""
    max_answer_values: int = 200_000
    """Numbers in one answer: log-probabilities and elements of hidden states."""

    def check_generations(self, prompts: int, n: int, param: str) -> None:
        """Raise RequestError where ``prompts`` times ``n`` are too many; ``param`` is the body's field."""
        if prompts * n > self.max_generations:
            times = "" if n == 1 else f" × n={n}"
            raise RequestError(
                f"{param}: {prompts} prompts{times} are {prompts * n} generations; this server takes at most "
                f"{self.max_generations} in one request (max_generations); send several requests",
                param=param,
            )

    def check_answer(self, values: int, param: str) -> None:
        """Raise RequestError where an answer would hold ``values`` numbers and that is too many."""
        if values > self.max_answer_values:
            raise RequestError(
                f"{param}: the answer would hold up to {values} numbers; this server gives at most "
                f"{self.max_answer_values} in one answer (max_answer_values); ask for fewer tokens or fewer of each",
                param=param,
            )
