"""Runner: one rank's model, cache and observer, and how a plan is computed on them."""

import resource
import time
from pathlib import Path

import torch

from tapscope.engine.cache import KVCache, Segment, StepCache
from tapscope.engine.config import EngineConfig
from tapscope.engine.model_config import ModelConfig
from tapscope.engine.models.registry import TIED, build_model
from tapscope.engine.parallel import TensorParallel
from tapscope.engine.plan import StepPlan
from tapscope.engine.sampler import sample
from tapscope.engine.weights import load_weights
from tapscope.errors import ConfigError
from tapscope.observe import ObserverFactory, RankInfo, StepObserver

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Runner:
    """Computes plans; every rank has one and all are given the same plans in the same order."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, tp: TensorParallel, observer: ObserverFactory | None
    ) -> None:
        self.dtype = dtype_name(config, model_config)
        dtype = _DTYPES[self.dtype]
        tp.ep = config.ep
        self.model = build_model(model_config, tp, dtype).eval()
        load_weights(self.model, Path(config.model), TIED if model_config.tie_word_embeddings else {})
        self.num_pages = num_pages(config, model_config, dtype.itemsize)
        kv_heads = model_config.num_kv_heads // tp.size
        self._cache = KVCache(
            model_config.num_layers, self.num_pages, config.page_size, kv_heads, model_config.head_dim, dtype
        )
        self._started = 0.0
        self.observer: StepObserver | None = None
        if observer is not None:
            info = RankInfo(
                rank=tp.rank,
                world_size=tp.size,
                mesh={"tp": tp.size},
                coords={"tp": tp.rank},
                framework="tapscope",
                model=config.model,
                dtype=self.dtype,
                model_config=model_config.facts(),
            )
            self.observer = observer(self.model, info)

    def execute(self, plan: StepPlan) -> list[int]:
        """Tell the observer, run the model, sample: one token per share. Follow with :meth:`finish`."""
        if self.observer is not None:
            self.observer.before_step(plan.info())
        self._started = time.perf_counter()
        try:
            return self._forward(plan)
        except BaseException:
            self.finish(plan)  # an observer's step must not stay open
            raise

    def finish(self, plan: StepPlan) -> None:
        """The step is over: give the observer its metrics. Rank 0 commits the tokens before."""
        if self.observer is None:
            return
        metrics = {
            "batch_size": float(len(plan.shares)),
            "num_tokens": float(plan.num_tokens),
            "latency_s": time.perf_counter() - self._started,
            "kv_pages_used": float(plan.kv_pages_used),
            "kv_pages_total": float(self.num_pages),
        }
        self.observer.after_step(metrics | _memory())

    def close(self) -> None:
        """Close the observer; safe to call twice."""
        observer, self.observer = self.observer, None
        if observer is not None:
            observer.close()

    @torch.no_grad()
    def _forward(self, plan: StepPlan) -> list[int]:
        """Sampled token of each share. no_grad rather than inference_mode: taps need tensors' version counters."""
        input_ids = torch.tensor([token for share in plan.shares for token in share.tokens])
        segments = [
            Segment(slot, len(share.tokens), share.position, torch.tensor(share.pages))
            for slot, share in zip(plan.slots, plan.shares, strict=True)
        ]
        positions = torch.cat([torch.arange(s.position, s.length) for s in segments])
        output = self.model(
            input_ids,
            position_ids=positions,
            past_key_values=StepCache(self._cache, segments),
            logits_to_keep=None if plan.all_logits else torch.tensor(plan.logit_rows),
        )
        tokens: list[int] = self.model.sampler(sample(output.logits)).tolist()
        return [tokens[row] for row in plan.sampled_rows] if plan.all_logits else tokens


def dtype_name(config: EngineConfig, model_config: ModelConfig) -> str:
    """The type to compute in; raises ConfigError when ``auto`` meets one this engine does not have."""
    if config.dtype != "auto":
        return config.dtype
    name = model_config.dtype or "float32"
    if name not in _DTYPES:
        raise ConfigError(f"dtype='auto': config.json says {name!r}; choose one of {', '.join(_DTYPES)}")
    return name


def num_pages(config: EngineConfig, model_config: ModelConfig, itemsize: int) -> int:
    """Pages of each rank's cache; equal on all ranks. Raises ConfigError when kv_bytes does not hold one."""
    if config.num_pages is not None:
        return config.num_pages
    kv_width = model_config.num_kv_heads // config.tp * model_config.head_dim
    page_bytes = 2 * model_config.num_layers * config.page_size * kv_width * itemsize
    wanted = config.max_running * -(-model_config.max_positions // config.page_size)
    if config.kv_bytes < page_bytes:
        raise ConfigError(f"kv_bytes={config.kv_bytes}: must hold at least one page, which takes {page_bytes} bytes")
    return min(wanted, config.kv_bytes // page_bytes)


def _memory() -> dict[str, float]:
    """Resident bytes of this process; nothing where the system does not say."""
    try:
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return {}
    return {"rss_bytes": float(resident_pages * resource.getpagesize())}
