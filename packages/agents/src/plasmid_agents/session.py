"""What one rollout's agent asks for: its turns, its budgets, and the samples that they become."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from plasmid.components import Rollout
from plasmid.types import Completion, Ints, Prompt, Sample, SamplingParams, StopReason
from plasmid_workflows.execution import RolloutFailed
from plasmid_workflows.tools.tool_calls import Parser

from .chat import ChatRequest, Problem, Refused, Reply
from .conversation_tree import ConversationTree, PendingTurn
from .replies import make_reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an agent may ask for."""

    max_turns: int
    max_tokens: int | None
    """Tokens that the policy may draw in one rollout; None for any number."""
    parser: Parser
    """Finds calls of tools."""
    keep_past: bool
    thinks: bool
    """Keep reasoning apart from the text of replies."""
    unfollowed: Literal["refuse", "ignore"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A checked request, with the tokens that it comes to."""

    request: ChatRequest
    opened: PendingTurn
    prompt_tokens: int
    max_new_tokens: int


class Session:
    """One rollout as its agent sees it: a policy behind HTTP."""

    def __init__(self, rollout: Rollout, rules: Rules) -> None:
        self._rollout, self._rules = rollout, rules
        self._tree = ConversationTree(rollout, keep_past=rules.keep_past)
        self._asked = 0
        self._drawn = 0
        self._last = ""
        self._running: set[asyncio.Future[Completion]] = set()
        self._ended = False
        self.is_spent = False
        """True once a request was refused for lack of budget: the rollout was cut off."""
        self.error: str | None = None
        """Why a turn could not be served; the rollout then fails, whatever its agent makes of it."""

    @property
    def sampling(self) -> SamplingParams:
        """What the rollout samples with."""
        return self._rollout.sampling

    @property
    def num_turns(self) -> int:
        """Turns that the policy has taken."""
        return self._tree.num_turns

    def count(self, request: ChatRequest) -> int:
        """Tokens that the request comes to. Raises `Refused`."""
        return self._tree.open(request).transcript.num_tokens

    def prepare(self, request: ChatRequest) -> Prepared:
        """Check a request and find its tokens. Raises `Refused`."""
        if request.unfollowed and self._rules.unfollowed == "refuse":
            raise Refused(
                Problem.BAD_REQUEST,
                f"the run does not follow: {'; '.join(request.unfollowed)}; leave it out of the request, or set "
                'workflow.unfollowed = "ignore"',
            )
        left = self._left()
        opened = self._tree.open(request)
        length = opened.transcript.num_tokens
        longest = self._rollout.max_length
        room = left if longest is None else min(left, longest - length)
        if room < 1:
            raise Refused(Problem.TOO_LONG, f"{length} tokens > {(longest or 0) - 1} maximum")
        self._asked += 1
        limit = min(room, self.sampling.max_new_tokens, request.max_tokens or room)
        return Prepared(request=request, opened=opened, prompt_tokens=length, max_new_tokens=limit)

    def _left(self) -> int:
        """Tokens that are left to draw. Raises `Refused` if there is none, or no turn."""
        rules = self._rules
        left = self.sampling.max_new_tokens if rules.max_tokens is None else rules.max_tokens - self._drawn
        if self._asked < rules.max_turns and left > 0:
            return left
        self.is_spent = True
        spent = f"max_tokens = {rules.max_tokens}" if left <= 0 else f"max_turns = {rules.max_turns}"
        raise Refused(Problem.NO_BUDGET, f"this rollout has spent its budget, workflow.{spent}")

    async def generate(self, prepared: Prepared) -> Reply:
        """Let the policy take its turn. Raises `Refused` if the engine cannot serve."""
        request, opened = prepared.request, prepared.opened
        try:
            completion = await self._draw(
                opened.transcript.token_ids, max_new_tokens=prepared.max_new_tokens, stop=request.stop
            )
        except RolloutFailed as error:
            self.error = str(error)
            raise Refused(Problem.ENGINE, self.error) from None
        number = self._tree.num_turns
        reply = make_reply(
            self._rollout,
            request,
            completion,
            number=number,
            prompt_tokens=prepared.prompt_tokens,
            parser=self._rules.parser,
            thinks=self._rules.thinks,
        )
        self._tree.close(opened, request, completion, reply)
        self._drawn += len(completion.token_ids)
        self._last = reply.text
        return reply

    async def _draw(self, token_ids: Ints, **settings: Any) -> Completion:
        drawing = asyncio.ensure_future(self._rollout.generate(token_ids, **settings))
        self._running.add(drawing)
        try:
            return await drawing
        except asyncio.CancelledError:
            if self._ended:  # it was `close`, and not the client that left
                raise Refused(Problem.UNKNOWN_SESSION, "the rollout has ended") from None
            raise
        finally:
            drawing.cancel()
            self._running.discard(drawing)

    async def close(self) -> None:
        """End what the agent left behind: turns that it asked for and did not wait for."""
        self._ended = True
        running = list(self._running)
        for drawing in running:
            drawing.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def samples(self, prompt: Prompt, *, answer: str | None, metadata: Mapping[str, Any]) -> list[Sample]:
        """A sample of every branch. All have the text of the rollout's answer, or else of its last turn.

        Rewards judge what the agent made of the prompt, so all branches of a rollout are shown to them alike.
        """
        text = self._last if answer is None else answer
        branches = self._tree.branches()
        samples = []
        for index, (opening, parts) in enumerate(branches):
            fields: dict[str, Any] = {"stop_reason": StopReason.LENGTH} if self.is_spent else {}
            about = {**metadata, "branch": index, "branches": len(branches), "turns": self.num_turns}
            given = replace(prompt, token_ids=opening)
            samples.append(self._rollout.sample(given, parts, text=text, metadata=about, **fields))
        return samples

    def failed(self, prompt: Prompt, error: str) -> list[Sample]:
        """One sample with the error. It shows the branch that ended last, if there is any."""
        branches = self._tree.branches()
        if not branches:
            raise RolloutFailed(error)
        opening, parts = branches[-1]
        given = replace(prompt, token_ids=opening)
        about = {"branches": len(branches), "turns": self.num_turns}
        return [
            self._rollout.sample(
                given, parts, text=self._last, metadata=about, stop_reason=StopReason.ERROR, error=error
            )
        ]
