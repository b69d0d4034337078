"""Data sources that cannot be used: one exact line each, before anything is started."""

import json
import sys

import pytest

FUNCTIONS = """
def row(*, seed, index):
    return {"prompt": "a", "target": 1, "profile": "exact"}

def wrong(*, seed, index):
    return {"question": "a"}
"""
MIXTURE = "{kind='mixture',sources={a={path='prompts.jsonl'},b={path='prompts.jsonl'}}"
SETTINGS = [
    ("{kind='mixture'}", "data.sources: is required"),
    ("{kind='mixture',sources={}}", "data.sources: must have at least 1 item, got {}"),
    ("{kind='mixture',sources=['prompts.jsonl']}", "data.sources: must be a table, got ['prompts.jsonl']"),
    ("{kind='mixture',sources={a='x.jsonl'}}", "data.sources.a: must be a table with a kind, got 'x.jsonl'"),
    (
        "{kind='mixture',sources={a={kind='fils'}}}",
        "data.sources.a.kind: 'fils' is not installed; did you mean 'files'?",
    ),
    (
        "{kind='mixture',sources={a={path='prompts.jsonl',pth='x'}}}",
        "data.sources.a.pth: no such setting; did you mean 'path'?",
    ),
    (MIXTURE + ",weights={c=2}}", "data: weights.c: no such source; sources are a, b"),
    (MIXTURE + ",weights={a=-1}}", "data.weights.a: must be more than 0, got -1"),
    (MIXTURE + ",profiles={c='x'}}", "data: profiles.c: no such source; sources are a, b"),
    (
        "{kind='mixture',sources={a={path='prompts.jsonl'},b={kind='demonstrations',path='prompts.jsonl'}}}",
        "data: sources: must all have prompts or all have demonstrations, got both",
    ),
    ("{kind='curriculum'}", "data.source: is required"),
    ("{kind='curriculum',source={path='prompts.jsonl'},floor=0}", "data.floor: must be at least 0.01, got 0"),
    (
        "{kind='function',function='row'}",
        "data.function: must look like module:function or file.py:function, got 'row'",
    ),
    ("{kind='datasets',path='folder',splt='x'}", "data.splt: no such setting; did you mean 'split'?"),
]
SOURCES = [
    (MIXTURE + ",profiles={a='x'}}", "data.profiles.a: no such profile: 'x'; profiles of the recipe are none"),
    (
        "{kind='mixture',sources={a={path='none-there.jsonl'}}}",
        "data.sources.a.path: no such file: none-there.jsonl (searched from DIR)",
    ),
    (
        "{kind='mixture',sources={a={path='prompts.jsonl',prompt_key='question'}}}",
        "prompts.jsonl:1: no key 'question'; the row has: prompt, target; set data.sources.a.prompt_key",
    ),
    (
        "{path='prompts.jsonl',profile_key='task'}",
        "prompts.jsonl:1: no key 'task'; the row has: prompt, target; set data.profile_key "
        '("none" if no row names a profile)',
    ),
    (
        "{path='prompts.jsonl',profile_key='target'}",
        "prompts.jsonl:1: 'target' must be the name of a profile, got a number (0)",
    ),
    ("{path='no-*.jsonl'}", "data.path: no files match no-*.jsonl (searched from DIR)"),
    (
        "{kind='curriculum',source={kind='function',function='rows.py:row'}}",
        "data.by: the source never repeats a prompt; set a column whose values share a pass rate",
    ),
    (
        "{kind='curriculum',source={kind='demonstrations',path='prompts.jsonl'}}",
        "data.kind: algorithm 'grpo' samples completions and cannot train on demonstrations; "
        'set it to "files", or algorithm.kind to "sft"',
    ),
    (
        "{kind='function',function='rows.py:wrong'}",
        "rows.py:wrong row:0: no key 'prompt'; the row has: question; set data.prompt_key",
    ),
    (
        "{kind='function',function='rows.py:rwo'}",
        "data.function: rows.py:rwo cannot be loaded: ImportError: rows.py has no function 'rwo'",
    ),
    ("{kind='datasets',path='folder'}", "data.path: no such folder: folder (searched from DIR)"),
    (
        "{kind='datasets',path='model'}",
        "data.path: model is not a folder of the package datasets: it has no dataset_dict.json, no state.json and no "
        "*.parquet or *.arrow files",
    ),
]


@pytest.mark.parametrize(("data", "message"), SETTINGS)
def test_settings_of_a_source_that_cannot_be_meant_are_named(rl, data, message):
    assert rl("train", "recipe.toml", f"data={data}") == [message]


@pytest.mark.parametrize(("data", "message"), SOURCES)
def test_a_source_that_cannot_be_used_is_named_where_it_stands(rl, folder, data, message):
    (folder / "rows.py").write_text(FUNCTIONS)
    assert rl("train", "recipe.toml", f"data={data}") == [message.replace("DIR", str(folder))]
    assert rl("train", "recipe.toml", f"data={data}", "--dry-run") == [message.replace("DIR", str(folder))]


def test_a_source_of_an_evaluation_set_is_named_by_the_whole_way(rl, folder):
    mixture = "{kind='mixture',sources={a={kind='mixture',sources={b={path='none-there.jsonl'}}}}}"
    assert rl("train", "recipe.toml", f"eval.0.data={mixture}") == [
        f"eval.0.data.sources.a.sources.b.path: no such file: none-there.jsonl (searched from {folder})"
    ]
    for data, message in (
        (MIXTURE + ",weights={a=2}}", "eval.0.data.weights: an evaluation set reads every source once; remove the "),
        ("{kind='curriculum',source={path='prompts.jsonl'}}", "eval.0.data.kind: an evaluation set cannot be a "),
    ):
        assert rl("train", "recipe.toml", f"eval.0.data={data}")[0].startswith(message)
    (folder / "rows.py").write_text(FUNCTIONS)
    assert rl("train", "recipe.toml", "eval.0.data={kind='function',function='rows.py:row'}") == [
        "eval.0.data.size: an evaluation set must be finite; set the number of rows"
    ]


def test_without_the_package_datasets_the_extra_is_named(rl, folder, monkeypatch):
    (folder / "saved").mkdir()
    (folder / "saved" / "state.json").write_text(json.dumps({"_split": "train"}))
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert rl("train", "recipe.toml", "data={kind='datasets',path='saved'}") == [
        "data.kind: saved needs the package datasets, which is not installed; pip install 'plasmid-runtime[datasets]'"
    ]


def test_a_data_source_with_an_open_method_is_refused(rl, folder):
    (folder / "plugin.py").write_text(
        "from typing import Literal\n"
        "from plasmid import DataSource, hookimpl\n"
        "class Mine(DataSource):\n"
        "    kind: Literal['mine'] = 'mine'\n"
        "    async def open(self, context): ...\n"
        "    def stream(self, encode, *, seed): ...\n"
        "    def prompts(self, encode): ...\n"
        "@hookimpl\n"
        "def register_components():\n"
        "    return [Mine]\n"
    )
    assert rl("train", "recipe.toml", "--plugin", "plugin.py") == [
        "plugin 'plugin.py': plasmid_plugin_plugin.Mine.open is never called; open the source in its `stream`, and "
        "close it in `PromptStream.close`"
    ]
