"""The engine: drafting, verifying and bookkeeping. Knows no method, no model family and no user interface."""
