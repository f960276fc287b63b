"""Table of all detectors, in the order in which they run."""

from collections.abc import Collection

from tapscope.comparator.detectors.activation_mismatch import ActivationMismatch
from tapscope.comparator.detectors.cast_gradients import CastGradients
from tapscope.comparator.detectors.choice_differences import ChoiceDifferences
from tapscope.comparator.detectors.confine_rerouted_rows import ConfineReroutedRows
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.detectors.exclude_rerouted_rows import ExcludeReroutedRows
from tapscope.comparator.detectors.gradient_identity import GradientIdentity
from tapscope.comparator.detectors.implied_routing import ImpliedRouting
from tapscope.comparator.detectors.kink_crossings import FindKinkCrossings
from tapscope.comparator.detectors.low_precision_grid import LowPrecisionGrid
from tapscope.comparator.detectors.missing_gradients import MissingGradients
from tapscope.comparator.detectors.near_ties import NearTies
from tapscope.comparator.detectors.recomputed_activations import RecomputedActivations
from tapscope.comparator.detectors.rotary_tables import RotaryTables
from tapscope.comparator.detectors.routing_maps import RoutingMaps
from tapscope.comparator.detectors.sampled_tokens import SampledTokens
from tapscope.comparator.detectors.time_embeddings import TimeEmbeddings

DETECTORS: tuple[Detector, ...] = (
    CastGradients(),
    SampledTokens(),
    ChoiceDifferences(),
    ImpliedRouting(),
    NearTies(),
    RoutingMaps(),
    MissingGradients(),
    TimeEmbeddings(),
    FindKinkCrossings(),
    ExcludeReroutedRows(),
    ConfineReroutedRows(),
    GradientIdentity(),
    LowPrecisionGrid(),
    ActivationMismatch(),
    RotaryTables(),
    RecomputedActivations(),
)
"""All detectors, by stage, and within a stage in execution order: each sees the results of those before it."""
NAMES = tuple(detector.name for detector in DETECTORS)


def run_detectors(stage: Stage, evidence: Evidence, disabled: Collection[str] = ()) -> Evidence:
    """Run the detectors of one stage, except the ``disabled`` ones, and return the updated evidence."""
    for detector in DETECTORS:
        if detector.stage is stage and detector.name not in disabled:
            evidence = detector.detect(evidence)
    return evidence
