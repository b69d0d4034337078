"""An engine with scripted answers, and rollouts with it."""

from __future__ import annotations

import numpy as np
from plasmid import Completion, GenerateRequest, Prompt, SamplingParams, StopReason, VersionSpan
from plasmid_workflows.execution import Execution


class ScriptedEngine:
    """Implements `protocols.EngineClient`: answers turn after turn; each ends with the end of text unless it is cut."""

    def __init__(self, tokenizer, turns, *, cut=()):
        self.tokenizer, self.turns, self.cut = tokenizer, list(turns), set(cut)
        self.requests: list[GenerateRequest] = []
        self.left = False

    async def generate(self, request):
        number = len(self.requests)
        self.requests.append(request)
        text = self.turns[number]
        ids = self.tokenizer.encode(text)
        stop = StopReason.LENGTH
        if number not in self.cut:
            ids = np.append(ids, self.tokenizer.eos_token_id).astype(np.int32)
            stop = StopReason.STOP
        if len(ids) > request.sampling.max_new_tokens:
            ids, stop = ids[: request.sampling.max_new_tokens], StopReason.LENGTH
        return Completion(
            request_id=request.id,
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=(VersionSpan(version=3, start=0, end=len(ids)),),
            stop_reason=stop,
        )

    async def abort(self, request_ids):
        return None

    async def end_sessions(self, session_ids):
        self.left = True


def rollout(tokenizer, turns, *, cut=(), max_length=None, **sampling):
    """Run one rollout in which the engine gives these answers."""
    settings = SamplingParams(**{"max_new_tokens": 500, **sampling})
    return Execution(
        id="7/0",
        group_id=7,
        sampling=settings,
        client=ScriptedEngine(tokenizer, turns, cut=cut),
        codec=tokenizer,
        seed=1,
        deadline_s=10.0,
        max_length=max_length,
        group_seed=5,
    )


def chat(tokenizer, *contents, target=None, **fields):
    """Create a prompt of messages, alternately by user and assistant."""
    messages = tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents))
    ids, text = tokenizer.encode_prompt(messages, fields.get("template", {}))
    return Prompt(id="p:1", token_ids=ids, text=text, messages=messages, target=target, **fields)


def plain(tokenizer, text, target=None):
    """Create a prompt of plain text."""
    return Prompt(id="p:1", token_ids=tokenizer.encode(text), text=text, target=target)


def coloured(tokenizer, sample):
    """Return the sample as runs of text, each with whether it is trained on."""
    runs: list[tuple[str, bool]] = []
    start = 0
    mask = sample.loss_mask
    for end in range(1, len(mask) + 1):
        if end == len(mask) or mask[end] != mask[start]:
            runs.append((tokenizer.decode(sample.token_ids[start:end], keep_special=True), bool(mask[start])))
            start = end
    return runs
