"""TokenLogprob: what is told about the probability of one token. Torch-free."""

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probability of one token and of the most likely ones at its place."""

    token_id: int
    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""
    chosen: tuple[tuple[int, float], ...] = ()
    """The same of the tokens that the request names, in its order."""
    full: tuple[float, ...] | None = None
    """Of every token of the vocabulary, where the request asked for it."""

    @property
    def num_values(self) -> int:
        """Log-probabilities in it."""
        return 1 + len(self.top) + len(self.chosen) + len(self.full or ())
