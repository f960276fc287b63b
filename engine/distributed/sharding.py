"""Splits: which heads and features each tensor-parallel rank holds. Nothing needs to divide."""

from dataclasses import dataclass, replace

from tapscope.engine.distributed.tensor_parallel import TensorParallel, span


@dataclass(frozen=True, slots=True)
class Split:
    """[start, end) of ``total`` items of an axis; shares of neighbouring ranks may be copies of each other."""

    total: int
    start: int
    end: int
    copies: int = 1
    """Neighbouring ranks that hold this same share."""
    is_whole: bool = False
    """Every rank holds all of it."""

    @classmethod
    def of(cls, total: int, tp: TensorParallel) -> "Split":
        """This rank's block; blocks differ by one item at most, and are empty where there are more ranks than items."""
        return cls(total, *tp.span(total))

    @property
    def count(self) -> int:
        """Items held here."""
        return self.end - self.start

    def times(self, width: int) -> "Split":
        """The same in features, of which each item has ``width``."""
        return replace(self, total=self.total * width, start=self.start * width, end=self.end * width)

    def dims(self, name: str, rest: str = "") -> str:
        """Dims of [tokens, items] or, with ``rest``, [tokens, items, ...], the axis of items called ``name``."""
        rest = f" {rest}" if rest else ""
        if self.is_whole:
            return f"t {name}{rest} # tp:replicated"
        copied = f"={self.total}x{self.copies}" if self.copies > 1 else ""
        return f"t {name}{copied}[tp]{rest}"


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Heads of grouped-query attention on one rank."""

    queries: Split
    keys: Split
    """Key/value heads whose keys and values are computed here."""
    used: tuple[int, int]
    """[start, end) of the heads of ``keys`` that this rank's queries read; only these are cached."""

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, tp: TensorParallel) -> "HeadSplit":
        """Up to one rank a key/value head, blocks of them with all their query heads.

        With more ranks each serves one key/value head and a block of its query heads. Where the ranks are a multiple
        of those heads, neighbours compute copies of keys and values; otherwise every rank computes all and keeps its
        own. There must be no more ranks than query heads (`ModelConfig.check_split`).
        """
        group = num_heads // num_kv_heads
        if tp.size <= num_kv_heads:
            keys = Split.of(num_kv_heads, tp)
            return cls(keys.times(group), keys, (0, keys.count))
        teams = [span(tp.size, head, num_kv_heads) for head in range(num_kv_heads)]
        head, (first, end) = next(each for each in enumerate(teams) if each[1][0] <= tp.rank < each[1][1])
        start, stop = span(group, tp.rank - first, end - first)
        queries = Split(num_heads, head * group + start, head * group + stop)
        if tp.size % num_kv_heads:
            return cls(queries, Split(num_kv_heads, 0, num_kv_heads, is_whole=True), (head, head + 1))
        return cls(queries, Split(num_kv_heads, head, head + 1, copies=end - first), (0, 1))
