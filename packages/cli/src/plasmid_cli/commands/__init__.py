"""One file per command. Each imports what it needs when it is called, so that `rl --help` stays quick."""
