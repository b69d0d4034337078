"""Settings of external servers: ``[rollout] kind = "server"`` and ``[teacher] kind = "server"``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from plasmid.components import BuildContext, Component, RecipeView, RolloutEngineConfig, TeacherConfig, kind_of
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid.protocols import RolloutEngine, TeacherClient
from plasmid.settings.resume import MAY_CHANGE
from plasmid.types import SamplingParams
from plasmid.utils.addresses import validate_web_address
from plasmid_models.source import teacher_top
from pydantic import AfterValidator, Field, SerializeAsAny

from .apis import ServerApi

NO_TOP = "does not return the most likely tokens at each position, which the algorithm needs; set teacher.api"


def base_url(url: str) -> str:
    """Validate a URL and remove the path of the API."""
    return validate_web_address(url).rstrip("/").removesuffix("/v1").rstrip("/")


class ServerAccess(Component):
    """How to reach an external server."""

    table: ClassVar[str]
    """Table of the recipe, for messages."""
    url: Annotated[str, AfterValidator(base_url)]
    """URL of the server: ``http://host:port``."""
    api: Literal["auto"] | SerializeAsAny[ServerApi] = "auto"
    """API of the server, by its kind in the slot ``server_apis``, for example ``api = "openai"``. ``auto`` detects an
    API by the path that only its servers answer, and falls back to ``openai``."""
    model: str = "auto"
    """Name of the model in requests; ``auto`` is the first that the server lists."""
    api_key_env: Annotated[str, MAY_CHANGE] = ""
    """Environment variable with the key, which is sent as ``Authorization: Bearer``, or with a complete ``Basic
    ...`` value; empty for none."""
    attempts: Annotated[int, MAY_CHANGE] = Field(5, ge=1)
    """Maximum number of attempts per request before its rollout fails. Errors that a retry cannot fix are not
    retried."""
    backoff_s: Annotated[float, MAY_CHANGE] = Field(0.5, gt=0)
    """Maximum pause before the second attempt, in seconds; doubles with every further attempt. The actual pause is
    drawn uniformly between 0 and this maximum."""
    connect_timeout_s: Annotated[float, MAY_CHANGE] = Field(10.0, gt=0)
    """Time limit for connecting to the server, in seconds. Responses may take up to `run.rollout_timeout_s`."""

    def lacks(self) -> Iterator[str]:
        yield from super().lacks()
        if self.api_key_env and not os.environ.get(self.api_key_env):
            yield f"api_key_env: {self.api_key_env} is not set in the environment"


class Server(ServerAccess, RolloutEngineConfig):
    """Any OpenAI-compatible server (``/v1/completions``), or one with an API of the slot ``server_apis``.

    The server's weights cannot be updated, so the policy cannot be trained with it.

    Prompts are rendered and tokenized with the recipe's `model`, whose tokenizer must be that of the served model.
    """

    kind: Literal["server"] = "server"
    table: ClassVar[str] = "rollout"
    owns_weights: ClassVar[bool] = False
    prompt: Literal["tokens", "text"] = "tokens"
    """Form of the prompt for ``/v1/completions``. Servers may add special tokens to a text."""

    def sampling_settings(self) -> frozenset[str]:
        """Return the settings that `api` supports; with ``auto``, `connect` checks them."""
        return frozenset(SamplingParams.OPTIONAL) if self.api == "auto" else self.api.sampling_settings

    async def build(self, context: BuildContext) -> RolloutEngine:
        from .engine import connect

        return await connect(self, context.config)


class ServerTeacher(ServerAccess, TeacherConfig):
    """A server that returns log-probabilities of given tokens, as ``prompt_logprobs`` or by an API of its own.

    Rollout workers send it every finished sample; the trainer loads no teacher. It must have the policy's tokenizer.
    """

    kind: Literal["server"] = "server"
    table: ClassVar[str] = "teacher"
    url: Annotated[str, AfterValidator(base_url), MAY_CHANGE]
    """URL of the server: ``http://host:port``. May change on resume, to another server with the same model."""
    model: Annotated[str, MAY_CHANGE] = "auto"
    """Name of the model in requests; ``auto`` is the first that the server lists."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if recipe is None:
            return
        if self.api != "auto" and not self.api.can_score:
            yield (
                f"{recipe.key}.api: {kind_of(self.api)!r} does not return log-probabilities of given tokens; choose "
                "another"
            )
        elif recipe.needs.teacher_top_k and self.api != "auto" and not self.api.can_score_top:
            yield f"{recipe.key}.api: {kind_of(self.api)!r} {NO_TOP}"
        if recipe.needs.demonstrations:
            yield f"{recipe.key}.kind: 'server' scores rollouts, but the algorithm trains on demonstrations; set a path"
        for place, sampling in recipe.samplings.items():
            if sampling.scoring_temperature != 1.0:
                yield (
                    f"{place}.temperature: must be 1 or 0 with {recipe.key}.kind = 'server', got "
                    f"{sampling.temperature:g}: servers compute log-probabilities of given tokens at temperature 1"
                )

    def check(self, recipe: RecipeView) -> None:
        teacher_top(recipe.needs, recipe.model.path)
        if recipe.replays_kept_sets:
            raise ConfigError(
                "teacher.kind: 'server' computes log-probabilities over all tokens, but top_p, top_k or min_p restrict "
                "sampling, and the policy's are normalized over the remaining ones; remove these settings, or set "
                "teacher.path"
            )

    async def connect(self, config: RunConfig) -> TeacherClient:
        from .teacher import connect

        return await connect(self, config)
