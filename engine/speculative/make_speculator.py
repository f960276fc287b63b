"""make_speculator: build the Speculator with the proposer that the engine's settings select."""

from tapscope.engine.execution.draft_runner import DraftRunner
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.sampling.sampler import Sampler
from tapscope.engine.scheduling.kv_cache_manager import KVCacheManager
from tapscope.engine.speculative.draft_cost import DraftCosts
from tapscope.engine.speculative.draft_head_proposer import DraftHeadProposer
from tapscope.engine.speculative.draft_model_proposer import DraftModelProposer
from tapscope.engine.speculative.draft_sampling import Compute
from tapscope.engine.speculative.ngram_proposer import NgramProposer
from tapscope.engine.speculative.speculator import Speculator


def make_speculator(
    config: EngineConfig,
    draft_runner: DraftRunner | None,
    sampler: Sampler,
    compute: Compute,
    cache: KVCacheManager,
    vocab_size: int,
) -> Speculator | None:
    """Build the Speculator; return None without ``speculative_algorithm``.

    ``draft_runner``: runner of the draft model or head, if the algorithm has one; ``compute`` runs its steps. ``cache``
    and ``vocab_size`` are the target's.
    """
    if not config.num_drafts:
        return None
    costs = None if config.batch_invariant else DraftCosts()
    if draft_runner is None:
        windows = config.speculative_ngram_min_match_window_size, config.speculative_ngram_max_match_window_size
        return Speculator(NgramProposer(*windows), config.num_drafts, costs=costs)
    if draft_runner.hidden_states is None:
        model = DraftModelProposer(
            draft_runner,
            sampler,
            compute,
            vocab_size,
            max_num_seqs=config.max_num_seqs,
            state_interval=config.state_checkpoint_interval,
        )
        return Speculator(model, config.num_drafts, costs=costs)
    head = DraftHeadProposer(
        draft_runner,
        draft_runner.hidden_states,
        sampler,
        compute,
        vocab_size,
        cache,
        num_branches=config.speculative_eagle_topk or 1,
        max_drafts=config.num_drafts,
    )
    return Speculator(head, config.draft_depth, num_drafts=config.num_drafts, costs=costs)
