"""`rl attach`: watch and control an active run."""
