"""Changes to a rank's process, and questions to it. Tests run these functions there, before the rank is built."""

import functools

import torch

COUNTS = {"fused": 0, "tokens": 0}
PLAIN = {"compile": torch.compile}


def capture_graphs(whole):
    """Let `torch.compile` capture graphs without compiling them; with ``whole`` it raises where a graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile = functools.partial(PLAIN["compile"], backend="aot_eager", fullgraph=whole)


def compile_nothing():
    """Let `torch.compile` return the function as it is."""
    torch.compile = lambda function, **options: function


def compile_graphs():
    """Undo `capture_graphs`."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile = PLAIN["compile"]


def fuse_losses(on):
    """Compute the loss with the logits or after them, and count the microbatches of the first kind from 0."""
    from plasmid_megatron.device import prepare_cpu

    prepare_cpu()
    from plasmid_megatron.model import language_model
    from plasmid_megatron.model.network import Network

    plain = PLAIN.setdefault("loss", language_model.linear_token_loss)

    def counting(*arguments, **options):
        COUNTS["fused"] += 1
        return plain(*arguments, **options)

    COUNTS["fused"] = 0
    language_model.linear_token_loss, Network.fuses_loss = counting, on


def count_fused():
    """Return that count."""
    return COUNTS["fused"]


def count_tokens():
    """Count the tokens of packed rows from 0; return those of the count before."""
    from plasmid_megatron.device import prepare_cpu

    prepare_cpu()
    from plasmid_megatron.model import network

    plain, before = PLAIN.setdefault("pack", network.pack), COUNTS["tokens"]

    def counting(*arguments, **options):
        packed = plain(*arguments, **options)
        COUNTS["tokens"] += packed.input_ids.numel()
        return packed

    COUNTS["tokens"], network.pack = 0, counting
    return before


def _adam():
    from fsdp_processes import _held

    (part,) = _held["object"]._learner.policy.model.optimizer._parts()
    return part


def unfuse_optimizer():
    """Give the optimizer torch's default settings, with which earlier versions saved it."""
    for group in _adam().param_groups:
        group["fused"] = group["foreach"] = None


def optimizer_settings():
    """Return whether each group of weights is updated by a fused kernel, and the devices of weights and of steps."""
    part = _adam()
    devices = {(parameter.device.type, state["step"].device.type) for parameter, state in part.state.items()}
    return [(group["fused"], group["foreach"]) for group in part.param_groups], devices


def adapter_memory():
    """Return the numbers of elements of all parameters, gradient buffers and optimizer states of the policy.

    Also the kind of the reference.
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


def main_weights():
    """Return the numbers of the policy's main weights on this rank, in one flat array."""
    import fsdp_processes

    optimizer = fsdp_processes._held["object"]._learner.policy._optimizer.inner
    parts = [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]
    weights = [weight for part in parts for group in part.param_groups for weight in group["params"]]
    return torch.cat([weight.detach().float().flatten() for weight in weights]).numpy()
