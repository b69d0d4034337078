"""Data types of a run: prompts, samples and their scores."""

from .samples import (
    Bools,
    BucketSum,
    Completion,
    Floats,
    GenerateRequest,
    Ints,
    Message,
    Prompt,
    PromptGroup,
    Role,
    Sample,
    SamplingParams,
    Score,
    StopReason,
    SyncResult,
    VersionSpan,
)

__all__ = [
    "Bools",
    "BucketSum",
    "Completion",
    "Floats",
    "GenerateRequest",
    "Ints",
    "Message",
    "Prompt",
    "PromptGroup",
    "Role",
    "Sample",
    "SamplingParams",
    "Score",
    "StopReason",
    "SyncResult",
    "VersionSpan",
]
