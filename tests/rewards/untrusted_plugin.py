"""Rewards that misbehave as the text says, as a plugin file."""

import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from typing import Literal

from plasmid import Reward, Score, hookimpl

SEEN = []


class Untrusted(Reward):
    """Does what the text says, then gives 1."""

    kind: Literal["untrusted"] = "untrusted"

    async def __call__(self, prompt, sample):
        word, _, rest = sample.text.partition(" ")
        match word:
            case "hang":
                while True:
                    pass
            case "sleep":
                time.sleep(1000)
            case "block-signals":
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.Signals)
                time.sleep(1000)
            case "crash":
                ctypes.string_at(0)
            case "exit":
                os._exit(0)
            case "abort":
                os.abort()
            case "eat":
                return float(len(bytearray(8 << 30)))
            case "fork":
                os.fork()
            case "start":
                subprocess.Popen(["sleep", "60"])
            case "daemon":
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        os.execv("/bin/sleep", ["sleep", rest])
                    os._exit(0)
            case "threads":
                for _ in range(3):
                    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
            case "kill-worker":
                os.kill(os.getppid(), signal.SIGKILL)
            case "network":
                socket.create_connection(("127.0.0.1", int(rest)), timeout=2)
            case "wait":
                open(f"{rest}/begun", "w").close()
                while not os.path.exists(f"{rest}/end"):
                    time.sleep(0.01)
            case "move":
                os.rename(f"{rest}/from/file", f"{rest}/to/file")
            case "deep":
                return (await self(prompt, sample)) if rest else eval("(" * 5000 + ")" * 5000)
            case "nan":
                return Score(value=1.0, components={"x": float("nan")})
            case "long":
                return Score(value=1.0, error="x" * (9 << 20))
            case "raise":
                raise KeyError(rest)
            case "remember":
                SEEN.append(rest)
                return float(len(SEEN))
        return 1.0


class Rank(Reward):
    """1 for the longest text of the prompt."""

    kind: Literal["rank"] = "rank"

    async def __call__(self, prompt, sample):
        return 1.0

    async def score_group(self, prompt, samples):
        longest = max(len(sample.text) for sample in samples)
        return [float(len(sample.text) == longest) for sample in samples]


class Broken(Reward):
    """Raises for every text."""

    kind: Literal["broken"] = "broken"

    async def __call__(self, prompt, sample):
        raise KeyError("nope")


class Cold:
    """Work that cannot be loaded."""

    def warm(self):
        raise KeyError("cold")


@hookimpl
def register_components():
    return [Untrusted, Rank, Broken]
