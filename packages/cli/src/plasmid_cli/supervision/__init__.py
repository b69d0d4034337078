"""`rl train --supervise`: restart a run when one of its processes dies."""
