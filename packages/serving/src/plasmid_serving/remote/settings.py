"""``[rollout] kind = "server"``: an externally served model, for evaluation or sampling."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from plasmid.components import BuildContext, RolloutEngineConfig
from plasmid.protocols import RolloutEngine
from plasmid.types import SamplingParams
from plasmid.utils.addresses import web_address
from pydantic import AfterValidator, Field, SerializeAsAny

from .apis import ServerApi


def base_url(url: str) -> str:
    """Validate a URL and remove the path of the API."""
    return web_address(url).rstrip("/").removesuffix("/v1").rstrip("/")


class Server(RolloutEngineConfig):
    """Any OpenAI-compatible server (``/v1/completions``), or one with an API of the slot ``server_apis``.

    It takes no weights from a trainer.

    The recipe's `model` renders and tokenizes prompts; it must have the tokenizer of the served model.
    """

    kind: Literal["server"] = "server"
    owns_weights: ClassVar[bool] = False
    url: Annotated[str, AfterValidator(base_url)]
    """URL of the server: ``http://host:port``."""
    api: Literal["auto"] | SerializeAsAny[ServerApi] = "auto"
    """API for completions, by its kind in the slot ``server_apis``, for example ``api = "openai"``. ``auto`` detects
    an API by the path that only its servers answer, and falls back to ``openai``."""
    model: str = "auto"
    """Name of the model in requests; ``auto`` is the first that the server lists."""
    prompt: Literal["tokens", "text"] = "tokens"
    """Form of the prompt for ``/v1/completions``. Servers may add special tokens to a text."""
    api_key_env: str = ""
    """Environment variable with the key, which is sent as ``Authorization: Bearer``, or with a complete ``Basic
    ...`` value; empty for none."""
    attempts: int = Field(5, ge=1)
    """Maximum number of attempts per request before its rollout fails. Errors that a retry cannot fix are not
    retried."""
    backoff_s: float = Field(0.5, gt=0)
    """Maximum pause before the second attempt, in seconds; doubles with every further attempt. The actual pause is
    drawn uniformly between 0 and this maximum."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Time limit for connecting to the server, in seconds. Responses may take up to `run.rollout_timeout_s`."""

    def sampling_settings(self) -> frozenset[str]:
        """Return the settings that `api` supports; with ``auto``, `connect` checks them."""
        return frozenset(SamplingParams.OPTIONAL) if self.api == "auto" else self.api.sampling_settings

    def lacks(self) -> Iterator[str]:
        yield from super().lacks()
        if self.api_key_env and not os.environ.get(self.api_key_env):
            yield f"api_key_env: {self.api_key_env} is not set in the environment"

    async def build(self, context: BuildContext) -> RolloutEngine:
        from .engine import connect

        return await connect(self, context.config)
