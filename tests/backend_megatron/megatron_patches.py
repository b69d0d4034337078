"""Functions that tests run in the process of a rank before it is built, to patch or inspect it."""

import functools

import torch

COUNTS = {"fused": 0, "tokens": 0}
REDUCED = []
PLAIN = {"compile": torch.compile}


def capture_graphs(whole):
    """Make `torch.compile` capture graphs without compiling them; with ``whole`` a graph break raises."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile = functools.partial(PLAIN["compile"], backend="aot_eager", fullgraph=whole)


def compile_nothing():
    """Make `torch.compile` return the function unchanged."""
    torch.compile = lambda function, **options: function


def compile_graphs():
    """Undo `capture_graphs`."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile = PLAIN["compile"]


def fuse_losses(on):
    """Compute the loss together with the logits or after them, and count the microbatches with a fused loss from 0."""
    from plasmid_megatron.device import prepare_cpu

    prepare_cpu()
    from plasmid_megatron.network import language_model
    from plasmid_megatron.network.network import Network

    plain = PLAIN.setdefault("loss", language_model.linear_token_loss)

    def counting(*arguments, **options):
        COUNTS["fused"] += 1
        return plain(*arguments, **options)

    COUNTS["fused"] = 0
    language_model.linear_token_loss, Network.fuses_loss = counting, on


def count_fused():
    """Return the count of `fuse_losses`."""
    return COUNTS["fused"]


def count_tokens():
    """Start counting the tokens of packed rows at 0; return the previous count."""
    from plasmid_megatron.device import prepare_cpu

    prepare_cpu()
    from plasmid_megatron.network import network

    plain, before = PLAIN.setdefault("pack", network.pack), COUNTS["tokens"]

    def counting(*arguments, **options):
        packed = plain(*arguments, **options)
        COUNTS["tokens"] += packed.input_ids.numel()
        return packed

    COUNTS["tokens"], network.pack = 0, counting
    return before


def use_small_buckets(size):
    """Start counting bucket reductions with buckets of ``size`` parameters; None for the default size."""
    from plasmid_megatron.device import prepare_cpu

    prepare_cpu()
    from plasmid_megatron import optimizer

    plain = PLAIN.setdefault("finalize", optimizer.finalize_model_grads)

    def counting(chunks, *arguments, **options):
        groups = [g for chunk in chunks for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
        REDUCED.append((len(groups), sum(group.grad_reduce_handle is not None for group in groups)))
        plain(chunks, *arguments, **options)

    REDUCED.clear()
    optimizer.BUCKET_SIZE, optimizer.finalize_model_grads = size, counting


def reduced_buckets():
    """Return, for every step, the number of buckets, and of those whose reduction began in the backward pass."""
    return REDUCED


def access_incomplete(names):
    """Access the policy's parameters in each way while they are incomplete; return those that did not complete them.

    All ranks must call it together.
    """
    from fsdp_processes import _held
    from plasmid_megatron.checkpoint.state import _state
    from plasmid_models.source import source
    from plasmid_training.offload import OffloadedMemory

    actor, options = _held["object"], {"dtype": torch.float32, "device": torch.device("cpu")}
    model = actor._learner.policy.model
    ways = {
        "shards": model.shards,
        "load": lambda: model.load(source(actor._config, "model")),
        "weights": lambda: model.weights(**options),
        "shares": lambda: model.shares([], **options),
        "offload": lambda: model.offload(OffloadedMemory()),
        "save": lambda: _state({"policy": model}, {"policy": 1}, loading=False),
        "adapter weights": lambda: model.adapter.weights(**options),
        "adapter shares": lambda: model.adapter.shares([], **options),
        "adapter state": lambda: model.adapter.sharded_state(),
    }
    groups, failed = model.optimizer._gather._groups, []
    for name in names:
        for group in groups:
            group.param_gather_dispatched = False
        ways[name]()
        if not all(group.param_gather_dispatched and group.param_gather_handle is None for group in groups):
            failed.append(name)
    return failed


def _adam():
    from fsdp_processes import _held

    (part,) = _held["object"]._learner.policy.model.optimizer._parts()
    return part


def unfuse_optimizer():
    """Use the default settings of torch's optimizer, with which earlier versions saved it."""
    for group in _adam().param_groups:
        group["fused"] = group["foreach"] = None


def optimizer_settings():
    """Return whether a fused kernel updates each parameter group, and the devices of its weights and steps."""
    part = _adam()
    devices = {(parameter.device.type, state["step"].device.type) for parameter, state in part.state.items()}
    return [(group["fused"], group["foreach"]) for group in part.param_groups], devices


def adapter_memory():
    """Return the number of elements of all parameters, gradient buffers and optimizer states of the policy.

    Also returns the kind of the reference.
    """
    from fsdp_processes import _held
    from plasmid.types import Role

    learner = _held["object"]._learner
    model = learner.policy.model
    (part,) = model.optimizer._parts()
    states = [value for state in part.state.values() for name, value in state.items() if name != "step"]
    return {
        "parameters": sum(p.numel() for chunk in model.bare for p in chunk.parameters()),
        "gradients": sum(buffer.numel() for buffer in model.optimizer.gradients()),
        "state": sum(value.numel() for value in states),
        "reference": type(learner.frozen[Role.REFERENCE]).__name__,
    }


def describe_gathering():
    """Gather the adapter; return the number of its matrices and how often one was described meanwhile."""
    from fsdp_processes import _held
    from plasmid_megatron.lora.linear import AdaptedLinear

    adapter = _held["object"]._learner.policy.model.adapter
    own, counted = AdaptedLinear.matrix, []
    AdaptedLinear.matrix = lambda layer, kind: counted.append(kind) or own(layer, kind)
    try:
        for _ in adapter.weights(dtype=torch.float32, device=torch.device("cpu")):
            pass
    finally:
        AdaptedLinear.matrix = own
    return len(adapter.matrices()), len(counted)


def main_weights():
    """Return the policy's main weights on this rank as one flat array."""
    import fsdp_processes

    optimizer = fsdp_processes._held["object"]._learner.policy._optimizer.inner
    parts = [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]
    weights = [weight for part in parts for group in part.param_groups for weight in group["params"]]
    return torch.cat([weight.detach().float().flatten() for weight in weights]).numpy()
