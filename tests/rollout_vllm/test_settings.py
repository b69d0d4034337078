"""Settings of vLLM in recipes, checked without vLLM."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from plasmid.components import RecipeView
from plasmid.components.methods import Needs
from plasmid.config.load import resolve
from plasmid.config.placement import PlacementConfig
from plasmid.config.run import ModelConfig
from plasmid.errors import ConfigError
from plasmid.types import SamplingParams
from plasmid_serving.dialect import StartOptions
from plasmid_vllm import dialect
from plasmid_vllm.settings import FIXED, OWN, UNSUPPORTED, VLLM, argument_names
from pydantic import ValidationError

VIEW = RecipeView(
    key="rollout",
    needs=Needs(),
    model=ModelConfig(path="model"),
    needed_models={"model": "model"},
    engine_kind="vllm",
    engine_reads_quantized=False,
    replays_kept_sets=False,
    trainer_kind="fsdp",
    trainer_dtype="auto",
    trains_adapter=False,
    batches=1,
    max_staleness=0,
    deterministic=False,
    placement=PlacementConfig(device="cpu"),
    samplings={"sampling": SamplingParams()},
)


START = StartOptions(host="127.0.0.1", port=1, name="n")


def refused(**settings):
    """Return the text of the error."""
    with pytest.raises(ValidationError) as error:
        VLLM(**settings)
    return str(error.value)


def found(view=VIEW, **settings):
    return list(VLLM(**settings).find_errors(view))


def test_arguments_are_checked_by_name():
    VLLM(server_args={"max_num_seqs": 64, "gpu_memory_utilization": 0.5, "quantization": None, "nnodes": 1})
    assert {*OWN, *FIXED, *UNSUPPORTED} <= set(argument_names())
    text = refused(server_args={"max_num_seq": 64})
    assert "max_num_seq: not an argument of vLLM 0.32; did you mean 'max_num_seqs'?" in text


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ({"dtype": "half"}, "dtype: follows from rollout.dtype; set that instead"),
        ({"worker_cls": "x.Y"}, "worker_cls: is set by Plasmid; remove it"),
        (
            {"quantization": "fp8"},
            "quantization: 'fp8' is not supported: weight syncs send unquantized weights",
        ),
        ({"enable_lora": True}, "enable_lora: True is not supported: servers merge the adapter of trainer.lora"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: 2 is not supported: servers use tensor parallelism"),
        (
            {"logits_processors": ["x"]},
            "logits_processors: ['x'] is not supported: changes the sampling distribution",
        ),
    ],
)
def test_arguments_that_would_silently_go_wrong_are_refused(argument, why):
    assert why in refused(server_args=argument)


def test_settings_unsupported_by_vllm_are_refused():
    assert found() == []
    assert "urls: vLLM servers that the run did not start cannot receive weights" in refused(
        urls=["http://x:1"], read_back_every=0
    )
    in_place = {"pause_mode": "in_place", "recompute_kv": False}
    assert "set server_args.enable_prefix_caching = false" in refused(**in_place)
    assert found(**in_place, server_args={"enable_prefix_caching": False}) == []
    assert VLLM(gpus_per_engine=2).split_error([2]) == ""
    assert VLLM(gpus_per_engine=2).split_error([1, 1]) == "2 machines; a vLLM server runs on one"


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"temperature": 2.5}, "sampling.temperature: must be 0 (greedy) or from 0.01 to 2 with vLLM, got 2.5"),
        ({"temperature": 0.001}, "sampling.temperature: must be 0 (greedy) or from 0.01 to 2 with vLLM, got 0.001"),
        ({"top_p": 0.9}, "sampling.top_k: must be at most 4096 with top_p, top_k or min_p"),
        ({"top_k": 5000}, "sampling.top_k: must be at most 4096 with top_p, top_k or min_p"),
    ],
)
def test_sampling_that_vllm_cannot_report_is_refused(sampling, why):
    (line,) = found(replace(VIEW, samplings={"sampling": SamplingParams(**sampling)}))
    assert line.startswith(why)
    assert found(replace(VIEW, samplings={"sampling": SamplingParams(top_k=50, top_p=0.9)})) == []


def test_temperatures_of_evaluation_sets_are_refused_where_they_are_set(tmp_path):
    recipe = {
        "plugins": [str(Path(__file__).parents[1] / "no_training_plugin.py")],
        "model": {"path": str(tmp_path)},
        "data": {"kind": "files", "path": "unused.jsonl"},
        "trainer": {"kind": "no-trainer"},
        "algorithm": {"kind": "grpo"},
        "rollout": {"kind": "vllm"},
        "rewards": [{"kind": "no-reward"}],
    }

    def lines(general, *others):
        sets = [
            {"name": str(index), "data": {"path": "unused.jsonl"}, "sampling": sampling}
            for index, sampling in enumerate(others)
        ]
        with pytest.raises(ConfigError) as error:
            resolve({**recipe, "sampling": {"temperature": general}, "eval": sets})
        return [line for line in str(error.value).splitlines() if "temperature" in line]

    where = "temperature: must be 0 (greedy) or from 0.01 to 2 with vLLM, got"
    assert lines(1.0, {"temperature": 0.0}, {"temperature": 4}, {"temperature": 3}) == [
        f"eval.1.sampling.{where} 4",
        f"eval.2.sampling.{where} 3",
    ]
    assert lines(2.5, {"max_new_tokens": 3}, {"temperature": 1.0}) == [f"sampling.{where} 2.5"]


def test_servers_run_in_the_environment_of_the_interpreter_that_is_named(monkeypatch, tmp_path):
    assert VLLM().packages() == {"vllm": "plasmid-vllm[server]"}
    assert VLLM(python=sys.executable).packages() == {}
    assert list(VLLM(python=sys.executable).lacks()) == []
    (line,) = VLLM(python="/no/python").lacks()
    assert line.startswith("python: no program '/no/python' on this machine")

    config = SimpleNamespace(
        model=ModelConfig(path=str(tmp_path)),
        eval=(),
        samplings=lambda: {"sampling": SamplingParams(stop=("x",))},
        run=SimpleNamespace(seed=3),
        placement=SimpleNamespace(offload_engine=False),
        trainer=SimpleNamespace(replays_routing=lambda: False),
    )
    context = SimpleNamespace(config=config, on_gpu=False)
    monkeypatch.setattr(dialect, "installed_release", lambda python: "0.32.1" if python else None)
    made = dialect.make_dialect(VLLM(python=".venv-vllm/bin/python", server_args={"max_num_seqs": 8}), context)
    program = made.launch(START)
    assert program.arguments["worker"] == "plasmid_vllm.worker_process.cpu.CpuPolicyWorker"
    assert program.python == str(Path(".venv-vllm/bin/python").absolute())
    engine = program.arguments["engine"]
    assert (engine["dtype"], engine["seed"], engine["max_num_seqs"]) == ("float32", 3, 8)
    for sampling, skips in ({"regex": "a+"}, False), ({"ignore_eos": True}, True):
        set_ = SimpleNamespace(sampling=SamplingParams(**sampling))
        config.eval, config.samplings = (set_,), lambda: {"sampling": SamplingParams()}
        made = dialect.make_dialect(VLLM(python="python"), context)
        assert made.launch(START).arguments["engine"]["skip_tokenizer_init"] == skips
    assert not engine["skip_tokenizer_init"] and engine["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(ConfigError, match=r"rollout\.kind: vLLM is not installed"):
        dialect.make_dialect(VLLM(), context)
    monkeypatch.setattr(dialect, "installed_release", lambda python: "0.31.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.0 is not supported"):
        dialect.make_dialect(VLLM(), context)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_workers_record_experts_only_for_trainers_that_replay_them(on_gpu, monkeypatch, tmp_path):
    replays = SimpleNamespace(replays_routing=lambda: True)
    config = SimpleNamespace(
        model=ModelConfig(path=str(tmp_path)),
        eval=(),
        samplings=lambda: {},
        run=SimpleNamespace(seed=3),
        placement=SimpleNamespace(offload_engine=False),
        trainer=replays,
    )
    monkeypatch.setattr(dialect, "installed_release", lambda python: "0.32.1")
    made = dialect.make_dialect(VLLM(), SimpleNamespace(config=config, on_gpu=on_gpu))
    name = "gpu.GpuRecordingWorker" if on_gpu else "cpu.CpuRecordingWorker"
    assert made.worker == f"plasmid_vllm.worker_process.{name}"
    assert VLLM().gives_experts()
    text = refused(server_args={"enable_return_routed_experts": True})
    assert "enable_return_routed_experts: True is not supported: follows from trainer.routing_replay" in text


def test_an_environment_is_asked_for_its_release():
    assert dialect.installed_release(sys.executable) is None
    with pytest.raises(ConfigError, match=r"rollout\.python: cannot run '/no/python'"):
        dialect.installed_release("/no/python")
