"""Shapes of OpenAI's API: bodies, errors, ids, usage."""
