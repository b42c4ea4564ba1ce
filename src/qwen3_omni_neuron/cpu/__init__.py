"""Engines on the CPU: in C where compiled and supported (native), else in torch (eager)."""
