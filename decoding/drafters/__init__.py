"""Drafters: each proposes tokens and observes what became of them."""
