"""Metrics, trackers and the sample store: what a run tells about itself."""
