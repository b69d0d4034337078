"""Imports of ranks, for the server that forks them."""

import gc
from contextlib import suppress
from importlib import import_module

from plasmid.plugins.registry import find_components, load_plugins

MODULES = (
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.utils.serialization",
    "transformers.models.llama.modeling_llama",
    "plasmid_training.rank.process",
    "plasmid_training.driver.ranked_trainer",
    "plasmid_fsdp.backend",
    "megatron.core",
    "plasmid_megatron.backend",
)

for name in MODULES:
    with suppress(ImportError):  # not installed
        import_module(name)
find_components(load_plugins())  # packages import their components when these are first used
gc.collect()
gc.freeze()  # ranks collect garbage when they close, which visits every object that is not frozen
