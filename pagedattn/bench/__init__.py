"""Measurements: programs that time, and tests that do not."""
