"""Sharding: the heads and features of each tensor-parallel rank; sizes need not be divisible."""

from dataclasses import dataclass, replace

from tapscope.engine.distributed.tensor_parallel import TensorParallel, span


@dataclass(frozen=True, slots=True)
class Shard:
    """Range [start, end) of ``total`` items along an axis; adjacent ranks may hold copies of the same shard."""

    total: int
    start: int
    end: int
    copies: int = 1
    """Number of adjacent ranks that hold this shard."""
    is_whole: bool = False
    """Whether every rank holds all items."""

    @classmethod
    def of(cls, total: int, tp: TensorParallel) -> "Shard":
        """Return this rank's block. Block sizes differ by at most one and are 0 on surplus ranks."""
        return cls(total, *tp.span(total))

    @property
    def count(self) -> int:
        """Number of items on this rank."""
        return self.end - self.start

    def scaled(self, width: int) -> "Shard":
        """Return the same shard in units of features, ``width`` per item."""
        return replace(self, total=self.total * width, start=self.start * width, end=self.end * width)

    def dims(self, name: str, rest: str = "") -> str:
        """Return dims of [tokens, items] or, with ``rest``, [tokens, items, ...]; ``name`` is the axis of items."""
        rest = f" {rest}" if rest else ""
        if self.is_whole:
            return f"t {name}{rest} # tp:replicated"
        copied = f"={self.total}x{self.copies}" if self.copies > 1 else ""
        return f"t {name}{copied}[tp]{rest}"


@dataclass(frozen=True, slots=True)
class HeadShards:
    """Heads of grouped-query attention on one rank."""

    queries: Shard
    keys: Shard
    """Key/value heads that this rank computes."""
    used: tuple[int, int]
    """[start, end) within ``keys``: heads that this rank's queries attend to; only these are cached."""

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, tp: TensorParallel) -> "HeadShards":
        """Distribute the heads over the ranks and return this rank's part.

        With at most one rank per key/value head, a rank holds a block of key/value heads with all their query heads.

        With more ranks, each rank has one key/value head and a block of its query heads. If the number of ranks is a
        multiple of the number of key/value heads, adjacent ranks compute the same keys and values; otherwise every rank
        computes all of them and keeps its own. There must not be more ranks than query heads
        (`ModelConfig.check_split`).
        """
        group = num_heads // num_kv_heads
        if tp.size <= num_kv_heads:
            keys = Shard.of(num_kv_heads, tp)
            return cls(keys.scaled(group), keys, (0, keys.count))
        teams = [span(tp.size, head, num_kv_heads) for head in range(num_kv_heads)]
        head, (first, end) = next(each for each in enumerate(teams) if each[1][0] <= tp.rank < each[1][1])
        start, stop = span(group, tp.rank - first, end - first)
        queries = Shard(num_heads, head * group + start, head * group + stop)
        if tp.size % num_kv_heads:
            return cls(queries, Shard(num_kv_heads, 0, num_kv_heads, is_whole=True), (head, head + 1))
        return cls(queries, Shard(num_kv_heads, head, head + 1, copies=end - first), (0, 1))
