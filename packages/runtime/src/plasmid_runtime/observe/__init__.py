"""Metrics, trackers, observers and the sample store of a run."""
