"""Codecs: tokens <-> pixels, one file per tokenizer."""
