"""Loss: the effect of the errors of logits on the first gradients of the backward."""

from collections.abc import Mapping

from msgspec import structs

from tapscope.comparator.facts import ErrorMetrics
from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.core.formatting import number


def values_of_losses(graph: Graph) -> dict[int, int]:
    """Return gradient -> its value, for gradients that were computed from no other gradient."""
    value_of = {}
    for i in graph.gradients:
        if any(graph.is_backward[j] for j in graph.inputs(i).nodes):
            continue
        own = graph.value_of(i)
        if own is not None and not graph.nodes[i].port.startswith("param["):
            value_of[i] = own
    return value_of


def loss_error(logits: ErrorMetrics | None) -> ErrorDistribution:
    """Return the errors of the gradient p - y of a cross-entropy: ``2 max|dz|`` per element, see
    :class:`LossGradient`."""
    error = 2.0 * logits.max_abs if logits is not None else 0.0
    return structs.replace(NO_ERROR, errors=(error,) * len(NO_ERROR.errors), element=error, peak=error)


class LossGradient(Effect[list[ErrorDistribution]]):
    """Errors of logits in the gradient p - y of a cross-entropy. For p = softmax(z), dp_j = p_j (dz_j - Σ p dz): an
    absolute error of the logits becomes a relative error of at most ``2 max|dz|``, including the label's logit."""

    name = "loss_gradient"

    def find(self) -> Mapping[int, list[ErrorDistribution]]:
        """Compute first gradient -> errors that enter it."""
        pairs = self.inputs.pairs
        return {n: [loss_error(pairs[value].metrics)] for n, value in values_of_losses(self.inputs.graph).items()}

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        error = number(self.values[node][0].element / 2.0)
        return f"logits differ by up to {error}, which is twice that relative to each element of softmax(z) - y"


class LossHead(Effect[list[ErrorDistribution]]):
    """Common gain in the gradient of the output weight, whose rows are sums of one label's gradients over tokens. A
    whole row may differ by ``2 max|dz|`` in one direction, and all rows by a common gain."""

    name = "loss_head"

    def find(self) -> Mapping[int, list[ErrorDistribution]]:
        """Compute gradient of a parameter -> errors that enter it."""
        losses, graph = self.effects[LossGradient].values, self.inputs.graph
        errors_of: dict[int, list[ErrorDistribution]] = {}
        for node in graph.gradients if losses else ():
            if not graph.nodes[node].is_summed:
                continue
            for origin in graph.inputs(node).nodes:
                inputs = graph.inputs(origin)
                first = inputs.nodes[0] if inputs.source == "aliased" else origin  # the site that recorded it first
                for loss in losses.get(first, ()):  # a floor allows twice the gain of its inputs
                    errors_of.setdefault(node, []).append(structs.replace(loss, gain=0.5 * loss.errors[-1]))
        return errors_of

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        error = number(self.contribution(node))
        return f"it sums the loss's gradient over the labels, which differs by up to {error} in one direction"
