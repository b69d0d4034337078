"""An engine that is never started and a reward that is never called, which complete a configuration."""

from typing import ClassVar, Literal

from plasmid import Reward, hookimpl
from plasmid.components import RolloutEngineConfig


class NeverStarted(RolloutEngineConfig):
    kind: Literal["never-started"] = "never-started"
    reads_quantized: ClassVar[bool] = True

    def gives_experts(self):
        return True

    async def build(self, context):
        raise AssertionError("these tests sample nothing")


class NeverAsked(Reward):
    kind: Literal["never-asked"] = "never-asked"

    async def __call__(self, prompt, sample):
        raise AssertionError("these tests score nothing")


@hookimpl
def register_components():
    return [NeverStarted, NeverAsked]
