"""Conversion of Megatron's checkpoint layouts: round trips are bit-identical, and errors name their cause."""

import asyncio
import gc
import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from megatron.core.transformer.moe import experts
from megatron_cases import fit, make_batch
from megatron_families import EVERY, FAMILIES, LINEAR, in_bfloat16_with_a_draft_layer, make_family
from plasmid.errors import ModelError
from plasmid_convert import DCP, HF, compare, convert
from plasmid_megatron.conversion import MegatronTorch, TorchDistFolder, layout
from plasmid_megatron.upstream.imports import VISION, import_without_compiler, skip_docstrings

from tests.lazy_module import LazyModule

megatron_legacy = LazyModule("megatron_legacy")


def assert_same(left, right, reader=None, other=None):
    found = compare(left, right, left_reader=reader or HF(), right_reader=other or HF())
    assert found.differences == ()
    assert found.num_equal > 0


@pytest.fixture
def model(request, tmp_path):
    """Return a random model by its name or that of its family."""
    if request.param in EVERY:
        return make_family(tmp_path / "model", request.param)
    return request.getfixturevalue(request.param)


MODELS = ["tiny_qwen", "tiny_tied", "tiny_moe", *FAMILIES, *LINEAR]
FAST = ("tiny_moe", "DeepSeek-V3")
LONG = [name for name in MODELS if name not in FAST]


@pytest.mark.parametrize(
    "model", [*FAST, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)], indirect=True
)
def test_a_model_goes_there_and_back_without_a_changed_bit(model, tmp_path):
    """Padded to 64 tokens in Megatron's layout and not here, in files of 100 kB; other files of the folder are kept."""
    writer = TorchDistFolder(vocab_multiple=64, max_file_gb=1e-4)
    convert(model, tmp_path / "there", reader=HF(), writer=writer)
    convert(tmp_path / "there", tmp_path / "back", reader=TorchDistFolder(), writer=HF())
    assert_same(model, tmp_path / "back")
    assert len(list((tmp_path / "there").glob("*.distcp"))) > 1
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


def test_the_compiler_and_unused_packages_are_hidden_only_while_megatron_is_imported(monkeypatch):
    for name in ("megatron.core", "wandb", VISION):
        monkeypatch.delitem(sys.modules, name, raising=False)
    compiler = torch.compile
    with import_without_compiler():
        assert torch.compile(sorted, dynamic=True) is sorted
        assert sys.modules["wandb"] is None and sys.modules[VISION].Glm4VLBridgeMoe is None
        assert not gc.isenabled()
    assert torch.compile is compiler and gc.isenabled()
    assert "wandb" not in sys.modules and VISION not in sys.modules
    sys.modules["megatron.core"] = None  # has been imported
    with import_without_compiler():
        assert torch.compile is compiler


def test_conversions_import_megatron_without_the_compiler(tiny_moe, monkeypatch):
    entered = []

    @contextmanager
    def enter():
        entered.append(("plasmid_megatron.conversion.outline" in sys.modules, gc.isenabled()))
        yield

    monkeypatch.delitem(sys.modules, "plasmid_megatron.conversion.outline", raising=False)
    monkeypatch.setattr(layout, "import_without_compiler", enter)
    layout.outline_of(tiny_moe)
    assert entered == [(False, False)]
    assert gc.isenabled()


def test_no_docstring_is_written_only_while_a_config_is_read(monkeypatch):
    module = sys.modules["transformers.utils.auto_docstring"]
    monkeypatch.setattr(module, "auto_class_docstring", lambda cls, **_: "written")
    with skip_docstrings():
        assert module.auto_docstring(Stop) is Stop
    assert module.auto_docstring(Stop) == "written"


@pytest.mark.long
def test_a_conversion_starts_without_the_compiler_and_leaves_it_usable(tiny_moe, tmp_path):
    code = (
        "import sys, torch; from pathlib import Path; compiler = torch.compile;"
        "from plasmid_convert import HF, convert; from plasmid_megatron.conversion import TorchDistFolder;"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), reader=HF(), writer=TorchDistFolder());"
        "names = ('torch._inductor.compile_fx', 'wandb', 'transformers.models.glm4v.modeling_glm4v',"
        "'transformers.modeling_utils', 'transformers.generation.utils', 'scipy');"
        "print([name for name in names if name in sys.modules], torch.compile is compiler);"
        "import mbridge.models.glm4_vl; print(mbridge.models.glm4_vl.__file__ is not None)"
    )
    command = [sys.executable, "-c", code, str(tiny_moe), str(tmp_path / "there")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["[] True", "True"]


PRELOADED = """
import multiprocessing, os, sys
from plasmid_megatron.conversion import MegatronTorch, TorchDistFolder

def report():
    assert "megatron.core" in sys.modules and "torch._inductor.compile_fx" not in sys.modules
    assert len(os.listdir(f"/proc/{os.getppid()}/task")) == 1  # a fork copies no other threads, only their locks

if __name__ == "__main__":
    assert "megatron.core" not in sys.modules and MegatronTorch.preloaded == TorchDistFolder.preloaded
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(TorchDistFolder.preloaded))
    process = context.Process(target=report)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def test_megatron_is_imported_by_the_process_from_which_others_are_forked(tmp_path):
    (tmp_path / "preloaded.py").write_text(PRELOADED)
    done = subprocess.run([sys.executable, tmp_path / "preloaded.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_experts_of_an_outline_are_copies_of_the_first_of_their_layer(tiny_moe, monkeypatch):
    built = []

    class Counted(experts.MLP):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            built.append(self)

    monkeypatch.setattr(experts, "MLP", Counted)
    outline = layout.outline_of(tiny_moe)
    config = outline.architecture.config
    assert len(built) == config.num_layers
    assert experts.MLP is Counted
    tensors = [entry.weight.tensor for entry in outline.entries if ".experts." in entry.name]
    assert len({id(tensor) for tensor in tensors}) == 2 * config.num_layers * config.num_moe_experts
    assert all(tensor.tensor_model_parallel and tensor.device.type == "meta" for tensor in tensors)


class Stop:
    """Progress that interrupts a conversion after it has finished a part."""

    def __init__(self, records, *, waits):
        """With ``waits``, wait at the first tensor until a part is finished: other processes may read all before it."""
        self.records, self.waits, self.kept = records, waits, 0

    def start(self, num_bytes, kept):
        self.kept = kept

    def advance(self, name, num_bytes):
        limit = time.monotonic() + 60
        while self.kept == 0 and self.waits and not any(self.records.glob("part-*")):
            assert time.monotonic() < limit, "no part was finished"
            time.sleep(0.01)
        if self.kept == 0 and any(self.records.glob("part-*")):
            raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_interruption_and_several_processes_change_no_bit(tiny_moe, tmp_path, workers):
    steps = (("there", HF(), TorchDistFolder(max_file_gb=1e-4)), ("back", TorchDistFolder(), HF(max_shard_gb=1e-4)))
    source = tiny_moe
    for name, reader, writer in steps:
        stop = Stop(tmp_path / f".{name}.partial/conversion", waits=workers > 1)
        options = {"reader": reader, "writer": writer}
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / name, **options, workers=workers, progress=stop)
        assert not TorchDistFolder().recognises(tmp_path / f".{name}.partial")
        convert(source, tmp_path / name, **options, workers=workers, progress=stop)
        assert stop.kept > 0
        source = tmp_path / name
    assert_same(tiny_moe, tmp_path / "back")


@pytest.mark.parametrize("model", ["tiny_moe"], indirect=True)
def test_dtypes_are_preserved(model, tmp_path):
    convert(model, tmp_path / "bf16", reader=HF(dtype="bfloat16"), writer=HF())
    convert(tmp_path / "bf16", tmp_path / "there", reader=HF(), writer=TorchDistFolder())
    assert_same(tmp_path / "bf16", tmp_path / "there", other=TorchDistFolder())
    convert(tmp_path / "there", tmp_path / "wide", reader=TorchDistFolder(dtype="float32"), writer=HF())
    assert {tensor.dtype for _, tensor in HF().read(tmp_path / "wide")} == {torch.float32}
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("every_pair", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_writer_takes_what_every_reader_gives(tiny_qwen, tmp_path, every_pair):
    """Not for every pair: readers and writers use the same names and shapes."""
    megatron_legacy.write_legacy(tiny_qwen, tmp_path / "megatron-torch")
    for kind, writer in (("hf", HF()), ("dcp", DCP()), ("torch_dist", TorchDistFolder())):
        convert(tiny_qwen, tmp_path / kind, reader=HF(), writer=writer)
    readers = {"hf": HF(), "dcp": DCP(), "torch_dist": TorchDistFolder(), "megatron-torch": MegatronTorch()}
    kinds = ("hf", "dcp", "torch_dist")
    for number, (name, reader) in enumerate(readers.items()):
        assert [kind for kind, other in readers.items() if other.recognises(tmp_path / name)] == [name]
        for kind in kinds if every_pair else [kinds[(number + 1) % 3]]:
            target = tmp_path / f"{name}-{kind}"
            convert(tmp_path / name, target, reader=reader, writer=readers[kind])
            assert_same(tiny_qwen, target, other=readers[kind])
            assert (target / "tokenizer.json").read_bytes() == (tiny_qwen / "tokenizer.json").read_bytes()


def test_megatron_itself_loads_what_is_written(tiny_moe, tmp_path):
    from megatron.core import dist_checkpointing
    from plasmid_megatron.conversion import outline
    from plasmid_megatron.network.language_model import LanguageModel
    from plasmid_megatron.settings import Megatron
    from plasmid_megatron.weights.bridge import read_architecture
    from plasmid_megatron.weights.shards import to_hf, weights
    from plasmid_models.source import Source

    convert(tiny_moe, tmp_path / "there", reader=HF(), writer=TorchDistFolder(vocab_multiple=8))
    source = Source(where="model", path=tiny_moe, trust_remote_code=False)
    found = {}
    with outline._make_single_rank_groups():
        settings = Megatron(transformer={"use_cpu_initialization": True}, dtype="float32")
        architecture = read_architecture(source, settings)
        architecture.config.moe_token_dispatcher_type = "allgather"
        module = LanguageModel(source, architecture, chunk=None, chunk_size="auto")
        state = dist_checkpointing.load({"model": module.sharded_state_dict()}, str(tmp_path / "there"))
        module.load_state_dict(state["model"])
        for weight in weights([module]):
            found |= dict(to_hf(architecture, weight.full_name(0, 0), weight.tensor.detach()))
    expected = dict(HF().read(tiny_moe))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


async def trained(ranks, folder, layout, model, **options):
    """Train on a batch, then save and export as a run does."""
    trainer, config = await ranks.start(num_ranks=layout[0], trainer={"lr": 1e-2} | layout[1], model=model, **options)
    await fit(trainer, config, make_batch())
    await trainer.save(folder / "batch-000001/trainer")
    await trainer.export(folder / "exported")
    state = {"config": {"model": {"path": str(model), "tokenizer": "auto"}}}
    (folder / "batch-000001/state.json").write_text(json.dumps(state))


LAYOUTS = {
    "tp2": (2, {"tensor_parallel": 2}, "tiny_qwen"),
    "pp2 interleaved": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}, "tiny_qwen"),
    "tied pp2": (2, {"pipeline_parallel": 2}, "tiny_tied"),
    "ep2": (2, {"expert_parallel": 2}, "tiny_moe"),
}


@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(name, marks=pytest.mark.long) for name in list(LAYOUTS)[1:])])
def test_the_checkpoint_of_a_run_becomes_what_the_run_exports(layout, ranks, request, tmp_path):
    num_ranks, settings, name = LAYOUTS[layout]
    asyncio.run(trained(ranks, tmp_path, (num_ranks, settings), request.getfixturevalue(name)))
    checkpoint = tmp_path / "batch-000001"
    assert TorchDistFolder().recognises(checkpoint) and not DCP().recognises(checkpoint)
    convert(checkpoint, tmp_path / "out", reader=TorchDistFolder(), writer=HF())
    assert_same(tmp_path / "exported", tmp_path / "out")
    convert(checkpoint, tmp_path / "dcp", reader=TorchDistFolder(), writer=DCP())
    assert_same(tmp_path / "exported", tmp_path / "dcp", other=DCP())


@pytest.mark.long
def test_untrained_weights_are_taken_from_the_model_folder(ranks, tmp_path):
    """Layers that predict further tokens are not in checkpoints; expert corrections stay in float32."""
    model = in_bfloat16_with_a_draft_layer(make_family(tmp_path / "model", "GLM-4.5"))
    asyncio.run(trained(ranks, tmp_path, (1, {}), model))
    convert(tmp_path / "batch-000001", tmp_path / "out", reader=TorchDistFolder(), writer=HF())
    assert_same(tmp_path / "exported", tmp_path / "out")
    assert "model.layers.2.enorm.weight" in dict(HF().read(tmp_path / "out"))


@pytest.mark.long
def test_a_critic_beside_the_policy_is_no_obstacle(ranks, tiny_qwen, tmp_path):
    asyncio.run(trained(ranks, tmp_path, (1, {}), tiny_qwen, algorithm={"kind": "ppo"}))
    assert_same(tmp_path / "exported", tmp_path / "batch-000001", other=TorchDistFolder())


START = {
    "tp2": (2, {"tensor_parallel": 2}, "tiny_qwen"),
    "pp2 interleaved": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}, "tiny_qwen"),
    "tied pp2": (2, {"pipeline_parallel": 2}, "tiny_tied"),
    "ep2": (2, {"expert_parallel": 2}, "tiny_moe"),
}


@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(name, marks=pytest.mark.long) for name in list(START)[1:])])
def test_a_trainer_starts_from_the_distributed_format_without_conversion(layout, ranks, request, tmp_path):
    """For policy and reference; the vocabulary is padded differently than in the trainer."""
    num_ranks, settings, name = START[layout]
    model = request.getfixturevalue(name)
    there = tmp_path / "there"
    convert(model, there, reader=HF(), writer=TorchDistFolder(vocab_multiple=64))

    async def run(folder, policy, reference):
        trainer, config = await ranks.start(
            num_ranks=num_ranks,
            trainer={"lr": 1e-2} | settings,
            model=policy,
            algorithm={"kind": "grpo", "kl_coef": 0.1},
            reference=reference,
        )
        await trainer.export(tmp_path / folder)
        return await fit(trainer, config, make_batch())

    assert asyncio.run(run("torch_dist", there, model)) == asyncio.run(run("hf", model, there))
    assert_same(model, tmp_path / "torch_dist")
    assert not (tmp_path / "torch_dist/metadata.json").exists()


@pytest.mark.long
def test_a_critic_can_start_from_the_distributed_format(ranks, tiny_qwen, tmp_path):
    convert(tiny_qwen, tmp_path / "there", reader=HF(), writer=TorchDistFolder())

    async def run(critic):
        options = {"algorithm": {"kind": "ppo"}, "critic": {"path": str(critic)}}
        trainer, config = await ranks.start(trainer={"critic": {"head_std": 0.1}}, **options)
        return await fit(trainer, config, make_batch())

    assert asyncio.run(run(tmp_path / "there")) == asyncio.run(run(tiny_qwen))


def test_unsupported_checkpoint_layouts_are_refused_before_start(ranks, tiny_qwen, tiny_moe, tmp_path):
    convert(tiny_qwen, tmp_path / "there", reader=HF(), writer=TorchDistFolder())
    with pytest.raises(ModelError, match=r"^model\.path: \S+ has Megatron's distributed format, which only trainer"):
        asyncio.run(ranks.start(model=tmp_path / "there", trainer={"kind": "fsdp"}))
    change_config(tmp_path / "there", intermediate_size=96)
    with pytest.raises(ModelError, match=r"^model\.path: the weights in \S+ do not fit its model: it has different "):
        asyncio.run(ranks.start(model=tmp_path / "there"))


OLD = {
    "one": ("tiny_qwen", {}),
    "tp2": ("tiny_qwen", {"tensor": 2, "padded": 64}),
    "pp2": ("tiny_qwen", {"pipeline": 2}),
    "tp2 pp2 interleaved": ("tiny_qwen", {"tensor": 2, "pipeline": 2, "chunks": 2, "padded": 64}),
    "tied": ("tiny_tied", {"tensor": 2, "padded": 58}),
    "experts": ("tiny_moe", {"expert": 2, "tensor": 2, "padded": 58}),
    "transformer engine": ("tiny_moe", {"expert": 2, "engine": True}),
    "dense engine": ("tiny_qwen", {"tensor": 2, "padded": 64, "engine": True}),
}


@pytest.mark.parametrize("case", OLD)
def test_the_older_format_is_read_in_every_layout(case, request, tmp_path):
    name, layout = OLD[case]
    model = request.getfixturevalue(name)
    megatron_legacy.write_legacy(model, tmp_path / "old", **layout)
    convert(tmp_path / "old", tmp_path / "out", reader=MegatronTorch(), writer=HF())
    assert_same(model, tmp_path / "out")


def test_the_size_of_the_vocabulary_can_be_set(tiny_qwen, tmp_path):
    convert(tiny_qwen, tmp_path / "there", reader=HF(), writer=TorchDistFolder(vocab_multiple=64))
    convert(tmp_path / "there", tmp_path / "back", reader=TorchDistFolder(vocab_size=60), writer=HF())
    before, after = dict(HF().read(tiny_qwen)), dict(HF().read(tmp_path / "back"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert len(before[name]) == 57 and len(after[name]) == 60
        assert torch.equal(after[name][:57], before[name]) and not after[name][57:].any()
    assert json.loads((tmp_path / "back/config.json").read_text())["vocab_size"] == 60
    with pytest.raises(ModelError, match=r"it has 64 vocabulary rows in \S+, at least 65 are required$"):
        list(TorchDistFolder(vocab_size=65).read(tmp_path / "there"))


@pytest.fixture(scope="module")
def converted_qwen(tiny_qwen, tmp_path_factory):
    """The model in Megatron's distributed format. Tests change copies of it."""
    folder = tmp_path_factory.mktemp("converted") / "qwen"
    convert(tiny_qwen, folder, reader=HF(), writer=TorchDistFolder())
    return folder


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 96}, r"it has different shapes: \S*mlp.linear_fc1.weight \[4, 256, 64\] instead of \["),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            r"it has different shapes: \S+ \[4, .*\] instead of \[3, ",
        ),
        ({"num_hidden_layers": 3}, r"transformers cannot read its config: .*`num_hidden_layers` \(3\) must be equal"),
        ({"tie_word_embeddings": True}, r"it has unknown output_layer\.weight$"),
        ({"vocab_size": 99}, r"it has 57 vocabulary rows in embedding\S+, at least 99 are required$"),
        ({"model_type": "gpt2"}, r"model type 'gpt2' of \S+ is not supported by trainer 'megatron'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_error_for_a_checkpoint_of_another_model_names_the_difference(converted_qwen, tmp_path, changes, message):
    shutil.copytree(converted_qwen, tmp_path / "there")
    change_config(tmp_path / "there", **changes)
    with pytest.raises(ModelError, match=message) as error:
        convert(tmp_path / "there", tmp_path / "out", reader=TorchDistFolder(), writer=HF())
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("*out*"))


def test_the_error_for_a_missing_weight_names_the_weight(tiny_tied, tmp_path):
    convert(tiny_tied, tmp_path / "there", reader=HF(), writer=TorchDistFolder())
    change_config(tmp_path / "there", tie_word_embeddings=False)
    with pytest.raises(
        ModelError, match=r"the weights do not fit the model in \S+there: it lacks output_layer\.weight$"
    ):
        list(TorchDistFolder().read(tmp_path / "there"))


def without(path, name):
    tensors = {key: tensor for key, tensor in HF().read(path) if key != name}
    from safetensors.torch import save_file

    save_file(tensors, path / "model.safetensors")


def test_missing_and_additional_tensors_of_a_source_are_named(tiny_qwen, tmp_path):
    shutil.copytree(tiny_qwen, tmp_path / "bad")
    without(tmp_path / "bad", "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"do not fit the model: the source lacks model\.layers\.2\.mlp\.up_proj\.w"):
        convert(tmp_path / "bad", tmp_path / "out", reader=HF(), writer=TorchDistFolder())
    change_config(tmp_path / "bad", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with pytest.raises(ModelError, match=r"the source has unknown model\.layers\.2\S+, .* and \d+ more$"):
        convert(tmp_path / "bad", tmp_path / "out", reader=HF(), writer=TorchDistFolder())
    rest = ("model.layers.2.", "model.layers.3.")
    convert(tmp_path / "bad", tmp_path / "out", reader=HF(), writer=TorchDistFolder(leave_out=rest))
    assert len(list(TorchDistFolder().read(tmp_path / "out"))) == 2 * 11 + 3


def test_the_error_for_a_model_that_cannot_be_written_names_alternatives(tiny_qwen, tmp_path):
    with pytest.raises(ModelError, match=r"^layout megatron-torch can only be read; write torch_dist"):
        convert(tiny_qwen, tmp_path / "out", reader=HF(), writer=MegatronTorch())
    (tmp_path / "bare").mkdir()
    shutil.copyfile(tiny_qwen / "model.safetensors", tmp_path / "bare/model.safetensors")
    with pytest.raises(ModelError, match=r"^the source has no config\.json, which layout torch_dist needs"):
        convert(tmp_path / "bare", tmp_path / "out", reader=HF(), writer=TorchDistFolder())
    with pytest.raises(ModelError, match=r"bare: contains no checkpoint of layout torch_dist$"):
        convert(tmp_path / "bare", tmp_path / "out", reader=TorchDistFolder(), writer=HF())
    assert not list(tmp_path.glob("*out*"))


def test_a_disk_that_takes_no_more_leaves_nothing(tiny_qwen, tmp_path, full_disk):
    full_disk(100_000)
    with pytest.raises(ModelError) as error:
        convert(tiny_qwen, tmp_path / "out", reader=HF(), writer=TorchDistFolder())
    assert str(error.value) == f"{tmp_path}/out: cannot write: file too large; the partial output was removed"
    assert list(tmp_path.iterdir()) == []


class Evil:
    def __reduce__(self):
        return print, ("TRICKED",)


def spoil_rank(folder):
    shutil.rmtree(folder / "iter_0000007/mp_rank_00")


def spoil_cut(folder):
    file = folder / "iter_0000007/mp_rank_01/model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-1000])


def spoil_class(folder):
    torch.save({"model": {}, "args": Evil()}, folder / "iter_0000007/mp_rank_01/model_optim_rng.pt")


def spoil_age(folder):
    torch.save({"model": {"language_model": {}}}, folder / "iter_0000007/mp_rank_01/model_optim_rng.pt")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_rank, r"iter_0000007: the file of rank 0 \(tensor\), 0 \(pipeline\), 0 \(expert\) is missing$"),
        (spoil_cut, r"mp_rank_01/model_optim_rng\.pt: cannot be read: .*; the file is truncated, corrupt or too old$"),
        (
            spoil_class,
            r"mp_rank_01/model_optim_rng\.pt: contains a pickled \S*print, which could execute",
        ),
        (spoil_age, r"it is older than Megatron-Core \('language_model'\); convert it with Megatron$"),
    ],
)
def test_damage_to_a_checkpoint_of_the_older_format_is_named(tiny_qwen, tmp_path, capsys, spoil, message):
    megatron_legacy.write_legacy(tiny_qwen, tmp_path / "old", tensor=2, padded=64)
    spoil(tmp_path / "old")
    with pytest.raises(ModelError) as error:
        convert(tmp_path / "old", tmp_path / "out", reader=MegatronTorch(), writer=HF())
    assert re.search(message, str(error.value))
    assert "\n" not in str(error.value)
    assert "TRICKED" not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]
