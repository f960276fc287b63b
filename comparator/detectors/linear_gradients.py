"""Linear gradients: a parameter's gradient and the product of the run's own tensors from which it is computed.

For y = x Wᵀ + b, dL/db is the sum of dL/dy over rows, and dL/dW = (dL/dy)ᵀ x. A norm's weight has a similar identity
(:func:`norm_product`). The matrix product itself is not computed. Instead, both sides are multiplied by a vector of
random signs, which preserves the size of an error in each row (R. Freivalds, *Probabilistic machines can use less
running time*, 1977) and reads every tensor once.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import Block, blocks
from tapscope.comparator.assembly.pieces import Array
from tapscope.core import dtypes

MAX_ELEMENTS = 1 << 24
"""Maximum number of elements of a tensor that is read."""
_CHUNK_ELEMENTS = 1 << 18
_MAX_DEVIATIONS = 3.0
"""Maximum error of a sum of independent errors, in standard deviations."""


class Product(Struct, frozen=True):
    """A parameter's gradient in one step, and its recomputation, each row times the vector of signs."""

    recorded: Array
    """[outputs] float64: from the recorded gradient."""
    made: Array
    """[outputs] float64: computed from the run's other gradients."""
    size: Array
    """[outputs] float64: the magnitude that rounding is relative to: the root of the sum of squares of the terms, plus
    the norms of the rows themselves."""
    scatter: Array
    """[outputs] float64: the root of the sum of squares of the terms, each element counted at least as large as the
    typical element of its row."""
    epsilon: float
    """Epsilon of the coarsest dtype."""

    @property
    def gain(self) -> float:
        """recorded / made as one number; NaN if ``made`` is mostly rounding."""
        square = float(self.made @ self.made)
        return float(self.recorded @ self.made) / square if square > 0.01 * float(self.size @ self.size) else math.nan

    def leaves(self, other: "Product", error: float) -> bool:
        """Return whether independent relative errors ``error`` of the rows explain the difference from the other run's
        gradient.

        The difference is then a sum of as many independent errors as there are terms.
        """
        most = _MAX_DEVIATIONS * error * np.maximum(self.scatter, other.scatter)
        return bool((np.abs(self.recorded - other.recorded) <= most + self.epsilon * np.abs(self.recorded)).all())

    def error(self, gain: float) -> float:
        """Return the largest error of a row relative to its terms, after scaling by ``gain``; NaN for nonfinite
        values."""
        made = self.made * gain
        with np.errstate(all="ignore"):
            errors = np.abs(self.recorded - made) / (np.abs(made) + self.size * max(abs(gain), 1e-300))
        errors = errors[self.size > 0.0]
        return float(errors.max(initial=0.0))


def product(
    gradient: AssembledTensor, outputs: Sequence[AssembledTensor], inputs: Sequence[AssembledTensor] = ()
) -> Product | None:
    """Compute the product of a parameter's ``gradient`` with the gradients of its module's ``outputs``, call by call.

    The identity of a weight also needs the module's ``inputs``. Returns None if the shapes do not match.
    """
    rows = [_rows(whole) for whole in outputs]
    shape, width = gradient.shape, outputs[0].shape[-1]
    depth = inputs[0].shape[-1] if inputs else 1
    if any(whole.shape[-1] != width for whole in outputs) or any(whole.shape[-1] != depth for whole in inputs):
        return None
    if (inputs and rows != [_rows(whole) for whole in inputs]) or shape not in _shapes(width, depth, bool(inputs)):
        return None
    signs = np.random.default_rng(0).choice((-1.0, 1.0), depth) if inputs else np.ones(1)
    recorded, norms = _times(gradient, signs, transposed=bool(inputs) and shape != (width, depth))
    made, squares, scatter = np.zeros((3, width))
    for i, whole in enumerate(outputs):
        factors, lengths = _projected(inputs[i], signs) if inputs else np.ones((2, rows[i], 1))
        for at, part, columns in chunks_of(whole):
            terms = part * factors[at]
            made[columns] += terms.sum(0)
            squares[columns] += np.square(terms).sum(0)
            scatter[columns] += (_squares(part) * lengths[at]).sum(0)
    names = {whole.dtype or "" for whole in (gradient, *outputs, *inputs)}
    size = np.sqrt(squares) + norms + max(map(dtypes.smallest, names)) / max(map(dtypes.epsilon, names))
    return Product(recorded, made, size, np.sqrt(scatter), max(map(dtypes.epsilon, names)))


def norm_product(
    gradient: AssembledTensor,
    outputs: Sequence[AssembledTensor],
    values: Sequence[AssembledTensor],
    weights: Sequence[AssembledTensor],
    *biases: Sequence[AssembledTensor],
) -> Product | None:
    """Compute the product for a norm's weight w.

    With y = w x + b, ``w dL/dw`` is the sum over rows of ``dL/dy (y - b)``; ``values`` are y. Returns None if the
    shapes do not match.
    """
    width = gradient.shape[-1]
    vectors = [_vector(some[0]) for some in (weights, *biases) if some[0].shape == (width,)]
    rows = [_rows(whole) for whole in outputs]
    fits = all(whole.shape[-1] == width for whole in (*outputs, *values)) and gradient.shape == (width,)
    if not fits or len(vectors) != 1 + len(biases) or rows != [_rows(whole) for whole in values]:
        return None
    if any(_widths(one) != _widths(two) for one, two in zip(outputs, values, strict=True)):
        return None
    made, squares, scatter = np.zeros((3, width))
    bias = vectors[1] if biases else np.zeros(width)
    for whole, value in zip(outputs, values, strict=True):
        for (_, part, columns), (_, of, _) in zip(chunks_of(whole), chunks_of(value), strict=True):
            centred = of - bias[columns]
            lengths = _squares(centred)  # a normalized value near zero is a difference of values of typical size
            made[columns] += (part * centred).sum(0)
            squares[columns] += (np.square(part) * lengths).sum(0)
            scatter[columns] += (_squares(part) * lengths).sum(0)
    recorded = _vector(gradient) * vectors[0]
    names = {whole.dtype or "" for whole in (gradient, *outputs, *values)}
    size = np.sqrt(squares) + np.abs(recorded)
    return Product(recorded, made, size, np.sqrt(scatter), max(map(dtypes.epsilon, names)))


def _widths(whole: AssembledTensor) -> list[int]:
    return [block.width for block in _blocks(whole)]


def _vector(whole: AssembledTensor) -> Array:
    return np.asarray(_times(whole, np.ones(1), transposed=False)[0])


def _shapes(width: int, depth: int, is_weight: bool) -> tuple[tuple[int, ...], ...]:
    """Return the possible shapes of the parameter; Conv1D of transformers stores its weight transposed."""
    return ((width, depth), (depth, width)) if is_weight else ((width,),)


def _rows(whole: AssembledTensor) -> int:
    return math.prod(whole.shape[:-1])


def chunks_of(whole: AssembledTensor) -> Iterator[tuple[slice, Array, slice]]:
    """Yield (rows, values [rows, columns] in float64, columns) in chunks of rows."""
    assert whole.piece is not None
    for block in _blocks(whole):
        step = max(1, _CHUNK_ELEMENTS // max(block.width, 1))
        for start in range(0, block.num_rows, step):
            rows = slice(start, min(start + step, block.num_rows))
            yield rows, block.rows(rows).astype(np.float64), slice(block.offset, block.offset + block.width)


def _blocks(whole: AssembledTensor) -> list[Block]:
    assert whole.piece is not None
    return blocks(whole.piece, whole.run, tuple(range(len(whole.shape) - 1)))


def _squares(part: Array) -> Array:
    """Return the squares of the elements, at least the mean square of their row: a row's error is spread over the whole
    row."""
    squares = np.square(part)
    floored: Array = np.maximum(squares, squares.mean(1, keepdims=True))
    return floored


def _projected(whole: AssembledTensor, signs: Array) -> tuple[Array, Array]:
    """Return every row times the sign vector, and each row's sum of squares (the mean square of the former), [rows, 1]
    each."""
    projected, squares = np.zeros((2, _rows(whole), 1))
    for rows, part, columns in chunks_of(whole):
        projected[rows, 0] += part @ signs[columns]
        squares[rows, 0] += np.square(part).sum(1)
    return projected, squares


def _times(gradient: AssembledTensor, signs: Array, *, transposed: bool) -> tuple[Array, Array]:
    """Return (every row times the sign vector, norms of the rows); for a vector, its values and their magnitudes."""
    shape = gradient.shape
    if len(shape) == 1:
        values = np.concatenate([np.atleast_2d(block.rows(slice(0, 1)))[0] for block in _blocks(gradient)])
        values = values.astype(np.float64)
        return values, np.abs(values)
    product, squares = np.zeros((2, shape[1] if transposed else shape[0]))
    for rows, part, columns in chunks_of(gradient):
        if transposed:
            product[columns] += signs[rows] @ part
            squares[columns] += np.square(part).sum(0)
        else:
            product[rows] += part @ signs[columns]
            squares[rows] += np.square(part).sum(1)
    return product, np.sqrt(squares)
