"""Per-request limits, checked before anything is computed."""

from dataclasses import dataclass

from tapscope.core.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one request, which keep it from delaying other requests for long."""

    max_generations: int = 512
    """Maximum number of generations: prompts times ``n``."""
    max_answer_values: int = 200_000
    """Maximum number of values in one response: log-probabilities and elements of hidden states."""

    def check_generations(self, prompts: int, n: int, param: str) -> None:
        """Raise RequestError if ``prompts`` times ``n`` exceeds the limit; ``param`` names the body field."""
        if prompts * n > self.max_generations:
            times = "" if n == 1 else f" × n={n}"
            raise RequestError(
                f"{param}: {prompts} prompts{times} are {prompts * n} generations; this server takes at most "
                f"{self.max_generations} in one request (max_generations); send several requests",
                param=param,
            )

    def check_answer(self, values: int, param: str) -> None:
        """Raise RequestError if a response of ``values`` numbers exceeds the limit."""
        if values > self.max_answer_values:
            raise RequestError(
                f"{param}: the answer would hold up to {values} numbers; this server gives at most "
                f"{self.max_answer_values} in one answer (max_answer_values); ask for fewer tokens or fewer of each",
                param=param,
            )
