"""Choice of the format of tool calls: by name, or that of the model's family."""

from __future__ import annotations

from typing import Literal

from plasmid.components import ModelFamily
from plasmid.errors import ConfigError, one_line
from plasmid.plugins.registry import get_loaded_families

from .parsing import Parsed, Parser, ToolCall
from .tool_calls import PARSERS

Format = Literal[
    "auto",
    "deepseek-v3",
    "deepseek-v3.1",
    "glm",
    "harmony",
    "hermes",
    "kimi-k2",
    "llama3",
    "mistral",
    "python",
    "qwen-xml",
]
FAMILIES = (
    ModelFamily(model_type="deepseek_v3", tool_calls="deepseek-v3", reasoning="think"),
    ModelFamily(model_type="glm4_moe", tool_calls="glm", reasoning="think"),
    ModelFamily(model_type="gpt_oss", tool_calls="harmony", reasoning="harmony"),
    ModelFamily(model_type="kimi_k2", tool_calls="kimi-k2"),
    ModelFamily(model_type="llama", tool_calls="llama3"),
    ModelFamily(model_type="mistral", tool_calls="mistral"),
    ModelFamily(model_type="qwen2", tool_calls="hermes"),
    ModelFamily(model_type="qwen3", tool_calls="hermes", reasoning="think"),
    ModelFamily(model_type="qwen3_moe", tool_calls="hermes", reasoning="think"),
)
"""Formats of the first models of each type; later ones may write another, as DeepSeek-V3.1 does."""


def find_parser(key: str, format: str, model_type: str) -> Parser:
    """Return the parser of the setting ``key``; ``auto`` is that of the family. Raises `ConfigError`."""
    if format != "auto":
        return PARSERS[format]
    found = family_of(model_type).tool_calls
    if callable(found):
        return guard_parser(found)
    if found not in PARSERS:
        problem = f"has the format {found!r}, which does not exist" if found else "is not known to any plugin"
        raise ConfigError(f"{key}: model type {model_type!r} {problem}; set it to one of {', '.join(sorted(PARSERS))}")
    return PARSERS[found]


def family_of(model_type: str) -> ModelFamily:
    """Return the family that plugins register for a model type, an empty one by default. Raises `PluginError`."""
    return get_loaded_families().get(model_type, ModelFamily(model_type=model_type))


def guard_parser(parser: Parser) -> Parser:
    """Return a plugin's parser whose exceptions and wrong results become invalid calls, whose error the policy sees."""

    def parse(text: str) -> Parsed:
        try:
            found = parser(text)
        except Exception as error:  # noqa: BLE001  boundary: a plugin's bug on a text of the policy
            return Parsed(text=text, calls=(ToolCall(name="", error=f"calls cannot be parsed: {one_line(error)}"),))
        if not isinstance(found, Parsed):
            return Parsed(text=text, calls=(ToolCall(name="", error=f"calls cannot be parsed: {found!r:.80}"),))
        return found

    return parse
