"""A trainer that is never started and a reward that is never called, to complete a configuration."""

from typing import Literal

from plasmid import Reward, hookimpl
from plasmid.components import AdapterSpec, TrainerConfig


class NoTrainer(TrainerConfig):
    kind: Literal["no-trainer"] = "no-trainer"

    async def build(self, context):
        raise AssertionError("these tests train nothing")


class AdapterTrainer(NoTrainer):
    kind: Literal["adapter-trainer"] = "adapter-trainer"

    def adapter(self):
        return AdapterSpec(rank=2, alpha=6.0, targets=("q_proj", "down_proj"))


class RoutingTrainer(NoTrainer):
    kind: Literal["routing-trainer"] = "routing-trainer"

    def replays_routing(self):
        return True


class NoReward(Reward):
    kind: Literal["no-reward"] = "no-reward"

    async def __call__(self, prompt, sample):
        raise AssertionError("these tests score nothing")


@hookimpl
def register_components():
    return [NoTrainer, AdapterTrainer, RoutingTrainer, NoReward]
