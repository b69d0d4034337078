"""`rl submit`: a run as a Slurm job."""
