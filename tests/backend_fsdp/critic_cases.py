"""PPO in plain PyTorch and transformers, token by token, and critics as folders."""

import numpy as np
import torch
from fsdp_cases import fit, plain_logprobs, weights_of, whole_rows
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

PPO = {"kind": "ppo", "gamma": 0.9, "lam": 0.8, "value_clip": 0.05}
SGD = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9}
CRITIC = {"optimizer": "sgd", "lr": 0.02, "momentum": 0.5, "max_grad_norm": 0.0, "export": True}


def make_critic(path, like, *, seed=5):
    """Create a random token classifier with one class, whose backbone has the size of the model ``like``."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(like, num_labels=1)
    model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.bias, std=0.5)
    model.save_pretrained(path)
    return path


def plain_values(critic, rows):
    """Return [L] for each sample: the value of the text before each token; 0 for the first token; differentiable."""
    results = []
    for i in range(rows.num_samples):
        ids = torch.from_numpy(rows.token_ids[rows.offsets[i] : rows.offsets[i + 1]]).long()
        values = critic(input_ids=ids[None]).logits[0, :-1, 0].float()
        results.append(torch.cat([values.new_zeros(1), values]))
    return results


def plain_gae(reward, values, *, gamma, lam):
    """Compute the advantages of one sample's tokens one by one, from the last to the first, in float64."""
    advantages, after, following = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = (reward if t == len(values) - 1 else 0.0) + gamma * following - values[t]
        after = delta + gamma * lam * after
        advantages[t], following = after, values[t]
    return advantages


def plain_ppo(model_path, critic_path, batches, *, make_policy, make_critic):
    """Return the weights of policy and critic after PPO on the batches, and the mean value loss of every step."""
    policy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    critic = AutoModelForTokenClassification.from_pretrained(critic_path, dtype=torch.float32)
    optimizers = make_policy(policy.parameters()), make_critic(critic.parameters())
    losses = []
    for batch in batches:
        rows = whole_rows(batch)
        rewards = np.concatenate([g.rewards for g in batch.groups])
        masks = [torch.from_numpy(rows.loss_mask[a:b]) for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]
        with torch.no_grad():
            old_values = [v[m] for v, m in zip(plain_values(critic, rows), masks, strict=True)]
            old_logprobs = [v[m] for v, m in zip(plain_logprobs(policy, rows), masks, strict=True)]
        advantages = [
            plain_gae(r, v.double().numpy(), gamma=PPO["gamma"], lam=PPO["lam"])
            for r, v in zip(rewards, old_values, strict=True)
        ]
        returns = [torch.from_numpy(a) + v for a, v in zip(advantages, old_values, strict=True)]
        every = np.concatenate(advantages)
        white = [torch.from_numpy((a - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8)) for a in advantages]
        for part in np.array_split(np.arange(rows.num_samples), batch.steps):
            count = sum(len(white[i]) for i in part)
            now = [v[m] for v, m in zip(plain_logprobs(policy, rows), masks, strict=True)]
            values = [v[m] for v, m in zip(plain_values(critic, rows), masks, strict=True)]
            policy_loss = sum(_clipped(now[i], old_logprobs[i], white[i]) for i in part) / count
            value_loss = sum(_squared(values[i], old_values[i], returns[i]) for i in part) / count
            for loss, optimizer in zip((policy_loss, value_loss), optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(float(value_loss.detach()))
    return dict(policy.state_dict()), dict(critic.state_dict()), losses


def _clipped(now, old, advantages):
    ratio = (now - old).exp()
    return torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages).sum()


def _squared(values, old, returns):
    clip = PPO["value_clip"]
    near = torch.minimum(torch.maximum(values, old - clip), old + clip)
    return torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()


async def trained(ranks, path, batches, *, critic=None, **options):
    """Return the reports, and the weights of policy and critic, after training on the batches with PPO."""
    settings = SGD | {"critic": CRITIC} | options.pop("trainer", {})
    tables = {} if critic is None else {"critic": {"path": str(critic)}}
    algorithm = PPO | options.pop("algorithm", {})
    trainer, config = await ranks.start(trainer=settings, algorithm=algorithm, **tables, **options)
    reports = await fit(trainer, config, *batches)
    return reports, await weights_of(trainer, path), load_file(f"{path}-critic/model.safetensors")
