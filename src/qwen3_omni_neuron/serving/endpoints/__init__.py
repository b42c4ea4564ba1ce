"""Endpoints, one module each, and what their answers share."""
