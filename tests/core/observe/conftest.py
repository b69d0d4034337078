"""Makes the helper modules of this folder importable."""

import sys
from pathlib import Path

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, folder)
