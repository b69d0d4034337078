"""One execution of a workflow: implements `components.Rollout` on top of an engine client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from plasmid.components import Workflow
from plasmid.components.rollouts import Codec
from plasmid.errors import PlasmidError
from plasmid.protocols import EngineClient
from plasmid.types import (
    Completion,
    GenerateRequest,
    Ints,
    Message,
    Prompt,
    Sample,
    SamplingParams,
    StopReason,
    VersionSpan,
)
from plasmid.types.kept_sets import KeptSet, join_kept
from plasmid.types.routing import Experts, Routing, fill_unknown
from plasmid.types.shared_groups import freeze_arrays
from plasmid.utils.seeds import seed_of
from plasmid.utils.waiting import deadline, is_cancelling

from .result_checks import list_samples
from .turns import Turn, TurnState, hash_request

log = logging.getLogger(__name__)
ABORT_S = 10.0
"""Time limit for an engine to confirm that a request is aborted, in seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class Execution:
    """Implements `components.Rollout` for one rollout."""

    id: str
    group_id: int
    sampling: SamplingParams
    client: EngineClient
    codec: Codec
    seed: int
    deadline_s: float
    wants_kept_sets: bool = False
    routing: Routing | None = None
    """Request the experts that the engine chooses; None for models without experts, or if the trainer ignores them."""
    max_length: int | None = None
    vocab_size: int | None = None
    """Number of token ids of the model; None if unknown."""
    group_seed: int = 0
    resumed: dict[int, Turn] = field(default_factory=dict)
    """Checkpointed tokens of turns that have not started since the resume, by turn number."""
    turns: int = 0
    open_turns: dict[str, TurnState] = field(default_factory=dict)
    """Turns being generated, by request id."""
    ended_turns: list[Turn] = field(default_factory=list)
    """Tokens of all other turns."""
    routed: tuple[Ints, Experts] | None = None
    """The tokens of the last turn, prompt included, and the experts of all but the last token."""
    generate_s: float = 0.0
    samples_made: int = 0

    async def generate(
        self, token_ids: Ints, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Generate one turn. A request aborted for a weight sync continues where it stopped, under the newer policy."""
        token_ids = np.asarray(token_ids, np.int32)
        known = self._find_known_experts(token_ids)
        turn = self._begin_turn(token_ids, narrow_sampling(self.sampling, max_new_tokens, stop), known)
        request_id, started = turn.request.id, time.monotonic()
        self.open_turns[request_id] = turn
        try:
            joined = await turn.draw(self.client)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # the engine itself may have failed
                await asyncio.wait_for(self.client.abort([request_id]), ABORT_S)  # the rest is no longer needed
            raise
        finally:
            del self.open_turns[request_id]
            if (ended := turn.record(None)) is not None:
                self.ended_turns.append(ended)
            self.generate_s += time.monotonic() - started
        if joined.stop_reason is StopReason.ERROR:
            raise RolloutFailed(joined.error or "the engine returned no reason")
        if self.wants_kept_sets and joined.kept is None:
            raise RolloutFailed("the engine returned no kept sets, although they were requested")
        return joined if self.routing is None else self._add_known_experts(turn.request, joined, self.routing, known)

    def _find_known_experts(self, token_ids: Ints) -> Experts | None:
        """Return the experts recorded for the last turn if ``token_ids`` begin with all of its tokens, else None."""
        if self.routed is None or not np.array_equal(self.routed[0], token_ids[: len(self.routed[0])]):
            return None
        return self.routed[1]

    def _add_known_experts(
        self, request: GenerateRequest, joined: Completion, routing: Routing, known: Experts | None
    ) -> Completion:
        """Return the completion with the experts of all tokens but the last.

        If the engine has reported the experts of a token several times, the first report counts.
        """
        if joined.experts is None:
            raise RolloutFailed("the engine returned no experts, although they were requested")
        tokens = np.concatenate([request.token_ids, joined.token_ids])
        end = request.experts_from + len(joined.experts)
        if len(joined.token_ids) and end != len(tokens) - 1:
            raise RolloutFailed(f"the engine returned the experts of {end} tokens instead of {len(tokens) - 1}")
        experts = routing.rows(max(0, len(tokens) - 1))
        if known is not None:
            fill_unknown(experts, known, end=len(known))
        fill_unknown(experts, joined.experts, end=min(end, len(experts)))
        self.routed = tokens, experts
        return replace(joined, experts=experts)

    def _begin_turn(self, token_ids: Ints, sampling: SamplingParams, routed: Experts | None) -> TurnState:
        """Start the next turn, with its tokens from a checkpoint if there are any."""
        number, self.turns = self.turns, self.turns + 1
        request = GenerateRequest(
            id=f"{self.id}#{number}",
            session_id=self.id,
            token_ids=token_ids,
            sampling=sampling,
            seed=seed_of(self.seed, number),
            deadline_s=self.deadline_s,
            wants_kept_set=self.wants_kept_sets,
            routing=self.routing,
            experts_from=0 if routed is None else len(routed),
        )
        turn = TurnState(number, request)
        if (known := self.resumed.pop(number, None)) is not None:
            if known.request_hash == hash_request(request):
                turn.parts.append(known.completion)
            else:
                log.warning(
                    "rollout %s: the prompt of turn %d changed since the checkpoint; the turn is generated again",
                    self.id,
                    number,
                )
                self.resumed = {}
        return turn

    def encode(self, text: str, *, allow_special: bool = True) -> Ints:
        return self.codec.encode(text, allow_special=allow_special)

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        return self.codec.decode(token_ids, keep_special=keep_special)

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        return self.codec.render(messages, template)

    def sample(self, prompt: Prompt, completions: Sequence[Completion | Ints], **fields: Any) -> Sample:
        """Append completions (trained on) and plain tokens (not trained on) to the prompt."""
        tokens: list[Ints] = [np.asarray(prompt.token_ids, np.int32)]
        mask = [np.zeros(len(prompt.token_ids), np.bool_)]
        logprobs = [np.zeros(len(prompt.token_ids), np.float32)]
        kept: list[tuple[KeptSet | None, int]] = [(None, len(prompt.token_ids))]
        spans: list[VersionSpan] = []
        position, stop = len(prompt.token_ids), StopReason.STOP
        for part in completions:
            drawn = isinstance(part, Completion)
            ids = part.token_ids if isinstance(part, Completion) else np.asarray(part, np.int32)
            tokens.append(ids)
            mask.append(np.full(len(ids), drawn, np.bool_))
            logprobs.append(part.logprobs if isinstance(part, Completion) else np.zeros(len(ids), np.float32))
            kept.append((part.kept if isinstance(part, Completion) else None, len(ids)))
            if isinstance(part, Completion):
                spans += [span.shift(position) for span in part.versions]
                stop = part.stop_reason
            position += len(ids)
        number, self.samples_made = self.samples_made, self.samples_made + 1
        values: dict[str, Any] = {
            "id": self.id if number == 0 else f"{self.id}.{number}",
            "rollout_id": self.id,
            "group_id": self.group_id,
            "prompt_id": prompt.id,
            "token_ids": np.concatenate(tokens),
            "loss_mask": np.concatenate(mask),
            "rollout_logprobs": np.concatenate(logprobs),
            "versions": tuple(spans),
            "sampling": self.sampling,
            "text": self.decode(np.concatenate([np.zeros(0, np.int32), *tokens[1:]])),
            "stop_reason": stop,
            "kept": join_kept(kept),
            "experts": self._place_experts(len(prompt.token_ids), completions),
            "timings": {"generate_s": self.generate_s},
        }
        return Sample(**(values | fields))

    def _place_experts(self, position: int, completions: Sequence[Completion | Ints]) -> Experts | None:
        """Return the experts of all tokens of a sample, for each token those of the first completion that has them."""
        if self.routing is None:
            return None
        ends = position + np.cumsum([len(p.token_ids if isinstance(p, Completion) else p) for p in completions])
        experts = self.routing.rows(int(ends[-1]) if len(ends) else position)
        for part, end in zip(completions, ends.tolist(), strict=True):
            if isinstance(part, Completion) and part.experts is not None:
                fill_unknown(experts, part.experts, end=max(0, int(end) - 1))
        return experts


class RolloutFailed(Exception):
    """The engine could not serve a request of this rollout; the rollout becomes a sample with an error."""


def narrow_sampling(sampling: SamplingParams, max_new_tokens: int | None, stop: Sequence[str]) -> SamplingParams:
    """Return the settings with a lower token limit and more stop texts; sampling stays the same."""
    changes: dict[str, Any] = {}
    if max_new_tokens is not None:
        changes["max_new_tokens"] = max(1, min(max_new_tokens, sampling.max_new_tokens))
    if stop:
        changes["stop"] = (*sampling.stop, *(text for text in stop if text not in sampling.stop))
    return sampling.model_copy(update=changes) if changes else sampling


async def execute(workflow: Workflow, execution: Execution, prompt: Prompt, timeout_s: float) -> list[Sample]:
    """Run the workflow once. Any error in it becomes a sample with an error, and its requests are aborted."""
    started = time.monotonic()
    try:
        async with deadline(timeout_s, f"rollout {execution.id} of prompt {prompt.id} (run.rollout_timeout_s)"):
            result = await workflow.run(execution, prompt)
        samples = _list_samples(workflow, execution, prompt, result)
        freeze_arrays(samples)
    except (RolloutFailed, PlasmidError) as error:
        samples = [_make_failed_sample(execution, prompt, str(error))]
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # boundary: a failed rollout must not end the run
        if isinstance(error, asyncio.CancelledError) and is_cancelling():
            raise  # the run cancels the rollout
        log.exception("rollout %s of prompt %s failed", execution.id, prompt.id)
        samples = [_make_failed_sample(execution, prompt, f"{type(error).__name__}: {error}")]
    finally:
        if execution.open_turns:
            with contextlib.suppress(Exception):  # the engine itself may have failed
                await execution.client.abort(tuple(execution.open_turns))
        await execution.client.end_sessions([execution.id])
    seconds = {"rollout_s": time.monotonic() - started}
    return [replace(sample, timings={**sample.timings, **seconds}) for sample in samples]


def _list_samples(workflow: Workflow, execution: Execution, prompt: Prompt, result: object) -> list[Sample]:
    """Return the samples in the result of a workflow. Raises `RolloutFailed` if a run cannot use them."""
    where = f"workflow {type(workflow).__name__}"
    try:
        samples = list_samples(result, vocab_size=execution.vocab_size)
    except ValueError as error:
        raise RolloutFailed(f"{where}: {error}") from error
    expected = {"rollout_id": execution.id, "group_id": execution.group_id, "prompt_id": prompt.id}
    for sample in samples:
        for name, value in expected.items():
            if getattr(sample, name) != value:
                found = f"got {getattr(sample, name)!r:.100}; create samples by rollout.sample"
                raise RolloutFailed(f"{where}: {name} of sample {sample.id} must be {value!r}, {found}")
    return samples


def _make_failed_sample(execution: Execution, prompt: Prompt, error: str) -> Sample:
    return execution.sample(prompt, [], stop_reason=StopReason.ERROR, error=error)
