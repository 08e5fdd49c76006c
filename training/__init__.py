"""Training: the embedded family, rebuilt by `foredraft train demo`, and draft heads, by `foredraft train head`."""
