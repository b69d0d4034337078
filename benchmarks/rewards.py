"""Measure answers per second of math-verify called directly, of reward `math`, and of `math` in one process per answer.

    python benchmarks/rewards.py --answers 400 --rounds 5 --out benchmarks/results/rewards-cpu.json

The three alternate on the same answers, so that load on the machine affects all of them. Direct calls parse and compare
in one warm process, without math-verify's timeouts. Half of the answers are right, and all are distinct. The CPU time
of this process and the workers is also reported, because it depends less on other load.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import psutil
from math_verify import parse, verify
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import Math


def expression(draw, form):
    """Return an answer in LaTeX and an equivalent spelling."""
    a, b, c = (draw.randint(2, 99) for _ in range(3))
    return {
        "integer": (str(a * b), f"{a * b}.0"),
        "fraction": (rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a * c}}}{{{b * c}}}"),
        "root": (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"),
        "polynomial": (f"{a}x^2+{b}x-{c}", f"-{c}+{b}x+{a}x^2"),
        "tuple": (rf"\left({a},\frac{{{b}}}{{{c}}}\right)", rf"({a}, \frac{{{b}}}{{{c}}})"),
        "interval": (rf"[{a},{a + b})", rf"\left[{a}, {a + b}\right)"),
    }[form]


FORMS = {"numbers": ("integer", "fraction"), "expressions": ("root", "polynomial", "tuple", "interval")}


def make_pairs(count, forms, turn):
    """Create pairs (target, answer) with equally many of each form; every second answer is wrong."""
    draw, pairs = random.Random(turn), []
    for index in range(count):
        form = forms[index // 2 % len(forms)]
        target, same = expression(draw, form)
        pairs.append((target, same if index % 2 else expression(draw, form)[1]))
    return pairs


def ask_directly(pairs):
    """Count right answers with math-verify."""
    return sum(
        verify(*(parse(f"${text}$", parsing_timeout=None) for text in pair), timeout_seconds=None) for pair in pairs
    )


async def ask(reward, pairs):
    """Count right answers with a reward, all scored concurrently like groups of rollouts."""
    calls = [reward(make_prompt(target=target), make_sample(rf"\boxed{{{answer}}}")) for target, answer in pairs]
    return sum(score.value for score in await asyncio.gather(*calls))


def processor_s():
    """Return the CPU seconds of this process, its workers and their forks."""
    workers = sum(sum(child.cpu_times()[:4]) for child in psutil.Process().children())
    return time.process_time() + workers


async def measure(arguments):
    """Return answers per second and CPU milliseconds per answer, by form, method and round."""
    rewards = {"math": Math(), "math, a process each": Math()}
    rates = {of: {"math-verify": [], **{name: [] for name in rewards}} for of in FORMS}
    costs = {of: {name: [] for name in ways} for of, ways in rates.items()}
    for name, reward in rewards.items():  # the first call starts the pool
        Math.batched = name == "math"
        await reward(make_prompt(target="1"), make_sample(r"\boxed{\sqrt{2}}"))
    for turn in range(-1, arguments.rounds):
        for of, forms in FORMS.items():
            pairs, right = make_pairs(arguments.answers, forms, turn), {}
            for name, values in rates[of].items():
                chosen = pairs[:20] if name == "math, a process each" else pairs
                started, used = time.perf_counter(), processor_s()
                right[name] = ask_directly(chosen) if name == "math-verify" else await ask(rewards[name], chosen)
                if turn >= 0:
                    values.append(len(chosen) / (time.perf_counter() - started))
                    costs[of][name].append(1e3 * (processor_s() - used) / len(chosen))
            print(of, {name: round(values[-1], 1) for name, values in rates[of].items() if values}, right, flush=True)
            assert right["math"] == right["math-verify"] >= len(pairs) // 2
    for reward in rewards.values():
        await reward.close()
    return rates, costs


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--answers", type=int, default=400)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--out", type=Path)
    arguments = arguments.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    before = os.getloadavg()[0]
    rates, costs = asyncio.run(measure(arguments))
    report = {
        "command": f"python benchmarks/rewards.py --answers {arguments.answers} --rounds {arguments.rounds}",
        "answers_per_s": {
            of: {name: [round(value, 1) for value in values] for name, values in ways.items()}
            for of, ways in rates.items()
        },
        "median_processor_ms_per_answer": {
            of: {name: round(statistics.median(values), 2) for name, values in ways.items()}
            for of, ways in costs.items()
        },
        "median_of_math_over_math_verify": {
            of: round(statistics.median(a / b for a, b in zip(ways["math"], ways["math-verify"], strict=True)), 2)
            for of, ways in rates.items()
        },
        "cores": len(os.sched_getaffinity(0)),
        "load_average": {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)},
        "python": platform.python_version(),
        "math-verify": version("math-verify"),
    }
    print(json.dumps(report, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
