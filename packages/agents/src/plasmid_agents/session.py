"""The session of one rollout's agent: its turns, its budgets, and the resulting samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from plasmid.components import Rollout
from plasmid.types import Completion, Ints, Prompt, Sample, SamplingParams, StopReason
from plasmid_workflows.execution import RolloutFailed
from plasmid_workflows.tools.marked_calls import harmony
from plasmid_workflows.tools.parsing import Parsed, Parser

from .chat import Call, ChatRequest, Finish, Problem, Reply, RequestError
from .conversation_tree import ConversationTree, PendingTurn
from .reported import TURN_REWARDS

if TYPE_CHECKING:
    from .workflow import AgentWorkflow, Reasoning


def make_reply(
    rollout: Rollout,
    request: ChatRequest,
    completion: Completion,
    *,
    number: int,
    prompt_tokens: int,
    parser: Parser,
    format: Reasoning,
) -> Reply:
    """Build the reply to a request; ``number`` counts the rollout's turns, ``format`` is that of its reasoning."""
    whole = rollout.decode(completion.token_ids, keep_special=format == "harmony")
    written, stopped_by = cut_at_stop(whole, request.stop)
    reasoning, text = split_reasoning(written, format)
    text = rollout.decode(rollout.encode(text)) if format == "harmony" else text  # without an end of the turn
    calls: tuple[Call, ...] = ()
    if request.tools and stopped_by is None:
        parsed = parser(text)
        if not parsed.calls:
            parsed = _parse_special(rollout, completion.token_ids, parser, format)
        # an invalid call stays text: no API has a form for it, and the agent sees what the policy wrote
        if parsed.calls and not any(call.error or not call.name for call in parsed.calls):
            text = parsed.text
            calls = tuple(
                Call(id=call_id(number, i), name=call.name, arguments=json.dumps(dict(call.arguments)))
                for i, call in enumerate(parsed.calls[: 1 if request.one_call else None])
            )
    return Reply(
        id=f"{number:08d}",
        text=text.strip() if calls else text,
        reasoning=reasoning,
        calls=calls,
        finish=_finish(completion, calls, stopped_by),
        stopped_by=stopped_by,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(completion.token_ids),
    )


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop text, and which one that was."""
    found = [(at, word) for word in stop if (at := text.find(word)) >= 0]
    if not found:
        return text, None
    at, word = min(found)
    return text[:at], word


def split_reasoning(text: str, format: Reasoning) -> tuple[str, str]:
    """Return reasoning and the rest: split at ``</think>``, whose opening tag may be part of the chat template, or by
    channels of ``harmony``."""
    if format == "text":
        return "", text
    if format == "harmony":
        parsed = harmony(text)
        return parsed.reasoning, parsed.text
    before, end, after = text.partition("</think>")
    thought = before.strip().removeprefix("<think>").strip()
    if end:
        return thought, after.lstrip()
    return (thought, "") if text.lstrip().startswith("<think>") else ("", text)


def call_id(turn: int, index: int) -> str:
    """Return an id of nine letters and digits, as the strictest chat templates require."""
    return f"c{turn % 100_000:05d}{index % 1000:03d}"


def _parse_special(rollout: Rollout, token_ids: Ints, parser: Parser, format: Reasoning) -> Parsed:
    """Parse calls marked by special tokens, as in some vocabularies; decoding to plain text drops these tokens."""
    whole = rollout.decode(token_ids, keep_special=True)
    parsed = parser(split_reasoning(whole, format)[1] if format == "think" else whole)
    return Parsed(text=rollout.decode(rollout.encode(parsed.text)), calls=parsed.calls)


def _finish(completion: Completion, calls: Sequence[Call], stopped_by: str | None) -> Finish:
    if calls:
        return "tool_calls"
    return "length" if completion.stop_reason is StopReason.LENGTH and stopped_by is None else "stop"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedRequest:
    """A validated request with its tokens."""

    request: ChatRequest
    opened: PendingTurn
    prompt_tokens: int
    max_new_tokens: int


class Session:
    """One rollout as its agent sees it: a policy behind HTTP."""

    def __init__(self, rollout: Rollout, settings: AgentWorkflow) -> None:
        self._rollout, self._settings = rollout, settings
        self._tree = ConversationTree(rollout, keep_past=settings.keep_past)
        self._num_requests = 0
        self._drawn = 0
        self._last = ""
        self._running: set[asyncio.Future[Completion]] = set()
        self._ended = False
        self.is_spent = False
        """Whether a request was refused for lack of budget; the rollout then counts as cut off."""
        self.error: str | None = None
        """Why a turn could not be served. The rollout then fails, even if its agent returns a result."""

    @property
    def sampling(self) -> SamplingParams:
        """Return the rollout's sampling parameters."""
        return self._rollout.sampling

    @property
    def num_turns(self) -> int:
        """Return the number of turns that the policy has taken."""
        return self._tree.num_turns

    def count(self, request: ChatRequest) -> int:
        """Count the tokens of the request. Raises `RequestError`."""
        return self._tree.open(request).transcript.num_tokens

    def prepare(self, request: ChatRequest) -> PreparedRequest:
        """Validate a request and determine its tokens. Raises `RequestError`."""
        if request.unsupported and self._settings.unsupported_options == "refuse":
            raise RequestError(
                Problem.BAD_REQUEST,
                f"the run does not support: {'; '.join(request.unsupported)}; remove it from the request, or set "
                'workflow.unsupported_options = "ignore"',
            )
        left = self._remaining_tokens()
        opened = self._tree.open(request)
        length = opened.transcript.num_tokens
        longest = self._rollout.max_length
        room = left if longest is None else min(left, longest - length)
        if room < 1:
            raise RequestError(Problem.TOO_LONG, f"{length} tokens > {(longest or 0) - 1} maximum")
        self._num_requests += 1
        limit = min(room, self.sampling.max_new_tokens, request.max_tokens or room)
        return PreparedRequest(request=request, opened=opened, prompt_tokens=length, max_new_tokens=limit)

    def _remaining_tokens(self) -> int:
        """Return how many tokens may still be generated. Raises `RequestError` if no token or turn is left."""
        max_turns, max_tokens = self._settings.max_turns, self._settings.max_tokens
        left = self.sampling.max_new_tokens if max_tokens == "all" else max_tokens - self._drawn
        if self._num_requests < max_turns and left > 0:
            return left
        self.is_spent = True
        spent = f"max_tokens = {max_tokens}" if left <= 0 else f"max_turns = {max_turns}"
        raise RequestError(Problem.NO_BUDGET, f"this rollout has used up its budget, workflow.{spent}")

    async def generate(self, prepared: PreparedRequest) -> Reply:
        """Generate the policy's turn. Raises `RequestError` if the engine cannot serve."""
        request, opened = prepared.request, prepared.opened
        try:
            completion = await self._draw(
                opened.transcript.token_ids, max_new_tokens=prepared.max_new_tokens, stop=request.stop
            )
        except RolloutFailed as error:
            self.error = str(error)
            raise RequestError(Problem.ENGINE, self.error) from None
        number = self._tree.num_turns
        parser, format = self._settings.formats()
        reply = make_reply(
            self._rollout,
            request,
            completion,
            number=number,
            prompt_tokens=prepared.prompt_tokens,
            parser=parser,
            format=format,
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
            if self._ended:  # cancelled by `close`, not because the client left
                raise RequestError(Problem.UNKNOWN_SESSION, "the rollout has ended") from None
            raise
        finally:
            drawing.cancel()
            self._running.discard(drawing)

    async def close(self) -> None:
        """Cancel turns that the agent requested and did not wait for."""
        self._ended = True
        running = list(self._running)
        for drawing in running:
            drawing.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def samples(self, prompt: Prompt, *, answer: str | None, metadata: Mapping[str, Any]) -> list[Sample]:
        """Return one sample per branch. All have the text of the rollout's answer, or else of its last turn.

        Rewards judge the agent's result for the prompt, so they see the same text for all branches of a rollout.
        """
        text = self._last if answer is None else answer
        branches = self._tree.branches()
        samples = []
        for index, branch in enumerate(branches):
            fields: dict[str, Any] = {"stop_reason": StopReason.LENGTH} if self.is_spent else {}
            about = {**metadata, "branch": index, "branches": len(branches), "turns": self.num_turns}
            about |= {"turn_ends": branch.turn_ends} if TURN_REWARDS in metadata else {}
            given = replace(prompt, token_ids=branch.opening)
            samples.append(self._rollout.sample(given, branch.parts, text=text, metadata=about, **fields))
        return samples

    def make_failed_samples(self, prompt: Prompt, error: str) -> list[Sample]:
        """Return one sample with the error. It contains the branch that ended last, if there is one."""
        branches = self._tree.branches()
        if not branches:
            raise RolloutFailed(error)
        branch = branches[-1]
        given = replace(prompt, token_ids=branch.opening)
        about = {"branches": len(branches), "turns": self.num_turns}
        return [
            self._rollout.sample(
                given, branch.parts, text=self._last, metadata=about, stop_reason=StopReason.ERROR, error=error
            )
        ]
