"""The engine: draft, score, verify, commit. It knows torch, and no method, model family or user interface."""
