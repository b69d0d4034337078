"""A small head, and its outputs by literal formulas."""

import torch

POSITIONS, HIDDEN, VOCAB = 13, 6, 17
UP = torch.randn(2, POSITIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def make_leaves(dtype):
    """Return hidden states, weight and bias from torch's random generator."""
    shapes = (POSITIONS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)
    return tuple(torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)


def literally(leaves, targets, temperatures, sets):
    """Return log-probabilities within each token's set, entropies, and log-probabilities of all tokens, in fp64."""
    hidden, weight, bias = (leaf.double() for leaf in leaves)
    logprobs, entropies, every = [], [], []
    for i, target in enumerate(targets.tolist()):
        z = (weight @ hidden[i] + bias) / temperatures[i].double()
        among = sets[i] or list(range(VOCAB))
        logprobs.append(torch.log_softmax(z[among], 0)[among.index(target)])
        p = torch.softmax(z, 0)
        entropies.append(-(p * p.log()).sum())
        every.append(torch.log_softmax(z, 0))
    return torch.stack(logprobs), torch.stack(entropies), torch.stack(every)
