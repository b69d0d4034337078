"""A plain Hugging Face training loop over a fixed stream: padded microbatches, full logits, AdamW. See `compare.py`."""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def pad_batch(batch, device):
    """Yield token ids, attention mask, completion mask and advantages of ``peer_rows`` samples at a time."""
    rows, masks, advantages = [], [], []
    for one in batch:
        rewards = torch.tensor(one["rewards"])
        values = (rewards - rewards.mean()) / (rewards.std() + args["std_eps"])
        for completion, value in zip(one["completions"], values, strict=True):
            rows.append(one["prompt"] + completion)
            masks.append([0] * len(one["prompt"]) + [1] * len(completion))
            advantages.append(value)
    for start in range(0, len(rows), args["peer_rows"]):
        part = slice(start, start + args["peer_rows"])
        width = max(map(len, rows[part]))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows[part]], device=device)
        seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows[part]], device=device)
        mask = torch.tensor([row + [0] * (width - len(row)) for row in masks[part]], device=device)
        yield ids, seen, mask, torch.stack(advantages[part]).to(device)


def train():
    torch.manual_seed(0)
    device, dtype = args["device"], getattr(torch, args["dtype"])
    model = AutoModelForCausalLM.from_pretrained(args["model"], dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args["lr"], betas=args["betas"], eps=args["eps"], weight_decay=0.0
    )
    for batch in json.loads(Path(args["stream"]).read_text()):
        began = time.perf_counter()
        count, total = sum(len(completion) for one in batch for completion in one["completions"]), 0.0
        for ids, seen, mask, advantages in pad_batch(batch, device):
            with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
                logits = model(ids, attention_mask=seen, use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -(ratio * advantages[:, None] * mask[:, 1:]).sum() / count
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        values = {"loss": total.item(), "grad_norm": norm.item()}
        print("BATCH", json.dumps(values | {"s": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    args = json.loads(sys.argv[1])
    torch.set_num_threads(args["threads"])
    train()
