"""What rewards that ask a server have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from plasmid import Reward, RunContext, Score
from plasmid.errors import RewardError
from plasmid.utils.addresses import web_address
from plasmid.utils.json_client import ServerFailure
from pydantic import AfterValidator, Field, PrivateAttr

from .client import Client, ServerSettings, authorization


class WebReward(Reward):
    """Asks a server."""

    url: Annotated[str, AfterValidator(web_address)]
    """Address of the server."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest time for one sample, all attempts included but not the time in which all `connections` are taken; past it
    the server has failed, as `on_failure` says."""
    server: ServerSettings = ServerSettings()
    """How it is asked."""
    on_failure: Literal["value", "error"] = "error"
    """What to do when the server gives no usable answer: end the run (``error``), or give the failure ``value``."""
    failure_value: float = Field(0.0, allow_inf_nan=False)
    """Value of a sample that the server could not judge, with ``on_failure = "value"``."""
    _client: Client | None = PrivateAttr(None)

    def packages(self) -> Mapping[str, str]:
        return {"httpx": "plasmid-rewards[http]"}

    def lacks(self) -> Iterator[str]:
        yield from super().lacks()
        if self.server.api_key_env and not os.environ.get(self.server.api_key_env):
            yield f"server.api_key_env: {self.server.api_key_env} is not set in the environment"

    async def open(self, context: RunContext) -> None:
        authorization(self.server.api_key_env, self._kind)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def state(self) -> Mapping[str, Any]:
        breaker = {} if self._client is None else self._client.state()
        return {"breaker": breaker} if breaker else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        if "breaker" in state:
            self.client().restore(state["breaker"])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        breakers = [state["breaker"] for state in states if "breaker" in state]
        return {"breaker": max(breakers, key=lambda breaker: float(breaker["failures"]))} if breakers else {}

    def address(self) -> str:
        """Where requests go."""
        return self.url

    @property
    def _kind(self) -> str:
        return str(type(self).model_fields["kind"].default)

    def client(self) -> Client:
        """The server, opened at first use."""
        if self._client is None:
            self._client = Client(self.address(), self.server, kind=self._kind)
        return self._client

    def failure(self) -> float:
        return self.failure_value

    def on_timeout(self, message: str) -> Score:
        return self.failed(f"{self.client().shown}: no usable answer within timeout_s = {self.timeout_s:g}")

    def failed(self, reason: ServerFailure | str) -> Score:
        """The failure value, or `RewardError`, as `on_failure` says."""
        if self.on_failure == "error":
            raise RewardError(
                f'{self._kind}: {reason}; see that the server is up, or set on_failure = "value" to go on without it'
            )
        return Score(value=self.failure_value, components={"failed": 1.0}, error=str(reason))
