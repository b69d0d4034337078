"""TRL's `GRPOTrainer` over a fixed stream that replaces its sampling. See `compare.py`."""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Prints loss, gradient norm and seconds of every step."""

    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds = time.perf_counter() - self.began

    def on_log(self, arguments, state, control, logs=None, **_):
        if logs and "loss" in logs and "grad_norm" in logs:
            values = {"loss": float(logs["loss"]), "grad_norm": float(logs["grad_norm"]), "s": self.seconds}
            print("BATCH", json.dumps(values), flush=True)


class Replay:
    """Replaces sampling: returns completions and rewards of a prompt, which is named by its index in the stream."""

    def __init__(self, prompts):
        self.prompts, self.taken = prompts, [0] * len(prompts)

    def __call__(self, names, trainer):
        chosen = []
        for name in names:
            number = int(name)
            chosen.append((self.prompts[number], self.taken[number]))
            self.taken[number] += 1
        completions = [one["completions"][index] for one, index in chosen]
        return {
            "prompt_ids": [one["prompt"] for one, _ in chosen],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(completion) for completion in completions],
            "given_reward": [one["rewards"][index] for one, index in chosen],
        }


def reward(given_reward, **_):
    return given_reward


def train():
    stream = json.loads(Path(args["stream"]).read_text())
    prompts = [one for batch in stream for one in batch]
    samples = len(prompts[0]["completions"])
    config = GRPOConfig(
        output_dir=args["folder"],
        per_device_train_batch_size=args["peer_rows"],
        gradient_accumulation_steps=len(stream[0]) * samples // args["peer_rows"],
        num_generations=samples,
        max_steps=len(stream),
        learning_rate=args["lr"],
        lr_scheduler_type="constant",
        adam_beta1=args["betas"][0],
        adam_beta2=args["betas"][1],
        adam_epsilon=args["eps"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        max_completion_length=max(len(c) for one in prompts for c in one["completions"]),
        shuffle_dataset=False,
        use_cpu=args["device"] == "cpu",
        bf16=args["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=args["model"],
        reward_funcs=reward,
        rollout_func=Replay(prompts),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(len(prompts))]}),
        callbacks=[Clock()],
    ).train()


if __name__ == "__main__":
    args = json.loads(sys.argv[1])
    torch.set_num_threads(args["threads"])
    train()
