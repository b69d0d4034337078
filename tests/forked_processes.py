"""Processes that are forked by a server which has imported what ranks need: importing it in each takes seconds."""

import multiprocessing

IMPORTED = (
    "torch.distributed.fsdp",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "plasmid_training.rank.process",
    "plasmid_fsdp.backend",
    "megatron.core",
    "plasmid_megatron.backend",
)
"""What is not installed is left out."""


def forked_processes():
    """A context of `multiprocessing`. Its processes share no state with this one, as if they were spawned."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context
