"""Imports of ranks, for the server that forks them."""

import gc
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from plasmid.plugins.registry import find_components, load_plugins
from torch.distributed import distributed_c10d

from tests.plugin_files import NEVER_STARTED, import_plugins_once

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


class SharedDeviceGroup(distributed_c10d.ProcessGroupGloo):
    """A gloo group that uses the same device as all others of its process.

    By default each group has its own, whose thread wakes up 100 times a second for as long as anything refers to the
    group. The many idle groups of Megatron's ranks used 7% of the processor time of a test run.
    """

    _device = None

    def __init__(self, store, rank, size, timeout):
        if SharedDeviceGroup._device is None:
            SharedDeviceGroup._device = distributed_c10d.ProcessGroupGloo.create_default_device()
        options = distributed_c10d.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [SharedDeviceGroup._device]
        super().__init__(store, rank, size, options)


distributed_c10d.ProcessGroupGloo = SharedDeviceGroup
import_plugins_once(setattr)
# packages import their components when these are first used
find_components(load_plugins(files=[Path(NEVER_STARTED)]))
gc.collect()
gc.freeze()  # ranks collect garbage when they close, which visits every object that is not frozen
