"""Settings are checked before anything is loaded."""

import subprocess
import sys

import pytest
from hf_cases import make_config, run, started
from plasmid.config.placement import PlacementConfig
from plasmid.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_block": 24}, "rollout: kv_block must be a multiple of 16, got 24"),
        ({"kv_tokens": 8}, "rollout: kv_tokens must be 'auto' or at least kv_block = 16, got 8"),
        ({"max_batches": 3}, "rollout.max_batches: no such setting; did you mean 'max_batch'?"),
    ],
)
def test_wrong_settings_say_what_is_wrong(tiny_model, settings, message):
    with pytest.raises(ConfigError) as caught:
        make_config(tiny_model, **settings)
    assert str(caught.value) == message


def test_a_fraction_of_the_memory_of_a_gpu_is_refused_on_a_cpu(tiny_model):
    config = make_config(tiny_model, kv_memory_fraction=0.25)
    config.rollout.check(config.view("rollout"))  # placement.device = "auto" may find a GPU
    on_cpu = config.model_copy(update={"placement": PlacementConfig(device="cpu")})
    with pytest.raises(ConfigError) as caught:
        on_cpu.rollout.check(on_cpu.view("rollout"))
    assert str(caught.value) == (
        "rollout.kv_memory_fraction: 0.25 has no effect on a CPU; remove it, or set rollout.kv_tokens to limit the KV "
        "cache"
    )


def test_a_cache_smaller_than_one_request_is_refused(tiny_model):
    async def test():
        async with started(tiny_model, kv_tokens=128):
            pass

    with pytest.raises(
        ConfigError, match=r"rollout\.kv_tokens: the KV cache has room for 128 tokens, but one request may need 256"
    ):
        run(test())


def test_listing_the_plugin_imports_neither_torch_nor_transformers():
    code = "import sys, plasmid_hf.plugin; print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
