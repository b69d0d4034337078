"""The cases of `tests/agents`: a policy that says what a test wrote down, behind the real server."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))
cases = importlib.import_module("agent_cases")
