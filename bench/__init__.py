"""Measurements: every bench is a small configuration over one harness."""
