"""The shards of the logits are concatenated in the wrong order."""

from unittest import mock

from tapscope.engine.distributed.tensor_parallel import TensorParallel

PATCHES = "engine"
EXPECT = ""
VISIBILITY = "strong"
CAUSE = r"halves .*swapped"
BOTH = {"tp": 2}
BASELINE = [{}, {"framework": "transformers", "tp": 1}]


def patch(model):
    if model.tp.rank:
        return None  # the class is patched once for both ranks
    gather = TensorParallel.all_gather
    return mock.patch.object(
        TensorParallel, "all_gather", lambda self, tensor, width: gather(self, tensor, width).roll(width // 2, dims=1)
    )
