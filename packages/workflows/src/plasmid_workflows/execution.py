"""One execution of a workflow: what `components.Rollout` promises, over an engine's client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from plasmid.components import Workflow
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
from plasmid.utils.seeds import seed_of

log = logging.getLogger(__name__)
ABORT_S = 10.0
"""Longest time for an engine to take note that a request is given up."""


class Codec(Protocol):
    """The part of a tokenizer that workflows need."""

    def encode(self, text: str, *, allow_special: bool = True) -> Ints:
        """Text to tokens, no special tokens added.

        Those that the text spells out are recognized, unless ``allow_special`` is false or `render` took them from a
        message.
        """
        ...

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        """Tokens to text, special tokens left out unless they are asked for."""
        ...

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Text of messages through the chat template. Raises `DataError`."""
        ...


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
    max_length: int | None = None
    group_seed: int = 0
    turns: int = 0
    running: set[str] = field(default_factory=set)
    generate_s: float = 0.0
    samples_made: int = 0

    async def generate(
        self, token_ids: Ints, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """One turn. A request that was aborted for a weight sync goes on where it stopped, under the newer policy."""
        turn, self.turns = self.turns, self.turns + 1
        request = GenerateRequest(
            id=f"{self.id}#{turn}",
            session_id=self.id,
            token_ids=np.asarray(token_ids, np.int32),
            sampling=narrow_sampling(self.sampling, max_new_tokens, stop),
            seed=seed_of(self.seed, turn),
            deadline_s=self.deadline_s,
            wants_kept_set=self.wants_kept_sets,
        )
        parts: list[Completion] = []
        started = time.monotonic()
        self.running.add(request.id)
        try:
            while True:
                parts.append(await self.client.generate(request))
                if parts[-1].stop_reason is not StopReason.ABORT:
                    break
                so_far = np.concatenate([request.token_ids, parts[-1].token_ids])
                done = request.num_generated + len(parts[-1].token_ids)
                request = replace(request, token_ids=so_far, num_generated=done)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # the engine may be what failed
                await asyncio.wait_for(self.client.abort([request.id]), ABORT_S)  # nobody waits for the rest
            raise
        finally:
            self.running.discard(request.id)
            self.generate_s += time.monotonic() - started
        joined = join_completions(parts)
        if joined.stop_reason is StopReason.ERROR:
            raise RolloutFailed(joined.error or "the engine gave no reason")
        if self.wants_kept_sets and joined.kept is None:
            raise RolloutFailed("the engine was asked for kept sets and gave none")
        return joined

    def encode(self, text: str, *, allow_special: bool = True) -> Ints:
        return self.codec.encode(text, allow_special=allow_special)

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        return self.codec.decode(token_ids, keep_special=keep_special)

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        return self.codec.render(messages, template)

    def sample(self, prompt: Prompt, completions: Sequence[Completion | Ints], **fields: Any) -> Sample:
        """Put completions (trained on) and plain tokens (not trained on) behind the prompt."""
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
                spans += [span.shifted(position) for span in part.versions]
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
            "timings": {"generate_s": self.generate_s},
        }
        return Sample(**(values | fields))


class RolloutFailed(Exception):
    """The engine could not serve a request of this rollout; the rollout becomes a sample with an error."""


def narrow_sampling(sampling: SamplingParams, max_new_tokens: int | None, stop: Sequence[str]) -> SamplingParams:
    """The settings with a lower limit and more texts that end a completion; how tokens are drawn is the same."""
    changes: dict[str, Any] = {}
    if max_new_tokens is not None:
        changes["max_new_tokens"] = max(1, min(max_new_tokens, sampling.max_new_tokens))
    if stop:
        changes["stop"] = (*sampling.stop, *(text for text in stop if text not in sampling.stop))
    return sampling.model_copy(update=changes) if changes else sampling


def join_completions(parts: Sequence[Completion]) -> Completion:
    """One completion from the parts that aborts cut it into."""
    if len(parts) == 1:
        return parts[0]
    spans: list[VersionSpan] = []
    position = 0
    for part in parts:
        spans += [span.shifted(position) for span in part.versions]
        position += len(part.token_ids)
    timings: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.timings.items():
            timings[name] = timings.get(name, 0.0) + seconds
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=tuple(spans),
        kept=join_kept([(part.kept, len(part.token_ids)) for part in parts]),
        timings=timings,
    )


async def execute(workflow: Workflow, execution: Execution, prompt: Prompt, timeout_s: float) -> list[Sample]:
    """Run the workflow once. Whatever goes wrong in it becomes a sample with an error; its requests are aborted."""
    started = time.monotonic()
    try:
        samples = list(await asyncio.wait_for(workflow.run(execution, prompt), timeout_s))
        if not samples:
            raise RolloutFailed(f"workflow {type(workflow).__name__} returned no sample")
    except TimeoutError:
        samples = [_failed(execution, prompt, f"no end within {timeout_s:g} s")]
    except (RolloutFailed, PlasmidError) as error:
        samples = [_failed(execution, prompt, str(error))]
    except Exception as error:  # boundary: workflows are users' code, and one bad rollout is data, not a crash
        log.exception("rollout %s of prompt %s failed", execution.id, prompt.id)
        samples = [_failed(execution, prompt, f"{type(error).__name__}: {error}")]
    finally:
        if execution.running:
            with contextlib.suppress(Exception):  # the engine may be what failed
                await execution.client.abort(tuple(execution.running))
        await execution.client.leave([execution.id])
    seconds = {"rollout_s": time.monotonic() - started}
    return [replace(sample, timings={**sample.timings, **seconds}) for sample in samples]


def _failed(execution: Execution, prompt: Prompt, error: str) -> Sample:
    return execution.sample(prompt, [], stop_reason=StopReason.ERROR, error=error)
