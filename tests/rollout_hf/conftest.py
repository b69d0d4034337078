"""Makes the helper modules of this folder importable, and the model families of Megatron's tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (str(HERE), str(HERE.parent / "backend_megatron")):
    if folder not in sys.path:
        sys.path.insert(0, folder)
