"""Untrusted checkpoints and run folders: `rl` runs none of their code, and reports in one line what it refuses."""

import io
import json
import os
import pickle
import resource
import shutil
import struct
from pathlib import Path

import pytest
import tomli_w
import torch
import xxhash
from plasmid.config.stored_recipe import split_inert_settings
from plasmid.plugins.registry import find_components, load_plugins
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from tests.security.rl_command import call_rl

RECIPE = {
    "model": {"path": "model"},
    "trainer": {"kind": "fsdp"},
    "rollout": {"kind": "hf"},
    "algorithm": {"kind": "grpo"},
    "run": {"batches": 1, "prompts_per_batch": 2, "samples_per_prompt": 2},
    "sampling": {"max_new_tokens": 2},
    "data": {"kind": "files", "path": "prompts.jsonl"},
    "rewards": [{"kind": "number"}],
    "eval": [{"name": "test", "data": {"kind": "files", "path": "prompts.jsonl"}}],
    "placement": {"device": "cpu"},
}


def evil_file():
    """A Python file that creates a mark in the current folder of the test, wherever it is executed."""
    return f"from pathlib import Path\nPath({str(Path('TRICKED').absolute())!r}).write_text('')\n"


class Evil:
    """Runs a program when it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {Path.cwd()}/TRICKED",)


@pytest.fixture
def folder(tmp_path, tiny_model, monkeypatch):
    """The current folder with a model, prompts, and a checkpoint whose state was not written by Plasmid."""
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1", "target": 1}\n{"prompt": "2", "target": 2}\n')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(evil_file())
    return tmp_path


def make_checkpoint(path, **changes):
    (path / "trainer").mkdir(parents=True)
    state = {"batch": 1, "version": 1, "producer": {}, "components": {}, "config": RECIPE | changes}
    (path / "state.json").write_text(json.dumps(state))
    return path


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("export C out", "C/trainer: not in torch's distributed format"),  # without the reward
        ("eval --model C", "rewards.0.kind: 'evil' is not installed"),
    ],
)
def test_a_stored_recipe_imports_no_plugin_file(folder, rl, command, message):
    make_checkpoint(folder / "C", plugins=["evil.py"], rewards=[{"kind": "evil"}])
    said = rl(*command.split())
    assert "C: these settings of its recipe are ignored: plugins; add --trust-recipe if you trust its author" in said
    assert message in said and not Path("TRICKED").exists()


@pytest.mark.parametrize("command", ["export C out --trust-recipe", "eval --model C --trust-recipe"])
def test_a_trusted_recipe_is_taken_whole(folder, capsys, command):
    make_checkpoint(folder / "C", plugins=["evil.py"])
    assert call_rl(*command.split())
    assert Path("TRICKED").exists()
    assert "not taken" not in capsys.readouterr().err


FUNCTIONS = {
    "data": {"kind": "function", "function": "evil.py:rows"},
    "workflow": {"kind": "function", "function": "evil.py:play"},
    "filters": [{"kind": "function", "function": "evil.py:keep"}],
}


@pytest.mark.parametrize("table", FUNCTIONS)
def test_a_stored_recipe_calls_no_function(folder, rl, table):
    make_checkpoint(folder / "C", **{table: FUNCTIONS[table]})
    key = f"{table}.0.function" if table == "filters" else f"{table}.function"
    said = rl("eval", "--model", "C")
    assert f"are ignored: {key}; add --trust-recipe if you trust" in said


REACHING = {
    "rollout.url, rollout.api_key_env": {"rollout": {"kind": "server", "url": "http://x", "api_key_env": "HOME"}},
    "rewards.0.url, rewards.0.headers": {
        "rewards": [{"kind": "remote", "url": "http://x/", "headers": {"a": "b"}}],
    },
    "placement.address": {"placement": {"device": "cpu", "address": "192.0.2.1:6379"}},
    "workflow.command": {"workflow": {"kind": "agent", "command": ["touch", "TRICKED"]}},
    "rollout.python": {"rollout": {"kind": "vllm", "python": "./evil"}},
    "rollout.server_args": {"rollout": {"kind": "sglang", "server_args": {"custom_weight_loader": "evil"}}},
}


@pytest.mark.parametrize("keys", REACHING)
def test_a_stored_recipe_names_no_server_command_or_cluster(folder, rl, keys):
    make_checkpoint(folder / "C", **REACHING[keys], data={"kind": "files", "path": "no.jsonl"}, eval=[])
    said = rl("eval", "--model", "C")
    assert f"are ignored: {keys}; add --trust-recipe if you trust" in said


def test_a_stored_recipe_does_not_trust_the_code_of_its_model(folder, rl):
    shutil.copytree(folder / "model", folder / "C/theirs")
    config = json.loads((folder / "C/theirs/config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "C/theirs/config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "C/theirs/tokenizer_config.json").read_text())
    (folder / "C/theirs/tokenizer_config.json").write_text(
        json.dumps(settings | {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", None]}})
    )
    (folder / "C/theirs/code.py").write_text(evil_file())
    make_checkpoint(folder / "C", model={"path": "C/theirs", "trust_remote_code": True}, eval=[])
    assert "are ignored: model.trust_remote_code; add --trust-recipe if you trust" in rl("eval", "--model", "C")


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ("model.path", {"model": {"path": "attacker/huge"}}),
        ("model.tokenizer", {"model": {"path": "model", "tokenizer": "attacker/huge@v1"}}),
        ("reference.path", {"reference": {"path": "attacker/huge"}}),
        ("data.path", {"data": {"kind": "files", "path": "hf://datasets/attacker/huge/a.jsonl"}}),
        ("data.path", {"data": {"kind": "files", "path": ["prompts.jsonl", "hf://datasets/attacker/huge/a.jsonl"]}}),
    ],
)
def test_a_stored_recipe_has_nothing_downloaded(folder, keys, changes):
    kept, left_out = split_inert_settings(RECIPE | changes, find_components(load_plugins()))
    assert left_out == [keys]
    assert "attacker" not in json.dumps(kept)
    assert kept["eval"] == RECIPE["eval"]


def test_a_stored_recipe_chooses_no_folder_to_write_to(folder, rl):
    make_checkpoint(folder / "C", run=RECIPE["run"] | {"dir": str(folder / "elsewhere")}, recipe="../../elsewhere")
    assert "recipe: " in rl("eval", "--model", "C")
    assert not (folder / "elsewhere-eval").exists()


def distributed(folder, tensors=None):
    """A checkpoint in torch's distributed format, next to the files of its model."""
    tensors = tensors or {"weights.a": torch.zeros(4, 4)}
    save(tensors, storage_writer=FileSystemWriter(folder / "D"), no_dist=True)
    (folder / "D/config.json").write_bytes((folder / "model/config.json").read_bytes())
    return folder / "D"


def change(path, edit):
    metadata = FileSystemReader(path).read_metadata()
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def repeat(chunks):
    """Make a list of 100,000 references to one chunk, which take two bytes each in a pickle."""
    chunks[:] = chunks[:1] * 100_000


def test_a_description_that_names_code_is_refused(folder, rl):
    distributed(folder)
    (folder / "D/.metadata").write_bytes(pickle.dumps(Evil()))
    assert "posix.system is not allowed in it" in rl("convert", "D", "out")


def test_a_description_of_a_few_bytes_takes_no_gigabytes(folder, rl):
    """`LONG_BINPUT` with a large number makes Python's C unpickler allocate a table of that size."""
    distributed(folder)
    (folder / "D/.metadata").write_bytes(b"\x80\x02N" + b"r" + struct.pack("<I", 1 << 28) + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "its memo index 268435456" in rl("convert", "D", "out")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_a_description_in_which_a_key_takes_forever_to_hash_is_refused(folder, rl):
    distributed(folder)
    doubled = b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(60))  # a pair of the previous pair, memoized
    (folder / "D/.metadata").write_bytes(b"\x80\x04})\x94" + doubled + b"Ns.")
    assert "it has a key of type tuple" in rl("convert", "D", "out")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda m: setattr(m.state_dict_metadata["weights.a"], "size", torch.Size([1 << 20, 1 << 20])),
            "is incomplete",
        ),
        (lambda m: setattr(m.state_dict_metadata["weights.a"], "size", (1 << 63, 1)), "weights.a has the size"),
        (lambda m: setattr(m.state_dict_metadata["weights.a"], "size", (1,) * 65), "weights.a has 65 dimensions"),
        (lambda m: repeat(m.state_dict_metadata["weights.a"].chunks), "two parts of weights.a begin at the same place"),
        (
            lambda m: setattr(m.state_dict_metadata["weights.a"].chunks[0], "sizes", torch.Size([1 << 20, 1 << 20])),
            "is outside of its shape",
        ),
        (lambda m: setattr(next(iter(m.storage_data.values())), "length", 1 << 40), "is truncated or corrupt"),
        (
            lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", "../secret"),
            "'../secret' is not the name of a file in the folder",
        ),
        (lambda m: m.state_dict_metadata.update({"weights.a": 3}), "is corrupt: AttributeError"),
    ],
)
def test_a_description_of_what_is_not_there_is_refused_before_memory_is_taken(folder, rl, edit, said):
    change(distributed(folder), edit)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert said in rl("convert", "D", "out")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_a_tensor_that_is_code_is_refused(folder, rl):
    path = distributed(folder)
    data = io.BytesIO()
    torch.save(Evil(), data)
    (path / "__0_0.distcp").write_bytes(data.getvalue().ljust(5000, b"\0"))
    change(path, lambda m: setattr(next(iter(m.storage_data.values())), "length", len(data.getvalue())))
    assert "cannot read weights.a; the file is truncated or corrupt" in rl("convert", "D", "out")


@pytest.mark.parametrize(
    "state",
    [
        "3",
        "[]",
        '{"batch": 1}',
        "{",
        json.dumps({"batch": 1, "version": 1, "producer": {}, "components": {}, "config": 3}),
        "[" * 100_000,
    ],
)
def test_a_damaged_state_is_one_line(folder, rl, state):
    make_checkpoint(folder / "C")
    (folder / "C/state.json").write_text(state)
    for command in ("export C out", "eval --model C"):
        said = rl(*command.split())
        assert said.startswith("error: C/state.json: cannot be read: ") and said.count("\n") == 1


def test_a_deeply_nested_stored_recipe_is_refused(folder, rl):
    make_checkpoint(folder / "C")
    config = {"model": {"path": json.loads("[" * 600 + "]" * 600)}}
    state = {"batch": 1, "version": 1, "producer": {}, "components": {}, "config": config}
    (folder / "C/state.json").write_text(json.dumps(state))
    for command in ("export C out", "eval --model C"):
        assert rl(*command.split()).startswith("error: ")


def test_a_stored_recipe_sets_no_folder_and_no_function_of_megatron(folder, rl):
    """Megatron's own settings: one is a folder to write to, others are functions to import."""
    trainer = {
        "kind": "megatron",
        "transformer": {"fp8_quantizer_factory": "evil.make", "moe_aux_loss_coeff": 0.1},
        "optimizer": {"config_logger_dir": str(folder / "elsewhere"), "adam_beta2": 0.9},
    }
    make_checkpoint(folder / "C", trainer=trainer, eval=[])
    said = rl("eval", "--model", "C")
    assert "are ignored: trainer.transformer.fp8_quantizer_factory, trainer.optimizer.config_logger_dir; add" in said


@pytest.mark.parametrize("command", ["convert C out", "export C out"])
def test_a_stored_recipe_has_no_files_of_another_folder_copied(folder, rl, command):
    """All JSON and text files of the folder with the tokenizer are copied next to the weights."""
    (folder / "private").mkdir()
    (folder / "private/credentials.json").write_text('{"token": "secret"}')
    make_checkpoint(folder / "C", model={"path": "model", "tokenizer": str(folder / "private")})
    save({"weights.a": torch.zeros(2)}, storage_writer=FileSystemWriter(folder / "C/trainer"), no_dist=True)
    said = rl(*command.split())
    assert "private has no tokenizer" in said or "private has no tokenizer" in said
    assert not list(folder.glob("*out*"))


def test_a_conversion_neither_runs_nor_offers_to_run_the_code_of_a_model(folder, rl, monkeypatch):
    shutil.copytree(folder / "model", folder / "theirs")
    file = folder / "theirs/config.json"
    map_ = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "theirs", "auto_map": map_}))
    (folder / "theirs/code.py").write_text(evil_file())
    make_checkpoint(folder / "C", model={"path": "theirs"})
    save({"weights.a": torch.zeros(2)}, storage_writer=FileSystemWriter(folder / "C/trainer"), no_dist=True)
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "y")
    assert "cannot be loaded as a causal language model" in rl("convert", "C", "out")
    assert not asked


def test_a_conversion_asks_for_no_attention_kernel_that_a_model_names(folder):
    """Transformers downloads a kernel that `config.json` names, and runs its code."""
    shutil.copytree(folder / "model", folder / "theirs")
    file = folder / "theirs/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_implementation": "attacker/kernel:forward"}))
    make_checkpoint(folder / "C", model={"path": "theirs"})
    save({"weights.a": torch.zeros(2)}, storage_writer=FileSystemWriter(folder / "C/trainer"), no_dist=True)
    assert call_rl("convert", "C", "out") == 0


@pytest.fixture(scope="module")
def checkpoint(tiny_model, tmp_path_factory):
    """A checkpoint of a run of one batch."""
    path = tmp_path_factory.mktemp("run")
    recipe = RECIPE | {"model": {"path": str(tiny_model)}, "checkpoint": {"export": False}, "eval": []}
    recipe["data"] = {"kind": "files", "path": str(path / "prompts.jsonl")}
    (path / "prompts.jsonl").write_text('{"prompt": "1", "target": 1}\n{"prompt": "2", "target": 2}\n')
    (path / "recipe.toml").write_text(tomli_w.dumps(recipe))
    assert call_rl("train", path / "recipe.toml", f"run.dir='{path}/run'") == 0
    return path / "run/checkpoints/batch-000001"


def name_code(path):
    (path / "trainer/.metadata").write_bytes(pickle.dumps(Evil()))


def store_code_as_an_object(path):
    """torch's planner loads objects other than tensors with weights_only=False."""
    data = io.BytesIO()
    torch.save(Evil(), data)
    (path / "trainer/evil.distcp").write_bytes(data.getvalue())

    def edit(metadata):
        metadata.state_dict_metadata["numbers.step"] = BytesStorageMetadata()
        for index in [index for index in metadata.storage_data if index.fqn == "numbers.step"]:
            del metadata.storage_data[index]
        stored = type(next(iter(metadata.storage_data.values())))("evil.distcp", 0, len(data.getvalue()))
        metadata.storage_data[MetadataIndex("numbers.step")] = stored

    change(path / "trainer", edit)


def rewrite_manifest(path):
    """List the files as they are now, as an attacker would do."""
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    content = {file.relative_to(path).as_posix(): file.read_bytes() for file in files}
    found = {name: [len(data), xxhash.xxh3_128_hexdigest(data)] for name, data in content.items()}
    (path / "manifest.json").write_text(json.dumps(found))


@pytest.mark.long
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (name_code, "posix.system is not allowed in it"),
        (store_code_as_an_object, "numbers.step is a pickled object, not a tensor; loading it could execute code"),
    ],
)
def test_a_trainer_runs_no_code_of_a_checkpoint(checkpoint, folder, rl, spoil, why):
    shutil.copytree(checkpoint, folder / "C")
    spoil(folder / "C")
    rewrite_manifest(folder / "C")
    assert why in rl("export", "C", "out")


@pytest.mark.long
def test_a_new_run_executes_no_code_from_a_checkpoint(checkpoint, folder, rl):
    shutil.copytree(checkpoint, folder / "C")
    store_code_as_an_object(folder / "C")
    rewrite_manifest(folder / "C")
    (folder / "recipe.toml").write_text(tomli_w.dumps(RECIPE | {"eval": []}))
    assert "is a pickled object, not a tensor" in rl("train", "recipe.toml", "checkpoint.start_from='C'")


@pytest.mark.long
def test_a_checkpoint_of_a_run_is_exported_with_its_stored_recipe(checkpoint, folder, capsys):
    assert call_rl("export", checkpoint, "out") == 0
    assert (folder / "out/model.safetensors").is_file()
    assert "not taken" not in capsys.readouterr().err
