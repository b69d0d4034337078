"""Settings of SGLang in recipes, checked without starting or importing it."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from plasmid.config.load import resolve
from plasmid.config.placement import PlacementConfig
from plasmid.errors import ConfigError
from plasmid_serving.planner import choose_transport
from plasmid_sglang import launch
from plasmid_sglang.dialect import BALANCE_CHECK, make_dialect, server_arguments
from plasmid_sglang.launch import skip_other_models, text_arguments
from plasmid_sglang.schema import NEWEST, SHIPPED, argument_errors, extract, installed_version, schema_of
from plasmid_sglang.settings import FIXED, OWN
from sgl_cases import make_context

RELEASES = ["0.5.17", "0.5.23"]


def context(tmp_path, **settings):
    return make_context(tmp_path, tmp_path, **settings)


def refused(tmp_path, **settings):
    """Return the lines of the error."""
    with pytest.raises(ConfigError) as error:
        context(tmp_path, **settings)
    return str(error.value).splitlines()


@pytest.mark.parametrize("release", RELEASES)
def test_arguments_are_checked_by_name_type_and_choice(release):
    def found(**table):
        return list(argument_errors("sglang", table, release=release))

    assert found(mem_fraction_static=0.5, tp_size=2, disable_radix_cache=True, attention_backend="triton") == []
    assert found(mem_fraction_statc=0.5) == [
        f"mem_fraction_statc: not an argument of SGLang {release}; did you mean 'mem_fraction_static'?"
    ]
    assert found(tp_size="two") == ["tp_size: must be an integer, got 'two'"]
    assert found(tp_size=True) == ["tp_size: must be an integer, got True"]
    assert found(disable_radix_cache=1) == ["disable_radix_cache: must be true or false, got 1"]
    (line,) = found(attention_backend="tritn")
    assert line.startswith("attention_backend: must be one of ") and line.endswith(", got 'tritn'")


def test_names_of_one_release_are_unknown_to_another():
    new = schema_of("sglang", "0.5.23").keys() - schema_of("sglang", "0.5.17").keys()
    assert "enable_megamoe_for_layernorm_sp" in new
    assert list(argument_errors("sglang", {"enable_megamoe_for_layernorm_sp": True}, release="0.5.23")) == []
    assert list(argument_errors("sglang", {"enable_megamoe_for_layernorm_sp": True}, release="0.5.17")) != []


def test_server_groups_have_separate_arguments(tmp_path):
    groups = [
        {"engines": 1, "server_args": {"max_running_requests": 8}},
        {"engines": 2, "server_args": {"max_running_requests": 64, "max_total_tokens": 512}},
    ]
    built = context(tmp_path, ranks=3, groups=groups)
    rollout = built.config.rollout
    found = [server_arguments(rollout.of_server(i), built.config, on_gpu=False) for i in range(3)]
    assert [arguments["max_running_requests"] for arguments in found] == [8, 64, 64]
    assert [arguments["max_total_tokens"] for arguments in found] == [4096, 512, 512]
    assert refused(tmp_path, ranks=2, groups=groups) == [
        "rollout.groups: must have 2 servers in total (placement.engine_ranks = 2 divided by "
        "rollout.gpus_per_engine = 1), got 3"
    ]
    (line,) = refused(tmp_path, groups=[{"engines": 1, "server_args": {"max_running_requsts": 8}}])
    assert line.startswith("rollout: groups.0.server_args: max_running_requsts: not an argument of SGLang")
    fast = [{"engines": 1, "server_args": {"disable_radix_cache": False}}]
    cached = {"pause_mode": "in_place", "recompute_kv": False, "server_args": {"disable_radix_cache": True}}
    (line,) = refused(tmp_path, groups=fast, **cached)
    assert line.startswith("rollout: groups.0.recompute_kv: false would reuse KV entries")


def test_the_router_has_separate_arguments(tmp_path):
    context(tmp_path, router=True, router_args={"policy": "round_robin", "retry_max_retries": 2})
    assert refused(tmp_path, router=True, router_args={"polcy": "random"}) == [
        "rollout.router_args: polcy: not an argument of the SGLang router 0.3.2; did you mean 'policy'?"
    ]
    assert refused(tmp_path, router_args={"policy": "random"}) == [
        "rollout: router_args: has no effect without a router; remove the table or set router = true"
    ]


def test_every_mistake_in_the_arguments_is_reported(tmp_path):
    lines = refused(tmp_path, server_args={"dtype": "half", "port": 80, "max_running_request": 3})
    assert lines == [
        "rollout.server_args: dtype: follows from rollout.dtype; set that instead",
        "rollout.server_args: port: is set by Plasmid; remove it",
        f"rollout.server_args: max_running_request: not an argument of SGLang {installed_version('sglang')}; "
        "did you mean 'max_running_requests'?",
    ]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"pause_mode": "in_place", "recompute_kv": False},
            "rollout: recompute_kv: false would reuse KV entries computed by an older policy; "
            "set server_args.disable_radix_cache = true",
        ),
        ({"recompute_kv": False}, 'rollout: recompute_kv: has no effect without pause_mode = "in_place"; remove it'),
        (
            {"ranks": 3, "gpus_per_engine": 2},
            "placement.engine_ranks: must be a multiple of rollout.gpus_per_engine = 2, got 3",
        ),
        ({"min_engines": 2}, "rollout.min_engines: 2 is more than the number of engines, 1"),
        (
            {"wire": "ipc"},
            'rollout.wire: "ipc" requires placement.colocated = true; set it or choose another wire',
        ),
        (
            {"server_args": {"rl_on_policy_target": "fsdp"}},
            "rollout.server_args: rl_on_policy_target: follows from rollout.true_on_policy; set that instead",
        ),
        ({"deterministic": True}, "rollout.deterministic: requires GPUs for SGLang's deterministic kernels; remove it"),
        (
            {"urls": ["http://a:1"], "server_args": None, "wire": "http", "read_back_every": 0},
            'rollout: wire: must be "disk" with urls, got \'http\'; set "disk" or remove it',
        ),
        (
            {"urls": ["http://a:1"], "server_args": None},
            "rollout: read_back_every: must be 0 with urls, because parameters of these servers cannot be read",
        ),
        (
            {"urls": ["http://a:1"], "server_args": None, "read_back_every": 0, "adapter_sync": "adapter"},
            'rollout: adapter_sync: must be "merged" with urls, whose servers load complete models; remove it',
        ),
        (
            {"adapter_sync": "merged"},
            "rollout.adapter_sync: 'merged' has no effect without an adapter (trainer.lora); remove it",
        ),
    ],
)
def test_incompatible_settings_are_refused(tmp_path, settings, line):
    assert refused(tmp_path, **settings) == [line]


@pytest.mark.parametrize("release", RELEASES)
def test_arguments_set_by_the_engine_exist_in_every_supported_release(tmp_path, release):
    settings = context(tmp_path)
    config = settings.config
    names = {*server_arguments(config.rollout, config, on_gpu=False), *OWN, *FIXED, "enable_memory_saver"}
    unknown = names - schema_of("sglang", release).keys()
    # the older release only knows the CUDA graphs of each phase by their new names
    assert unknown <= {"disable_cuda_graph"}


@pytest.mark.parametrize(("model_type", "expected"), [("gemma3", {"enable_multimodal": False}), ("qwen3", {})])
def test_servers_of_folders_with_a_vision_model_take_only_texts(tmp_path, model_type, expected):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert text_arguments({"model_path": str(tmp_path)}) == expected


def test_a_tokenizer_is_loaded_only_where_texts_stop_a_sample(tmp_path):
    with_stop, without = context(tmp_path), context(tmp_path, stop=())
    assert server_arguments(with_stop.config.rollout, with_stop.config, on_gpu=False)["skip_tokenizer_init"] is False
    assert server_arguments(without.config.rollout, without.config, on_gpu=False)["skip_tokenizer_init"] is True


def test_a_broadcast_is_the_way_between_gpus(tmp_path):
    config = context(tmp_path).config
    assert choose_transport(config.rollout, config, on_gpu=True) == "broadcast"
    assert choose_transport(config.rollout, config, on_gpu=False) == "disk"


@pytest.mark.parametrize("sleeps", [True, False])
def test_servers_that_release_their_weights_get_merged_ones(tmp_path, sleeps):
    placement = PlacementConfig(device="cuda", colocated=True, offload_engine=sleeps)

    def found(**settings):
        config = context(tmp_path, trainer="adapter-trainer", **settings).config
        config = config.model_copy(update={"placement": placement})
        return config.rollout.choose_sent_adapter(config, on_gpu=True)

    assert (found() is None) == sleeps
    assert found(adapter_sync="merged") is None
    errors = list(
        context(tmp_path, adapter_sync="adapter", trainer="adapter-trainer").config.rollout._placement_errors(placement)
    )
    assert [line for line in errors if "adapter_sync" in line] == (
        [
            'rollout.adapter_sync: "adapter" requires servers that keep their weights; set '
            "placement.offload_engine = false, or remove it"
        ]
        if sleeps
        else []
    )


def test_validation_imports_neither_sglang_nor_torch():
    code = (
        "import sys\n"
        "from plasmid.config.load import load_config\n"
        "load_config('recipes/smollm2-sums-sglang-cpu.toml', ['rollout.server_args.mem_fraction_static=0.5'])\n"
        "print(sorted({'torch', 'sglang', 'ray'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_router_starts_without_importing_sglang():
    code = (
        "import sys; from unittest.mock import patch; from plasmid_sglang.launch import route\n"
        "with patch('sglang_router.router.Router.from_args') as built: route({'port': 1})\n"
        "print(built.return_value.start.called, 'torch' in sys.modules, 'sglang.srt' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]


@pytest.mark.parametrize("product", ["sglang", "sglang-router"])
def test_shipped_schemas_are_of_the_newest_release(product):
    assert (SHIPPED / f"{product}-{NEWEST[product]}.json").is_file()
    if find_spec(product.replace("-", "_")) is not None:
        assert installed_version(product) == NEWEST[product]


@pytest.mark.long
@pytest.mark.parametrize("product", ["sglang", "sglang-router"])
def test_shipped_schemas_match_the_release(sglang, product):
    shipped = json.loads((SHIPPED / f"{product}-{NEWEST[product]}.json").read_text())
    assert json.loads(extract(product)) == shipped


def test_restricted_sampling_needs_a_top_k_that_sglang_can_tell_the_set_of(tmp_path, monkeypatch):
    def recipe(server_args=None, **sampling):
        plain = context(tmp_path, server_args=server_args).config.model_dump()
        return resolve(plain | {"sampling": sampling})

    assert recipe(top_p=0.9, top_k=50).rollout.gives_kept_sets()
    for sampling, limit, got in (({"top_p": 0.9}, 4096, "'all'"), ({"top_k": 5000}, 4096, "5000")):
        with pytest.raises(ConfigError) as error:
            recipe(**sampling)
        assert str(error.value) == (
            f"sampling.top_k: must be at most {limit} with top_p, top_k or min_p, got {got}: SGLang returns kept "
            f"sets up to this size; lower it, or raise rollout.server_args.sampling_mask_max_tokens"
        )
    recipe({"sampling_mask_max_tokens": 6000}, top_k=5000)
    recipe(temperature=1.2)
    monkeypatch.setattr("plasmid_sglang.schema.installed_version", lambda product: "0.5.17")
    assert not recipe(top_p=0.9).rollout.gives_kept_sets()


def test_external_servers_return_no_kept_sets(tmp_path):
    found = context(tmp_path, urls=["http://somewhere:1"], server_args=None, read_back_every=0).config.rollout
    assert not found.gives_kept_sets()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode: 'prefill' is not supported"),
        ({"quantization": "fp8"}, "quantization: 'fp8' is not supported: weight syncs send unquantized"),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts: True is not supported"),
        ({"enable_lora": True}, "enable_lora: True is not supported: servers merge the adapter of"),
        (
            {"tokenizer_worker_num": 2},
            "tokenizer_worker_num: must be 1, got 2: with more, SGLang does not check the",
        ),
        (
            {"smg_grpc_mode": True},
            "smg_grpc_mode: True is not supported: SGLang's gRPC server does not check the API",
        ),
        ({"grpc_port": 5000}, "grpc_port: 5000 is not supported: SGLang's gRPC server does not check the API"),
        ({"speculative_algorithm": "EAGLE"}, "weight syncs do not update the draft model; choose 'NGRAM' or remove it"),
    ],
)
def test_arguments_that_would_silently_go_wrong_are_refused(tmp_path, arguments, said):
    (line,) = refused(tmp_path, server_args=arguments)
    assert line.startswith("rollout.server_args") and said in line


def test_their_off_values_are_allowed(tmp_path):
    off = {"disaggregation_mode": "null", "enable_return_routed_experts": False, "enable_lora": False}
    context(tmp_path, server_args=off | {"speculative_algorithm": "NGRAM", "tokenizer_worker_num": 1})


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_algorithm": "EAGLE"},
        {"model_impl": "transformers"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"architectures": ["MistralForCausalLM"]}'},
    ],
    ids=str,
)
def test_a_server_imports_only_the_module_of_its_model(arguments, tiny_model, monkeypatch):
    def skipped(**chosen):
        monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "")  # so that it is restored
        monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS")
        skip_other_models({"model_path": str(tiny_model), **chosen})
        return os.environ.get("SGLANG_DISABLED_MODEL_ARCHS", "").split(",")

    names = skipped()
    assert "mixtral" in names and len(names) > 100
    assert json.loads((tiny_model / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert "llama" not in names
    assert skipped(**arguments) == [""]


@pytest.mark.parametrize("name", ["LlamaModel", "NoSuchForCausalLM"])
def test_a_server_imports_all_models_if_none_offers_the_class(name, tmp_path, monkeypatch):
    """`LlamaModel` is a class of a module that offers others."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "")  # so that it is restored
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS")
    skip_other_models({"model_path": str(tmp_path)})
    assert "SGLANG_DISABLED_MODEL_ARCHS" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "schedulers", "detokenizers"),
    [
        ({}, 1, 1),
        ({"device": "cpu", "tp_size": 2}, 2, 1),
        ({"device": "cpu", "threads": "2"}, 1, 1),
        ({"tp_size": 4, "pp_size": 2}, 8, 1),
        ({"tp_size": 16, "nnodes": 2}, 8, 1),
        ({"tp_size": 16, "nnodes": 2, "node_rank": 1}, 8, 0),
        ({"tp_size": 2, "dp_size": 2}, 0, 0),
    ],
    ids=str,
)
def test_processes_of_a_server_start_before_its_imports(arguments, schedulers, detokenizers, monkeypatch):
    """Schedulers get their arguments, or start, once the trainer on the same GPUs has loaded its model."""
    started, imported, waits, forks = [], {}, [], set()

    def start_early(*targets, imports=(), before_task=None, fork, **_):
        started.extend(targets)
        forks.add(fork)
        imported.update(dict.fromkeys(targets, imports))
        if launch.SCHEDULER in targets:
            before_task()

    monkeypatch.setattr(launch, "wait_until_allowed", lambda: waits.append(True))
    monkeypatch.setattr(launch, "start_early", start_early)
    threads = arguments.get("threads", "1")
    monkeypatch.setattr(os, "environ", {**os.environ, "OMP_NUM_THREADS": threads})
    launch.start_processes_early(arguments)
    assert started == [launch.SCHEDULER] * schedulers + [launch.DETOKENIZER] * detokenizers
    assert imported.get(launch.SCHEDULER, launch.SCHEDULER_IMPORTS) == launch.SCHEDULER_IMPORTS
    assert not imported.get(launch.DETOKENIZER)
    assert waits == [True]
    assert forks <= {arguments.get("device") == "cpu" and threads == "1"}


def test_modules_that_schedulers_import_early_exist():
    folder = Path(find_spec("sglang").origin).parent
    for name in (*launch.SCHEDULER_IMPORTS[1:], launch.SCHEDULER.partition(":")[0]):
        assert folder.joinpath(*name.split(".")[1:]).with_suffix(".py").is_file(), name


def test_schedulers_start_without_the_import_of_megatron():
    with mock.patch.dict(sys.modules):
        for name in (launch.SCHEDULER_IMPORTS[0], "megatron"):
            sys.modules.pop(name, None)
        if find_spec("megatron") is None:
            pytest.skip("Megatron is not installed")
        import_module(launch.SCHEDULER_IMPORTS[0])
        assert find_spec("megatron") is None


def test_schedulers_start_with_the_library_of_the_memory_saver(monkeypatch):
    @contextlib.contextmanager
    def configure_subprocess():
        with mock.patch.dict(os.environ, LD_PRELOAD="saver.so"):
            yield

    started = {}
    saver = SimpleNamespace(configure_subprocess=configure_subprocess)
    monkeypatch.setitem(sys.modules, "torch_memory_saver", saver)
    monkeypatch.setattr(launch, "start_early", lambda one, **_: started.update({one: os.environ.get("LD_PRELOAD")}))
    monkeypatch.setenv("LD_PRELOAD", "")
    with mock.patch.dict(os.environ):
        launch.start_processes_early({"enable_memory_saver": True})
    assert started == {launch.SCHEDULER: "saver.so", launch.DETOKENIZER: ""}


@pytest.mark.parametrize(("own", "expected"), [(None, "false"), ("true", "true")])
def test_servers_on_the_trainers_gpus_accept_unequal_free_memory(own, expected, tmp_path, monkeypatch):
    """The trainer's ranks need different amounts. A variable that the user has set stays as it is."""
    monkeypatch.delenv(BALANCE_CHECK, raising=False)
    if own is not None:
        monkeypatch.setenv(BALANCE_CHECK, own)
    context = make_context(tmp_path, tmp_path)
    assert BALANCE_CHECK not in make_dialect(context.config.rollout, context).environment
    colocated = make_dialect(context.config.rollout, replace(context, before_loading=asyncio.Event().wait))
    assert colocated.environment[BALANCE_CHECK] == expected


def test_sglang_reads_the_variable_of_the_memory_check():
    text = (Path(find_spec("sglang").origin).parent / "srt" / "distributed" / "bootstrap.py").read_text()
    assert f"if envs.{BALANCE_CHECK}.get():" in text
