"""Replay separates local from inherited errors of a transformers model, for ten injected bugs."""

import copy
import json

import pytest
import torch
from soak_cases import mostly_soak
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope.cli import main, reference
from tapscope.cli.prompts import Workload
from tapscope.core.errors import ConfigError, DataError
from tapscope.dumper import Dumper
from tapscope.dumper.injection import StoredTensors
from tapscope.replay import replay
from tapscope.sources import open_run

PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 79], [31, 41, 59, 26, 53]]
WORK = Workload((), ("0", "1"), (3, 3), ((7, 8), (9, 10)))


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def generate(model, dumper):
    return reference.generate(model, PROMPTS, WORK, dumper)


def capture(model, out, **settings):
    with Dumper(model, out, **({"keep": "full"} | settings)) as dumper:
        generate(model, dumper)
    return out


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return capture(build(), tmp_path_factory.mktemp("replay") / "baseline")


class Gelu(nn.Module):
    def forward(self, input):
        return nn.functional.gelu(input)


class WithoutResidual(nn.Module):
    """A decoder layer without the residual connection around attention."""

    def __init__(self, layer):
        super().__init__()
        self.__dict__.update(layer.__dict__)

    def forward(self, hidden_states, **kwargs):
        hidden, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def _swap_gate_and_up(m):
    mlp = m.model.layers[1].mlp
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = mlp.up_proj.weight.data, mlp.gate_proj.weight.data


def _roll_heads(m):
    weight = m.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.roll(8, 0)


def _set(path, change):
    def apply(m):
        weight = m.get_submodule(path).weight
        weight.data = change(weight.data.clone())

    return apply


def _replace(path, make):
    def apply(m):
        parent, _, name = path.rpartition(".")
        setattr(m.get_submodule(parent), name, make(m.get_submodule(path)))

    return apply


def _rows(weight, factor):
    weight[:, 5] *= factor
    return weight


def _scaling(m):
    m.model.layers[1].self_attn.scaling *= 2


def _eps(m):
    m.model.layers[2].post_attention_layernorm.variance_epsilon = 0.1


def _theta(m):
    m.model.rotary_emb.inv_freq.mul_(0.5)


BUGS = {
    "gate_and_up_swapped": (_swap_gate_and_up, {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"}),
    "heads_rolled": (_roll_heads, {"model.layers.1.self_attn.q_proj"}),
    "norm_weight": (_set("model.layers.0.input_layernorm", lambda w: w * 1.1), {"model.layers.0.input_layernorm"}),
    "norm_eps": (_eps, {"model.layers.2.post_attention_layernorm"}),
    "down_proj_column": (_set("model.layers.0.mlp.down_proj", lambda w: _rows(w, 3)), {"model.layers.0.mlp.down_proj"}),
    "activation": (_replace("model.layers.1.mlp.act_fn", lambda _: Gelu()), {"model.layers.1.mlp.act_fn"}),
    "attention_scale": (_scaling, {"model.layers.1.self_attn"}),
    "rope_theta": (_theta, {"model.rotary_emb"}),
    "embedding": (_set("model.embed_tokens", lambda w: w * 1.01), {"model.embed_tokens"}),
    "residual": (_replace("model.layers.1", WithoutResidual), {"model.layers.1"}),
}


@pytest.mark.parametrize("bug", mostly_soak(BUGS, default=("gate_and_up_swapped", "norm_eps", "activation")))
def test_replay_separates_local_from_inherited_error(bug, baseline, tmp_path):
    apply, culprits = BUGS[bug]
    model = build()
    apply(model)
    target = capture(model, tmp_path / "target")
    with open_run(baseline) as one, open_run(target) as two:
        found = replay(one, two, model, lambda dumper: generate(model, dumper))
    assert {one.module for one in found.of("local")} == culprits
    assert not found.of("not_replayed")
    assert found.exit_code == 1
    assert len(found.of("inherited")) >= 1
    assert next(one for one in found.modules if one.module == "lm_head").verdict == "inherited"


def test_replay_of_the_same_model_agrees(baseline):
    model = build()
    with open_run(baseline) as one, open_run(baseline) as two:
        found = replay(one, two, model, lambda dumper: generate(model, dumper))
    assert found.exit_code == 0
    assert {one.verdict for one in found.modules} == {"agrees"}


def test_replay_in_bfloat16_finds_the_bug_and_no_other(baseline, tmp_path):
    model = build()
    _swap_gate_and_up(model)
    model = model.to(torch.bfloat16)
    target = capture(model, tmp_path / "target")
    with open_run(baseline) as one, open_run(target) as two:
        found = replay(one, two, model, lambda dumper: generate(model, dumper))
    assert {one.module for one in found.of("local")} == BUGS["gate_and_up_swapped"][1]


def test_replay_leaves_the_model_without_hooks(baseline):
    model = build()
    before = copy.deepcopy([(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()])
    with open_run(baseline) as one, open_run(baseline) as two:
        replay(one, two, model, lambda dumper: generate(model, dumper))
    assert before == [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()]


def test_replay_reports_modules_without_recorded_inputs(baseline, tmp_path):
    model = build()
    without = capture(model, tmp_path / "without", rules=["model.layers.1.mlp:in[x]=stats"])
    with open_run(without) as one, open_run(baseline) as two:
        found = replay(one, two, model, lambda dumper: generate(model, dumper))
    assert [(one.module, one.reason) for one in found.of("not_replayed")] == [
        ("model.layers.1.mlp", "without has no values of model.layers.1.mlp:in[x]")
    ]


def test_replay_reports_inputs_of_another_shape(baseline, tmp_path):
    torch.manual_seed(0)
    config = copy.deepcopy(build().config)
    config.intermediate_size = 48
    model = LlamaForCausalLM(config).eval()
    target = capture(model, tmp_path / "target")
    with open_run(baseline) as one, open_run(target) as two:
        found = replay(one, two, model, lambda dumper: generate(model, dumper))
    reasons = {one.module: one.reason for one in found.of("not_replayed")}
    down = "model.layers.1.mlp.down_proj"
    assert reasons[down] == f"{down}:in[input]: shape 2×8×48, recorded 2×8×64"


def test_replay_reports_modules_that_the_model_lacks(baseline):
    model = build()
    model.model.layers[1].mlp = nn.Sequential(nn.Linear(32, 32))
    with open_run(baseline) as one, open_run(baseline) as two:
        found = replay(one, two, model, lambda dumper: generate(model, dumper))
    reasons = {one.module: one.reason for one in found.of("not_replayed")}
    assert reasons["model.layers.1.mlp.gate_proj"] == "the model has no module of this name"
    with open_run(baseline) as one, open_run(baseline) as two, pytest.raises(DataError, match="none of the modules"):
        replay(one, two, nn.Linear(2, 2), lambda dumper: None)


def test_replay_uses_a_baseline_of_another_framework_and_schedule(tmp_path):
    model = build()
    model.save_pretrained(tmp_path / "model")
    words = ["dump", str(tmp_path / "model"), "-q", "--dtype", "float32"]
    capture(model, tmp_path / "hf")
    assert main([*words, "-o", str(tmp_path / "engine"), "--tokens-from", str(tmp_path / "hf")]) == 0
    _roll_heads(model)
    capture(model, tmp_path / "target")
    with open_run(tmp_path / "engine") as one, open_run(tmp_path / "target") as two:
        found = replay(one, two, model, lambda dumper: generate(model, dumper))
    assert [one.module for one in found.of("local")] == ["model.layers.1.self_attn.q_proj"]
    assert not found.of("not_replayed")


def test_replay_rejects_a_baseline_of_statistics(baseline, tmp_path):
    model = build()
    stats = capture(model, tmp_path / "stats", keep="stats")
    with (
        open_run(stats) as one,
        open_run(baseline) as two,
        pytest.raises(DataError, match=r"no values of module inputs"),
    ):
        replay(one, two, model, lambda dumper: generate(model, dumper))


def test_replay_command_prints_the_module_and_exits_with_1(baseline, tmp_path, capsys):
    model = build()
    _roll_heads(model)
    model.save_pretrained(tmp_path / "changed")
    target = capture(model, tmp_path / "target")
    assert main(["replay", str(baseline), str(target), "--model", str(tmp_path / "changed")]) == 1
    assert "what      model.layers.1.self_attn.q_proj has an error of its own" in capsys.readouterr().out
    assert main(["replay", str(baseline), str(target), "--model", str(tmp_path / "changed"), "--json"]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["modules"] == ["model.layers.1.self_attn.q_proj"]


def test_replay_command_warns_once_per_reason(baseline, tmp_path, capsys):
    model = build()
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.save_pretrained(tmp_path / "shorter")
    main(["replay", str(baseline), str(baseline), "--model", str(tmp_path / "shorter")])
    reason = "not replayed: the model has no module of this name"
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if reason in line]
    assert "model.layers.2" in warning
    assert f" more (--json lists them) were {reason}" in warning


def test_replay_command_rejects_a_missing_model(baseline, tmp_path, capsys):
    assert main(["replay", str(baseline), str(baseline), "--model", str(tmp_path)]) == 3
    assert "has no config.json" in capsys.readouterr().err


def test_stored_tensors_reject_several_ranks(tmp_path):
    class Fake:
        path, ranks = "run", (0, 1)

    with pytest.raises(ConfigError, match="has 2 ranks"):
        StoredTensors(Fake())
