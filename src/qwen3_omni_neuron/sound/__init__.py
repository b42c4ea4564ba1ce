"""Samples of a reply -> bytes of a sound format, a file, or sound that is heard."""
