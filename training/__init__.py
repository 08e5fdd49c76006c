"""Training: the embedded family, rebuilt by `foredraft train demo`."""
