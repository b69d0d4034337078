"""A plain Hugging Face training loop over a fixed stream: padded batches, full logits, AdamW. See `compare.py`."""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def pad_batch(batch, device):
    """Return token ids, attention mask, completion mask and advantages of a batch."""
    rows, masks, advantages = [], [], []
    for one in batch:
        rewards = torch.tensor(one["rewards"])
        values = (rewards - rewards.mean()) / (rewards.std() + args["std_eps"])
        for completion, value in zip(one["completions"], values, strict=True):
            rows.append(one["prompt"] + completion)
            masks.append([0] * len(one["prompt"]) + [1] * len(completion))
            advantages.append(value)
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([row + [0] * (width - len(row)) for row in masks], device=device)
    return ids, seen, mask, torch.stack(advantages).to(device)


def train():
    torch.manual_seed(0)
    device, dtype = args["device"], getattr(torch, args["dtype"])
    model = AutoModelForCausalLM.from_pretrained(args["model"], dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args["lr"], betas=args["betas"], eps=args["eps"], weight_decay=0.0
    )
    for batch in json.loads(Path(args["stream"]).read_text()):
        began = time.perf_counter()
        ids, seen, mask, advantages = pad_batch(batch, device)
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(ids, attention_mask=seen, use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio, mask = (logprobs - logprobs.detach()).exp(), mask[:, 1:]
        loss = -(ratio * advantages[:, None] * mask).sum() / mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        values = {"loss": loss.item(), "grad_norm": norm.item()}
        print("BATCH", json.dumps(values | {"s": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    args = json.loads(sys.argv[1])
    torch.set_num_threads(args["threads"])
    train()
