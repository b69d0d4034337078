"""Tasks of the package reasoning-gym: an endless source of prompts, and a verifier."""
