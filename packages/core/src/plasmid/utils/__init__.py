"""Helpers: untrusted files, texts and servers, deadlines, and others."""
