"""Makes Megatron-Core 0.16 compute on the CPU by replacing the CUDA functions that it calls.

Changes torch for the whole process, which should do nothing else. Does nothing if there is a GPU.
"""

from __future__ import annotations

import contextlib
import functools

import torch

CPU = torch.device("cpu")
FACTORIES = ("arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "rand")
MORE_FACTORIES = ("rand_like", "randint", "randn", "randn_like", "tensor", "tril_indices", "zeros", "zeros_like")
CPU_TYPES = ("FloatTensor", "BFloat16Tensor", "HalfTensor")


class Stream:
    """A CUDA stream or event that has always finished."""

    def __init__(self, *args, **kwargs):
        pass

    def record_event(self, *args):
        return Stream()

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0

    def nothing(self, *args, **kwargs):
        pass

    wait_stream = wait_event = synchronize = record = wait = nothing


def activate():
    """Patch torch; a second call does nothing."""
    if torch.cuda.is_available() or getattr(torch.cuda, "answered_by_cpu", False):
        return
    cuda = torch.cuda
    cuda.answered_by_cpu = True
    cuda.current_device = lambda: CPU
    cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.Stream = cuda.Event = Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream()
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    for name in (*FACTORIES, *MORE_FACTORIES):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.type = _typed(torch.Tensor.type)
    torch.distributed.all_to_all_single = _with_sizes(torch.distributed.all_to_all_single)
    _random_states()


def _on_cpu(factory):
    """Return the factory function with ``device="cuda"`` replaced by the CPU, and without pinned memory."""

    @functools.wraps(factory)
    def made(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _typed(original):
    """Patch `Tensor.type` to return CUDA's type names, by which Megatron's optimizers distinguish parameters."""
    names = {f"torch.{name}": f"torch.cuda.{name}" for name in CPU_TYPES}

    def type(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return found if args or kwargs else names.get(found, found)

    return type


def _with_sizes(original):
    """Patch a collective to accept sizes as tensors: Megatron converts them to numbers only when it moves them from a
    GPU to the host."""

    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **options):
        sizes = [s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes)]
        return original(output, input, *sizes, **options)

    return functools.wraps(original)(all_to_all_single)


def _random_states():
    """Replace Megatron's functions for CUDA random states, some of which bypass torch's functions."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
