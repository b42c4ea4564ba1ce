"""Endpoints, one module each, and code shared by their answers."""
