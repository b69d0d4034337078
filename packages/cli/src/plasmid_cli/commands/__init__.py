"""One file per command. Commands import their dependencies when called, which keeps `rl --help` fast."""
