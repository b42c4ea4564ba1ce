"""Engines on the CPU: in C (native) if compiled and supported, else in torch (eager)."""
