"""Measuring: the same prompt and seed through several methods, in one table."""
