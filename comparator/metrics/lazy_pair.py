"""Lazy pair: a pair to measure, whose firings are split into column blocks on access."""

from collections.abc import Sequence
from functools import cached_property

from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import Block, blocks
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.batched_pairs import BatchedPairs


class _Side:
    """The column blocks of one side's firings, each computed once."""

    def __init__(self, wholes: Sequence[AssembledTensor], axes: tuple[int, ...]) -> None:
        self._wholes, self._axes = wholes, axes
        self._blocks: dict[int, list[Block]] = {}

    def __getitem__(self, index: int) -> list[Block]:
        if index not in self._blocks:
            whole = self._wholes[index]
            assert whole.piece is not None
            self._blocks[index] = blocks(whole.piece, whole.run, self._axes)
        return self._blocks[index]


class LazyPair:
    """A pair to measure, with the column blocks of both sides by firing, computed on access."""

    def __init__(
        self,
        ready: PreparedPair,
        pair: Pair | None = None,
        alike: BatchedPairs | None = None,
        *,
        is_equal: bool = False,
    ) -> None:
        """Initialize from a prepared pair, or from ``pair`` with the shape key of ``ready``.

        ``alike`` is the reading plan of ``pair`` in a batch, for which ``pair`` need not be prepared. ``is_equal``
        states that hashes show all joined rows to be equal, so that no bytes are read.
        """
        self._like, self.pair, self.batched, self.is_equal = ready, pair, alike, is_equal

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """The layouts of baseline and target."""
        return self._like.layouts

    @property
    def may_be_permuted(self) -> bool:
        """False if the multiset hashes, which are equal for permuted elements, are known to differ."""
        return self.batched is None or self.pair is None or self.batched.has_equal_bags(self.pair)

    @cached_property
    def prepared(self) -> PreparedPair:
        """The assembled pair."""
        return self._like if self.pair is None else self._like.for_pair(self.pair)

    @cached_property
    def left(self) -> _Side:
        """The baseline's blocks."""
        return _Side(self.prepared.left, self.layouts[0].axes)

    @cached_property
    def right(self) -> _Side:
        """The target's blocks."""
        return _Side(self.prepared.right, self.layouts[1].axes)
