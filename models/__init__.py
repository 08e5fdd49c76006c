"""Model families: one file each, over one backbone."""
