"""``[rollout] kind = "server"``: a model that somebody else serves, to evaluate or to sample from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from plasmid.components import BuildContext, RolloutEngineConfig
from plasmid.protocols import RolloutEngine
from plasmid.utils.addresses import web_address
from pydantic import AfterValidator, Field

ServerApi = Literal["generate", "completions"]
"""The two APIs by their paths."""
NATIVE = "sglang"
"""Value of `Server.api` for ``/generate``."""


def base_url(url: str) -> str:
    """The address without the path of an API, after checking that it is one."""
    return web_address(url).rstrip("/").removesuffix("/v1").rstrip("/")


class Server(RolloutEngineConfig):
    """Any OpenAI-compatible server (``/v1/completions``), or SGLang's own API. It takes no weights from a trainer.

    Prompts are rendered and tokenised by the recipe's `model`, which must have the tokenizer of what is served.
    """

    kind: Literal["server"] = "server"
    owns_weights: ClassVar[bool] = False
    url: Annotated[str, AfterValidator(base_url)]
    """Where the server is: ``http://host:port``."""
    api: Literal["auto", "sglang", "openai"] = "auto"
    """How it is asked: ``sglang`` is its ``/generate`` (token ids both ways), ``openai`` is ``/v1/completions``;
    ``auto`` asks the server which it has."""
    model: str = "auto"
    """Name of the model in requests; ``auto`` is the first that the server lists."""
    prompt: Literal["tokens", "text"] = "tokens"
    """What ``/v1/completions`` is given. Servers put special tokens of their own before a text."""
    api_key_env: str = ""
    """Environment variable with the key that is sent as ``Authorization: Bearer``, or with a whole ``Basic ...``; empty
    for none."""
    attempts: int = Field(5, ge=1)
    """How often a request is sent before its rollout fails. Refusals that another attempt does not change end it."""
    backoff_s: float = Field(0.5, gt=0)
    """Pause before the second attempt, doubled for each one more; the real pause is drawn between 0 and that."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Longest time to reach the server. Answers may take as long as `run.rollout_timeout_s`."""

    def lacks(self) -> Iterator[str]:
        yield from super().lacks()
        if self.api_key_env and not os.environ.get(self.api_key_env):
            yield f"api_key_env: {self.api_key_env} is not set in the environment"

    async def build(self, context: BuildContext) -> RolloutEngine:
        from .engine import connect

        return await connect(self, context.config.model)
