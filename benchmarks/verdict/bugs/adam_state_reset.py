"""The optimizer's moments were not restored from a checkpoint after two steps."""

PATCHES = "trainer"
EXPECT = "model.embed_tokens"
VISIBILITY = "strong"
CAUSE = r"(moments|state) .*(reset|lost|zero)"
WHERE = {"step": 2}
BOTH = {"train": True, "schedule": "whole", "optimizer": "adamw"}
TARGET = [{}, {"attention": "sdpa"}]


def patch(trainer):
    count = iter(range(100))

    def forget(optimizer, args, kwargs):
        if next(count) == 2:
            optimizer.state.clear()

    trainer.optimizer.register_step_pre_hook(forget)
