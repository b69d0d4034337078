"""The papers' formulas in fp64, written out by sample and token, without code of the packages."""

import math
import statistics

import torch


def kl(estimator, p, base):
    d = p - base
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    value = (torch.exp(-d) if isinstance(d, torch.Tensor) else math.exp(-d)) - 1 + d
    return value if estimator == "k3" else min(max(value, -10.0), 10.0)


# Advantages: a list with one float per loss token.


def old(algorithm, token):
    return token.rollout_logprob if algorithm.old_policy == "rollout" else token.old_logprob


def penalty(algorithm, token):
    if not getattr(algorithm, "reward_kl_coef", 0):
        return 0.0
    return algorithm.reward_kl_coef * kl(algorithm.reward_kl_estimator, old(algorithm, token), token.ref_logprob)


def rewards(case, algorithm):
    """Return the reward of each sample minus the KL of all its tokens."""
    return [
        float(case.table.rewards[i]) - sum(penalty(algorithm, t) for t in case.of_sample(i))
        for i in range(case.table.num_samples)
    ]


def rollouts_of(case, sample_rewards, group):
    """Return the mean reward of each rollout of a group."""
    found = {}
    for i in range(case.table.num_samples):
        if case.table.group_index[i] == group:
            found.setdefault(int(case.table.rollout_index[i]), []).append(sample_rewards[i])
    return {rollout: statistics.fmean(values) for rollout, values in found.items()}


def per_sample(case, value):
    return [value(t.sample) for t in case.tokens]


def grpo(case, algorithm):
    r = rewards(case, algorithm)

    def value(i):
        group = rollouts_of(case, r, case.table.group_index[i])
        if algorithm.std_form == "leave-one-out":
            group = {k: v for k, v in group.items() if k != case.table.rollout_index[i]}
        group = list(group.values())
        if not group:
            return 0.0
        centred = r[i] - statistics.fmean(group)
        if not algorithm.normalize_std or len(group) == 1:
            return centred
        std = statistics.pstdev(group) if algorithm.std_form == "population" else statistics.stdev(group)
        return centred if algorithm.std_form == "leave-one-out" and std == 0 else centred / (std + algorithm.std_eps)

    return per_sample(case, value)


def centred(case, algorithm):
    r = rewards(case, algorithm)
    groups = [list(rollouts_of(case, r, case.table.group_index[i]).values()) for i in range(case.table.num_samples)]
    return per_sample(case, lambda i: r[i] - statistics.fmean(groups[i]))


def rloo(case, algorithm):
    r = rewards(case, algorithm)

    def value(i):
        group = rollouts_of(case, r, case.table.group_index[i])
        others = [v for rollout, v in group.items() if rollout != case.table.rollout_index[i]]
        return r[i] - statistics.fmean(others) if others else 0.0

    return per_sample(case, value)


def remax(case, algorithm):
    r = rewards(case, algorithm)
    return per_sample(case, lambda i: r[i] - float(case.table.baselines[i]))


def whitened(values):
    if len(values) < 2:
        return [v - statistics.fmean(values) for v in values]
    mean, variance = statistics.fmean(values), statistics.variance(values)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def token_rewards(case, algorithm, sample):
    tokens = case.of_sample(sample)
    values = [-penalty(algorithm, t) for t in tokens]
    if values:
        values[-1] += float(case.table.rewards[sample])
    return values


def reinforce_plus_plus(case, algorithm):
    result = []
    for i in range(case.table.num_samples):
        r = token_rewards(case, algorithm, i)
        result += [sum(algorithm.gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))]
    return whitened(result)


def reinforce_plus_plus_baseline(case, algorithm):
    return whitened(centred(case, algorithm))


def gae(case, algorithm):
    result = []
    for i in range(case.table.num_samples):
        r, v = token_rewards(case, algorithm, i), [t.value for t in case.of_sample(i)] + [0.0]
        after, backwards = 0.0, []
        for t in reversed(range(len(r))):
            delta = r[t] + algorithm.gamma * v[t + 1] - v[t]
            after = delta + algorithm.gamma * algorithm.lam * after
            backwards.append(after)
        result += backwards[::-1]
    return result


def ppo(case, algorithm):
    return whitened(gae(case, algorithm)) if algorithm.whiten else gae(case, algorithm)


def ppo_returns(case, algorithm):
    return [a + t.value for a, t in zip(gae(case, algorithm), case.tokens, strict=True)]


def opd(case, algorithm):
    return [t.teacher_logprob - old(algorithm, t) for t in case.tokens]


def sft(case, algorithm):
    return [1.0] * len(case.tokens)


# Losses: one scalar tensor per loss token.


def clip(x, low, high):
    return min(max(x, low), high)


def ppo_clip(algorithm, ratio, advantage):
    bounded = clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss = max(-ratio * advantage, -bounded * advantage)
    dual = getattr(algorithm, "dual_clip", "off")
    if dual != "off" and advantage < 0:
        loss = min(loss, torch.tensor(-dual * advantage, dtype=torch.float64))
    return loss


def importance(algorithm, tokens, olds, t):
    """Return the off-policy correction factor of token t of a sample."""
    c = algorithm.correction
    logs = [o - token.rollout_logprob for o, token in zip(olds, tokens, strict=True)]
    levels = {"token": logs[t], "sequence": sum(logs), "geometric": sum(logs) / len(logs)}
    w = math.exp(levels[c.level])
    if c.veto != "off" and any(math.exp(x) < c.veto for x in logs):
        return 0.0
    if c.mode == "truncate":
        return min(w, c.high)
    if c.mode in ("mask", "reject") and not c.low <= w <= c.high:
        return 0.0
    return 1.0 if c.mode == "reject" else w


def mean_importance(case, algorithm):
    factors = []
    for i in range(case.table.num_samples):
        tokens = case.of_sample(i)
        factors += [importance(algorithm, tokens, [t.old_logprob for t in tokens], k) for k in range(len(tokens))]
    return statistics.fmean(factors) if any(factors) else 1.0


def token_losses(case, algorithm, logprobs, entropies, advantages, *, with_old):
    """Return the loss of every token; ``logprobs`` and ``entropies`` are scalar tensors with a gradient."""
    losses, first = [], 0
    for i in range(case.table.num_samples):
        tokens = case.of_sample(i)
        here = range(first, first + len(tokens))
        now = [logprobs[k] for k in here]
        if algorithm.old_policy == "rollout":
            olds = [t.rollout_logprob for t in tokens]
        else:
            olds = [t.old_logprob if with_old else p.item() for t, p in zip(tokens, now, strict=True)]
        for t, k in enumerate(here):
            loss = policy_loss(algorithm, tokens, now, olds, t, advantages[k])
            if algorithm.kl_coef:
                estimate = kl(algorithm.kl_estimator, now[t], tokens[t].ref_logprob)
                if algorithm.unbiased_kl:
                    estimate = estimate * torch.exp(now[t] - olds[t])
                loss = loss + algorithm.kl_coef * estimate
            losses.append(loss - algorithm.entropy_coef * entropies[k])
        first += len(tokens)
    return losses


def policy_loss(algorithm, tokens, now, olds, t, advantage):
    ratio = torch.exp(now[t] - olds[t])
    if algorithm.kind == "gspo":
        ratio = torch.exp(sum(p - o for p, o in zip(now, olds, strict=True)) / len(now))
    if algorithm.kind == "cispo":
        weight = clip(ratio.item(), 1 - algorithm.clip_low, 1 + algorithm.clip_high)
        loss = -weight * advantage * now[t]
    else:
        loss = ppo_clip(algorithm, ratio, advantage)
    if algorithm.old_policy == "decoupled":
        loss = loss * importance(algorithm, tokens, olds, t)
    if algorithm.opsm != "off" and advantage < 0:
        moved = statistics.fmean(token.rollout_logprob - p.item() for token, p in zip(tokens, now, strict=True))
        loss = loss * (0.0 if moved > algorithm.opsm else 1.0)
    return loss


def value_losses(algorithm, values, olds, returns):
    losses = []
    for v, o, r in zip(values, olds, returns, strict=True):
        loss = (v - r) ** 2
        if algorithm.value_clip != "off":
            loss = max(loss, (clip(v, o - algorithm.value_clip, o + algorithm.value_clip) - r) ** 2)
        losses.append(loss)
    return losses


def reduce(case, algorithm, losses):
    """Return the loss of a step from the losses of its tokens."""
    table, total = case.table, []
    units = {"per-rollout": table.rollout_index, "per-prompt": table.group_index}.get(algorithm.reduction)
    if units is not None:
        for unit in sorted(set(units.tolist())):
            own = [x for x, t in zip(losses, case.tokens, strict=True) if units[t.sample] == unit]
            total.append(sum(own) / len(own) if own else 0.0)
        return sum(total) / len(total)
    if algorithm.reduction == "per-token":
        return sum(losses) / len(losses)
    return sum(losses) / (algorithm.constant_length * len(set(table.rollout_index.tolist())))
