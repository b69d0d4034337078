"""Untrusted models, GGUF files, data and run folders: no secret is copied, and no file elsewhere is changed."""

import json
import resource
import struct
import time
from pathlib import Path

import pytest
import tomli_w
from safetensors.numpy import save_file

from tests.forked_rl import run_rl
from tests.security.model_files import make_tokenizer
from tests.security.rl_command import call_rl
from tests.security.test_terminal import write_run

RECIPE = {
    "model": {"path": "model"},
    "trainer": {"kind": "fsdp"},
    "rollout": {"kind": "hf"},
    "algorithm": {"kind": "grpo"},
    "run": {"dir": "run", "batches": 1, "prompts_per_batch": 2, "samples_per_prompt": 2},
    "data": {"path": "prompts.jsonl", "prompt_as": "chat", "max_prompt_tokens": 100},
    "rewards": [{"kind": "number"}],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder with a recipe, prompts, a small model, and a file that no command may change or copy."""
    import numpy as np

    make_tokenizer(tmp_path / "model")
    (tmp_path / "model/config.json").write_text("{}")
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "model/model.safetensors")
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(RECIPE))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1", "target": 1}\n')
    (tmp_path / "secret").write_text("SECRET")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rl(rl):
    """Return a function that runs the command, which must fail with one line, and returns it."""

    def run(*arguments):
        said = rl(*arguments)
        assert said.count("\n") == 1, said
        return said

    return run


def assert_untouched(folder):
    assert (folder / "secret").read_text() == "SECRET"


def test_a_link_to_a_secret_is_not_copied_into_a_converted_model(folder, rl):
    (folder / "model/notes.txt").symlink_to(folder / "secret")
    assert "model/notes.txt: is a link out of its folder" in rl("convert", "model", "out")
    assert not (folder / "out").exists()


def test_a_run_does_not_begin_whose_export_would_copy_a_link_to_a_secret(folder, rl):
    (folder / "model/notes.txt").symlink_to(folder / "secret")
    assert "model.path: model/notes.txt: is a link out of its folder" in rl("train", "recipe.toml", "--dry-run")


def test_a_model_in_a_cache_of_hugging_face_is_converted(folder):
    cache = folder / "hub/models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/1").mkdir(parents=True)
    for number, file in enumerate((folder / "model").iterdir()):
        file.rename(cache / f"blobs/{number}")
        (cache / "snapshots/1" / file.name).symlink_to(f"../../blobs/{number}")
    assert call_rl("convert", cache / "snapshots/1", "out") == 0
    assert (folder / "out/tokenizer.json").is_file() and not (folder / "out/tokenizer.json").is_symlink()


def run_folder(folder):
    (folder / "run/logs").mkdir(parents=True)
    (folder / "run/config.json").write_text("{}")
    line = {"step": 1, "time": 0.0, "metrics": {"loss": 1.0}}
    (folder / "run/metrics.jsonl").write_text(json.dumps(line) + "\n")


def test_a_report_is_not_written_through_a_link(folder, capsys):
    run_folder(folder)
    for name in ("report.html", ".report.html.tmp"):
        (folder / "run" / name).symlink_to(folder / "secret")
    assert call_rl("view", "run") == 0, capsys.readouterr().err
    assert_untouched(folder)
    assert "<html" in (folder / "run/report.html").read_text() and not (folder / "run/report.html").is_symlink()


def test_a_file_of_samples_that_is_named_after_no_step_is_one_line(folder, rl):
    """`int` does not accept everything that `str.isdigit` does."""
    run_folder(folder)
    (folder / "run/samples").mkdir()
    (folder / "run/samples/batch-\u00b2.parquet").write_bytes(b"")
    assert "not a file of samples" in rl("view", "run")


@pytest.mark.parametrize("name", ["data/dataset_dict.json", "data/state.json"])
@pytest.mark.parametrize(
    "content", ["{", "[]", "[" * 100_000, '{"splits": ["../elsewhere"], "_split": "../elsewhere"}']
)
def test_a_damaged_data_set_is_one_line(folder, rl, name, content):
    (folder / "data").mkdir()
    (folder / name).write_text(content)
    recipe = RECIPE | {"data": {"kind": "datasets", "path": "data"}}
    (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
    assert name in rl("train", "recipe.toml", "--dry-run")


@pytest.mark.parametrize("last", ["../elsewhere", "\u00b2", "9" * 5000])
def test_the_newest_iteration_of_a_megatron_checkpoint_is_in_its_folder(folder, rl, last):
    (folder / "M").mkdir()
    (folder / "M/latest_checkpointed_iteration.txt").write_text(last, encoding="utf-8")
    (folder / "elsewhere/mp_rank_00").mkdir(parents=True)
    (folder / "elsewhere/mp_rank_00/model_optim_rng.pt").write_bytes(b"")
    said = rl("convert", "M", "out")
    assert "elsewhere' is not the name of a file in the folder" in said if "/" in last else "M" in said


@pytest.mark.parametrize("name", [".lock", "logs/trainer-0.log", "evaluations.jsonl"])
def test_a_run_is_not_written_through_a_link(folder, rl, name):
    (folder / "run/logs").mkdir(parents=True)
    (folder / "run" / name).symlink_to(folder / "secret")
    own = "run.dir: cannot write to run: is a link; links are not followed when writing"
    expected = own if name == ".lock" else f"run/{name} is a link, and runs do not write through links"
    assert expected in rl("train", "recipe.toml")
    assert_untouched(folder)


@pytest.mark.parametrize("name", ["logs", "samples", "checkpoints", "final"])
def test_a_run_is_not_written_into_a_folder_behind_a_link(folder, rl, name):
    (folder / "run").mkdir()
    (folder / "elsewhere").mkdir()
    (folder / "run" / name).symlink_to(folder / "elsewhere")
    assert f"run/{name} is a link, and runs do not write through links" in rl("train", "recipe.toml")
    assert not list((folder / "elsewhere").iterdir())


def test_an_index_of_weights_names_no_file_elsewhere(folder, rl):
    (folder / "model/model.safetensors").rename(folder / "w.safetensors")
    index = {"weight_map": {"w": "../w.safetensors"}}
    (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))
    assert "'../w.safetensors' is not the name of a file in the folder" in rl("convert", "model", "out")


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, "\ufeff{}", "\udcff"])
def test_a_damaged_config_of_a_model_is_one_line(folder, rl, content):
    (folder / "model/config.json").write_bytes(content.encode(errors="surrogateescape"))
    said = rl("train", "recipe.toml", "--dry-run")
    assert said.startswith("error: model.path: model/config.json")


ARRAY = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 40)
TENSOR = struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 1 << 30, 1 << 30, 0, 0)
GGUFS = {
    "an array of 2^40 numbers": (0, 1, ARRAY),
    "a string of 2^60 bytes": (0, 1, struct.pack("<Q", 1 << 60)),
    "2^60 fields": (0, 1 << 60, b""),
    "2^60 tensors": (1 << 60, 0, b""),
    "a tensor of 2^60 numbers": (1, 0, TENSOR),
    "a tensor of 2^31 dimensions": (1, 0, struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1 << 31)),
}


@pytest.mark.parametrize("what", GGUFS)
def test_a_gguf_of_a_few_bytes_takes_no_gigabytes(folder, rl, what):
    tensors, fields, rest = GGUFS[what]
    data = (b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + rest).ljust(149, b"\0")
    (folder / "x.gguf").write_bytes(data)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert "x.gguf: cannot read the header: " in rl("convert", "x.gguf", "out")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    assert time.process_time() - began < 20


def field(name, kind, value):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


LLAMA = {"block_count": 2, "context_length": 8, "embedding_length": 8, "feed_forward_length": 8}
NAMED_LLAMA = field(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")
ODD_HEADERS = {
    "an architecture that is a list": (
        [field(b"general.architecture", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 5) + b"llama")],
        "architecture ['llama'] is not supported",
    ),
    "no heads": (
        [NAMED_LLAMA, field(b"llama.attention.head_count", 4, struct.pack("<I", 0))],
        "llama.attention.head_count must be at least 1, got 0",
    ),
    "a frequency that is infinite": (
        [
            NAMED_LLAMA,
            field(b"llama.attention.head_count", 4, struct.pack("<I", 2)),
            field(b"llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", float("inf"))),
        ],
        "llama.attention.layer_norm_rms_epsilon must be finite, got inf",
    ),
}


@pytest.mark.parametrize("what", ODD_HEADERS)
def test_a_gguf_whose_header_has_odd_values_is_one_line(folder, rl, what):
    fields, message = ODD_HEADERS[what]
    sizes = [field(f"llama.{name}".encode(), 4, struct.pack("<I", size)) for name, size in LLAMA.items()]
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields) + len(sizes))
    (folder / "x.gguf").write_bytes(head + b"".join([*fields, *sizes]))
    assert message in rl("convert", "x.gguf", "out")


LATE = "it does not finish within 1 s"
TEMPLATES = {
    "{% for i in range(10**12) %}x{% endfor %}": "Range too big",
    "{{ 'x' * 10**10 }}": "MemoryError",
    "{% set n = namespace(l=[]) %}{% for i in range(70) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}": LATE,
}
QUICKLY = """
from plasmid_cli.main import app
from plasmid_models.tokenization import templates
templates.TIMEOUT_S = 1.0
app()
"""
"""The command, with a time limit for templates of 1 s instead of 20."""


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_endless_chat_template_is_stopped(folder, template):
    """In a separate process with limited memory: the template must not exhaust that either."""
    (folder / "t.jinja").write_text(template)
    arguments = ["train", "recipe.toml", "--dry-run", "model.chat_template=t.jinja"]
    command = ("python -c", QUICKLY) if TEMPLATES[template] == LATE else ("rl",)
    ended = run_rl(*command[1:], *arguments, program=command[0], address_space=8000000 << 10)
    assert ended.returncode == 2, ended.stderr[-2000:]
    assert "the chat template rejects the messages: " in ended.stderr
    assert TEMPLATES[template] in ended.stderr
    assert "Traceback" not in ended.stderr


def parquet(path: Path, *, spoil: bytes | None = None) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    pq.write_table(pa.table({"prompt": ["1"] * 1000, "target": list(range(1000))}), path, compression="zstd")
    if spoil is not None:
        data = bytearray(path.read_bytes())
        data[4:300] = spoil * 296
        path.write_bytes(data)


@pytest.mark.parametrize("spoil", [b"\0", b"\xff", b"Z"])
def test_a_corrupt_parquet_file_is_one_line(folder, rl, spoil):
    parquet(folder / "p.parquet", spoil=spoil)
    said = rl("train", "recipe.toml", "--dry-run", "data.path=p.parquet")
    assert said.startswith("error: p.parquet")


def test_a_parquet_file_whose_columns_have_names_that_are_no_text_is_one_line(folder, rl):
    parquet(folder / "p.parquet")
    (folder / "p.parquet").write_bytes((folder / "p.parquet").read_bytes().replace(b"prompt", b"p\xffompt"))
    said = rl("train", "recipe.toml", "--dry-run", "data.path=p.parquet")
    assert said.startswith("error: p.parquet: not a readable Parquet file: ")


@pytest.mark.parametrize("rows", [b"\xd2\x0f", b"\xce\x0f"])
def test_a_parquet_file_with_a_wrong_row_count_gives_a_one_line_error(folder, rl, rows):
    parquet(folder / "p.parquet")
    data = (folder / "p.parquet").read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    said = b"\x16\xd0\x0f"  # field 3 of the file's metadata: 1000 rows
    (folder / "p.parquet").write_bytes(data[:footer] + data[footer:].replace(said, b"\x16" + rows, 1))
    said = rl("train", "recipe.toml", "--dry-run", "data.path=p.parquet")
    assert said.startswith("error: p.parquet: damaged: its metadata has ") and "row groups have 1000" in said


@pytest.mark.parametrize("content", ["[]", "{", "\x00", '{"a": ' * 5000, "3"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_of_a_model_is_one_line(folder, rl, name, content):
    (folder / "model" / name).write_text(content)
    if name == "config.json":
        said = rl("convert", "model", "out", "from.dtype=bfloat16")
    else:
        said = rl("train", "recipe.toml", "--dry-run")
    assert "model" in said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data["model"]["vocab"].update(x=1 << 31), "tokens, but a token id of "),
        (
            lambda data: data["added_tokens"][0].update({"\x1b]52;c;b3duZWRz\x07": 1}),
            r'has a setting with control characters, "\x1b]52;',
        ),
        (lambda data: data["model"].update(unk_token="missing"), "cannot encode a text: Exception: WordLevel error"),
    ],
    ids=["a table of 2^31 rows", "a setting that commands a terminal", "no token for what is unknown"],
)
def test_a_hostile_tokenizer_is_one_line(folder, change, reason):
    file = folder / "model/tokenizer.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    (folder / "prompts.jsonl").write_text('{"prompt": "\u20ac", "target": 1}\n')
    done = run_rl("sample", "recipe.toml", "-n", "1", "--dry", address_space=4 << 30)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and reason in done.stderr, done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_a_run_whose_tokenizer_is_broken_can_be_viewed(folder):
    """Its samples are shown as text."""
    run = folder / "run"
    (run / "final").mkdir(parents=True)
    write_run(run)
    (run / "final/tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": 2147483648}}}')
    done = run_rl("view", "run")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
