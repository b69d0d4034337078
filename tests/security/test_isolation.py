"""Rewards that attack the run from a worker process affect only their own sample."""

import pytest

from tests.security.reward_runs import HOSTS, score

PLUGIN = '''
from typing import Literal
from plasmid import Reward, hookimpl

class Runs(Reward):
    """Runs the text, and gives the value that it leaves."""
    kind: Literal["runs"] = "runs"
    async def __call__(self, prompt, sample):
        space = {}
        exec(sample.text, space)
        return float(space.get("value", 1.0))

@hookimpl
def register_components():
    return [Runs]
'''
REWARDS = 'rewards=[{kind="isolated", workers=1, failure_value=-1.0, call_timeout_s=20.0, reward={kind="runs"}}]'
BELOW = """
import ctypes, json, os, re, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
above = [os.getppid(), PID_OF_RL]
value = 0.0
def attempt(what, *args):
    global value
    try:
        found = what(*args)
    except OSError:
        return None
    value += 1
    return found
"""
FORGED = """
answer = json.dumps({"answer": [[9.0, {}, None, []]]}).encode()
for text in (answer, struct.pack(">Q", 2) + answer, struct.pack(">Q", 3) + answer):
    for number in range(3, 256):
        try:
            os.write(number, struct.pack(">Q", len(text)) + text)
        except OSError:
            pass
"""
SIGNAL = """
import fcntl
for process in above:
    reading, writing = os.pipe()
    attempt(fcntl.fcntl, reading, 10, 15)  # F_SETSIG
    attempt(fcntl.fcntl, reading, 8, process)  # F_SETOWN
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(writing, b"x")
"""
SLOWING = """
for process in above:
    attempt(os.setpriority, os.PRIO_PROCESS, process, 1)
    attempt(os.sched_setaffinity, process, {0})
    attempt(os.sched_setscheduler, process, os.SCHED_BATCH, os.sched_param(0))
attempt(os.setpriority, os.PRIO_USER, os.getuid(), 1)
"""
ATTACKS = {
    "a signal through a pipe": BELOW + SIGNAL,
    "slowing the run": BELOW + SLOWING,
    "an answer on every descriptor": BELOW + FORGED,
    "an answer on every descriptor, and an end": BELOW + FORGED + "os._exit(0)",
    "an answer that is no JSON": BELOW
    + "for number in range(3, 256):\n  try: os.write(number, struct.pack('>Q', 3) + b'{{{')\n  except OSError: pass\n"
    + "os._exit(0)",
    "an error of the reward": BELOW
    + FORGED.replace('{"answer": [[9.0, {}, None, []]]}', '{"raised": "the run ends"}')
    + "os._exit(0)",
    "an answer of a terabyte": BELOW
    + "for number in range(3, 256):\n  try: os.write(number, struct.pack('>Q', 1 << 40))\n  except OSError: pass\n"
    + "os._exit(0)",
    "writing to the pipes of the worker": BELOW
    + 'for number in range(16): attempt(open, f"/proc/{above[0]}/fd/{number}", "wb", 0)',
    "changing the memory of the worker": BELOW + 'attempt(open, f"/proc/{above[0]}/mem", "r+b", 0)',
    "the variables of the worker": BELOW + 'value = float("hush" in str(dict(os.environ)))',
    "capabilities": BELOW + 'value = float(int(status["CapEff"], 16) or int(status["CapPrm"], 16))',
    "new privileges": BELOW + 'value = 1.0 - float(status["NoNewPrivs"])',
    "being traced": BELOW + "value = float(libc.prctl(3, 0, 0, 0, 0))",
    "shared memory": BELOW + "value = float(libc.shmget(0, 1 << 20, 0o1600) != -1)",
    "semaphores": BELOW + "value = float(libc.semget(0, 32000, 0o1600) != -1)",
    "files in memory": BELOW + "value = float(libc.memfd_create(b'x', 0) != -1)",
}
"""Each returns as value how often it succeeded."""
ABOVE = {
    "writing to the pipes of the run": BELOW
    + 'for number in range(64): attempt(open, f"/proc/{above[1]}/fd/{number}", "wb", 0)',
    "the variables of the run": BELOW + 'attempt(open, f"/proc/{above[1]}/environ", "rb")',
    "the memory of the run": BELOW + 'attempt(open, f"/proc/{above[1]}/mem", "r+b", 0)',
}
"""Attacks that are only prevented with Landlock, or by capabilities that the run has and the reward lacks."""


def test_a_reward_in_a_worker_cannot_answer_for_others_or_change_its_worker():
    check(HOSTS[0])


@pytest.mark.long
@pytest.mark.parametrize("host", HOSTS[1:])
def test_a_reward_in_a_worker_is_held_on_other_hosts(host):
    check(host)


def check(host):
    attacks = ATTACKS if host == "as nobody without Landlock" else ATTACKS | ABOVE
    rows = {}
    for index, (name, attack) in enumerate(attacks.items()):
        rows |= {name: attack, f"after {name}": f"value = {index}.25"}
    found = score(REWARDS, rows, host=host, plugin=PLUGIN, HUSH_KEY="hush")
    for index, name in enumerate(attacks):
        assert found[f"after {name}"] == (index + 0.25, None), f"the answer after {name!r} is not its own"
    unreadable = (-1.0, "the answer cannot be read")
    expected = {
        "an answer on every descriptor": (9.0, None),  # a reward may give its own answer
        "an answer on every descriptor, and an end": (9.0, None),
        "an answer that is no JSON": unreadable,
        "an error of the reward": (-1.0, "the run ends"),
        "an answer of a terabyte": (-1.0, "the answer is too long"),
    }
    for name in attacks:
        assert found[name] == expected.get(name, (0.0, None)), name


def test_named_variables_reach_a_reward_in_a_worker():
    rewards = REWARDS.replace("failure_value", 'environment=["GIVEN_KEY"], failure_value')
    text = "import os; value = sum(key in os.environ for key in ('GIVEN_KEY', 'PATH', 'HUSH_KEY'))"
    assert score(rewards, {"": text}, plugin=PLUGIN, HUSH_KEY="hush", GIVEN_KEY="x") == {"": (2.0, None)}
