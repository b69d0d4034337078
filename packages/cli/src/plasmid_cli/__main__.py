"""`python -m plasmid_cli` is `rl`."""

from .main import app

app()
