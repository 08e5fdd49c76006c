"""Model families: weight map, prompt, grammar and positions, one file each."""
