"""A batched reward that does what the text says, as a plugin file."""

import ctypes
import os
import time
from typing import Any, ClassVar, Literal

from plasmid import hookimpl
from plasmid_rewards import PooledReward

KEPT: list[Any] = []


class Obedient(PooledReward):
    """Gives 1.0 after it has done what the text says."""

    kind: Literal["obedient"] = "obedient"
    batched: ClassVar[bool] = True

    def prepare(self, prompt):
        if prompt.text == "broken":
            raise KeyError("prompt")

    def judge(self, prompt, text):
        word, _, rest = text.partition(" ")
        match word:
            case "hang":
                while True:
                    pass
            case "crash":
                ctypes.string_at(0)
            case "exit":
                os._exit(0)
            case "eat":
                KEPT.append(bytearray(8 << 30))
            case "keep":
                KEPT.append(b"x" * (int(rest) << 20))
            case "deep":
                return self.judge(prompt, text)
            case "raise":
                raise KeyError(rest)
            case "sleep":
                time.sleep(float(rest))
            case "pid":
                return float(os.getpid())
        return 1.0


@hookimpl
def register_components():
    return [Obedient]
