"""One parameter is not copied back from its float32 master."""

PATCHES = "trainer"
EXPECT = "model.layers.1.self_attn.o_proj"
VISIBILITY = "strong"
CAUSE = r"not (updated|trained|changed|copied)|unchanged|step before|earlier|never moved"
BOTH = {"train": True, "schedule": "whole", "optimizer": "adamw"}
TARGET = {"dtype": "bfloat16", "master": True}


def patch(trainer):
    weight = trainer.model.model.layers[1].self_attn.o_proj.weight
    at = [p is weight for p in trainer.parameters].index(True)
    kept = weight.detach().clone()

    def late(optimizer, args, kwargs):
        trainer.masters[at].data.copy_(kept)

    trainer.optimizer.register_step_post_hook(late)
