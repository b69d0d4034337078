"""Compare Plasmid's client for SGLang, one call per request, with a single batched call.

    python benchmarks/rollout_overhead.py recipes/smollm2-sums-sglang-cpu.toml --requests 32 --new-tokens 64

The batch is a single call of SGLang's /generate, with one HTTP response for all tokens. Both alternate on one server.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from plasmid import load_config
from plasmid.types import GenerateRequest, SamplingParams
from plasmid_runtime.cluster import open_cluster
from plasmid_runtime.lifecycle.startup import start_processes


def make_requests(count, prompt_tokens, new_tokens, turn):
    """Create prompts of random tokens; nothing stops a completion, so both methods sample equally many tokens."""
    random = np.random.default_rng(turn)
    return [
        GenerateRequest(
            id=f"{turn}/{i}#0",
            session_id=f"{turn}/{i}",
            token_ids=random.integers(10, 60, prompt_tokens).astype(np.int32),
            sampling=SamplingParams(max_new_tokens=new_tokens),
            seed=i,
        )
        for i in range(count)
    ]


async def by_client(engine, requests):
    completions = await asyncio.gather(*(engine.client.generate(request) for request in requests))
    return sum(len(completion.token_ids) for completion in completions)


async def by_batch(engine, requests):
    params = {"max_new_tokens": requests[0].sampling.max_new_tokens, "temperature": 1.0}
    body = {
        "input_ids": [request.token_ids.tolist() for request in requests],
        "sampling_params": params,
        "return_logprob": True,
    }
    answers = await engine.members.all[0].api.post("/generate", body, timeout_s=3600)
    return sum(answer["meta_info"]["completion_tokens"] for answer in answers)


async def measure(config, folder, arguments):
    """Return the tokens per second of each method and round."""
    parts = await start_processes(
        config, open_cluster(log_dir=folder / "logs"), folder, with_trainer=False, with_engine=True
    )
    ways = {"client": by_client, "batch": by_batch}
    found = {name: [] for name in ways}
    try:
        for turn in range(arguments.rounds + 1):
            for name, way in ways.items():
                requests = make_requests(arguments.requests, arguments.prompt_tokens, arguments.new_tokens, turn)
                begun = time.perf_counter()
                tokens = await way(parts.engine, requests)
                found[name].append(tokens / (time.perf_counter() - begun))
        return {name: speeds[1:] for name, speeds in found.items()}
    finally:
        await parts.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="key=value, as for rl train")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    config = load_config(arguments.recipe, [*arguments.overrides, f"rollout.max_requests={arguments.requests}"])
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(config, Path(folder), arguments))
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    print(f"{arguments.requests} requests of {arguments.prompt_tokens} + at most {arguments.new_tokens} tokens")
    for name, speed in medians.items():
        print(f"{name:<8} {speed:>10.0f} tok/s")
    print(f"client / batch: {medians['client'] / medians['batch']:.3f}")


if __name__ == "__main__":
    main()
