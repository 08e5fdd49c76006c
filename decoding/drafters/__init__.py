"""Sources of draft tokens shared by several methods."""
