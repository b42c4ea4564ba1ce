"""Sockets, protocols, and limits of requests."""
