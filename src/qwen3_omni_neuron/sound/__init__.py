"""Samples of a reply -> bytes of a sound format, or a file."""
