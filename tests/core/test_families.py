"""Model families registered by plugins: merged, refused if two of them conflict, and used by `auto`."""

import asyncio

import pytest
from plasmid import RunContext, hookimpl
from plasmid.components import ModelFamily
from plasmid.errors import ConfigError, PluginError
from plasmid.plugins.module_file import load_file
from plasmid.plugins.registry import find_families, get_loaded_families, load_plugins
from plasmid.settings.validation import validate
from plasmid_agents import Agent
from plasmid_workflows import CalculatorTool, Tools
from plasmid_workflows.tools.formats import find_parser, guard_parser
from plasmid_workflows.tools.tool_calls import PARSERS

PLUGIN = """
from plasmid import hookimpl
from plasmid.components import ModelFamily
from plasmid_workflows.tools.parsing import Parsed, ToolCall

def shout(text):
    if "bug" in text:
        raise KeyError(text)
    calls = (ToolCall(name=text[1:]),) if text.startswith("!") else ()
    return None if "none" in text else Parsed(text=text, calls=calls)

@hookimpl
def register_families():
    return [ModelFamily(model_type="shouting", tool_calls=shout, reasoning="{reasoning}")]
"""


def plugin(*families):
    class Plugin:
        @hookimpl
        def register_families(self):
            return families

    return Plugin()


def found(*plugins):
    return find_families(load_plugins(*plugins, installed=False))


def test_each_plugin_may_know_a_part_of_a_family():
    ours = ModelFamily(model_type="a", layouts={"x": list}, reasoning="think")
    theirs = ModelFamily(model_type="a", layouts={"y": dict}, tool_calls="glm", reasoning="think")

    class Other:
        @hookimpl
        def register_families(self):
            return [theirs, ModelFamily(model_type="b")]

    families = found(plugin(ours), Other())
    assert families.keys() == {"a", "b"}
    assert families["a"] == ModelFamily(
        model_type="a", layouts={"x": list, "y": dict}, tool_calls="glm", reasoning="think"
    )


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            {"layouts": {"x": list}},
            {"layouts": {"x": list}},
            "plugin 'Plugin' already registers layouts of trainer 'x'",
        ),
        ({"tool_calls": "glm"}, {"tool_calls": "hermes"}, "plugin 'Plugin' already registers tool_calls"),
        ({"reasoning": "think"}, {"reasoning": "text"}, "plugin 'Plugin' already registers reasoning"),
    ],
)
def test_two_plugins_that_disagree_are_named(first, second, said):
    with pytest.raises(PluginError, match=f"plugin 'Plugin': family 'a': {said}"):
        found(plugin(ModelFamily(model_type="a", **first), ModelFamily(model_type="a", **second)))


def test_other_objects_are_refused():
    with pytest.raises(PluginError, match="register_families must return ModelFamily objects, got 'glm'"):
        found(plugin("glm"))


def test_built_in_families_come_from_the_hook():
    families = get_loaded_families()
    assert {name for name, family in families.items() if "megatron" in family.layouts} >= {"llama", "deepseek_v3"}
    assert (families["glm4_moe"].tool_calls, families["glm4_moe"].reasoning) == ("glm", "think")
    assert find_parser("k", "auto", "gpt_oss") is PARSERS["harmony"]
    assert {family.tool_calls for family in families.values() if isinstance(family.tool_calls, str)} <= {"", *PARSERS}


@pytest.fixture
def shouting(tmp_path):
    def write(reasoning="think"):
        (tmp_path / "shouting.py").write_text(PLUGIN.replace("{reasoning}", reasoning))
        load_file(tmp_path / "shouting.py")

    return write


def open_with(workflow, tmp_path, model_type):
    async def work():
        await workflow.open(RunContext(seed=0, run_dir=tmp_path, model_type=model_type))
        await workflow.close()

    asyncio.run(work())


def test_auto_takes_the_format_of_the_family(shouting, tmp_path):
    shouting()
    parse = find_parser("k", "auto", "shouting")
    assert [call.name for call in parse("!f").calls] == ["f"]
    for text, error in (("bug", "calls cannot be parsed: KeyError"), ("none", "calls cannot be parsed: None")):
        (call,) = parse(text).calls
        assert call.error.startswith(error)
    open_with(Tools(tools=(CalculatorTool(),), format="auto", workers=1), tmp_path, "shouting")


def test_a_guarded_parser_returns_what_the_parser_returns():
    assert guard_parser(PARSERS["glm"])("<tool_call>f</tool_call>") == PARSERS["glm"]("<tool_call>f</tool_call>")


def test_an_unknown_family_is_refused_at_the_start_of_a_run(tmp_path):
    workflow = Tools(tools=(CalculatorTool(),), format="auto", workers=1)
    with pytest.raises(ConfigError, match=r"workflow\.format: model type 'x' is not known to any plugin; set it"):
        open_with(workflow, tmp_path, "x")


def test_auto_needs_a_template_that_shows_tools():
    assert Tools(tools=(CalculatorTool(),), format="auto").format == "auto"
    with pytest.raises(ValueError, match="format: must be a name with shown = 'system'"):
        Tools(tools=(CalculatorTool(),), format="auto", shown="system")


def test_reasoning_of_agents_is_that_of_the_family(shouting):
    settings = {"kind": "agent", "command": ["true"], "tool_calls": "auto", "reasoning": "auto"}
    agent = validate(Agent, settings)
    assert agent._find_formats("qwen3") == (PARSERS["hermes"], "think")
    assert agent._find_formats("qwen2") == (PARSERS["hermes"], "text")
    shouting("riddle")
    with pytest.raises(ConfigError, match="'shouting' has the format 'riddle', which does not exist; set it to one of"):
        agent._find_formats("shouting")
