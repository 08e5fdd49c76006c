"""The tiny family, built once per session."""

from ..tiny import folder, parts, pipe  # noqa: F401
