"""One attention sink is off by 2, downstream of near ties of the routers in some of eight requests."""

FAMILY = "gpt-oss"
MODEL = [{"seed": 2, "weights": "normal"}, {"seed": 2, "weights": "wide"}, {"seed": 4, "weights": "wide"}]
EXPECT = "model.layers.2.self_attn"
VISIBILITY = "strong"
CAUSE = r"\(head 1\): target = baseline × a separate factor per token"
TARGET = {"dtype": "bfloat16"}
BOTH = {"workload": "many"}


def patch(model):
    model.model.layers[2].self_attn.sinks.data[1] += 2.0
