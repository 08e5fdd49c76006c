"""One diffusers-style pipeline per speculative method."""
