"""A compiled tree on the disk: its manifest, its fingerprint, its files."""
