"""Foredraft: speculative decoding for autoregressive image models.

Import it as `foredraft`, or let ComfyUI load this folder by its path. Public names are resolved on first use, so that
importing the package loads no torch, downloads nothing and writes nothing.
"""

# pytest imports this file as a plain module when the checkout's name is no identifier (`ComfyUI-Foredraft`): then there
# is no package to resolve relative imports against, and nothing to offer.
if __package__:
    import importlib as _importlib
    import os as _os

    _ROOT = _os.path.dirname(_os.path.abspath(__file__))

    # Public name -> the module that defines it. Relative: ComfyUI names this package by its absolute path.
    _LAZY = {
        "AutoregressivePipeline": ".pipelines.autoregressive",
        "CoolSDPipeline": ".pipelines.cool_sd",
        "SJDPipeline": ".pipelines.sjd",
        "SpeculativePipeline": ".pipelines.speculative",
        "VVSPipeline": ".pipelines.vvs",
        "compare": ".bench.compare",
    }
    # What ComfyUI's loader asks for. Its custom nodes need torch and diffusers, so they too wait for the first use.
    _COMFYUI = dict.fromkeys(("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"), ".nodes")
    WEB_DIRECTORY = "./web/comfyui"

    DEMO = _os.path.join(_ROOT, "models", "demo")
    """Path of the embedded model family, ready for `from_pretrained`."""

    __all__ = ["DEMO", *_LAZY, "__version__"]

    def _read_version() -> str:
        """The version of *this* copy: from pyproject.toml if it lies here (a checkout, ComfyUI), else the wheel's."""
        try:
            with open(_os.path.join(_ROOT, "pyproject.toml"), encoding="utf-8") as file:
                return next(line.split('"')[1] for line in file if line.startswith("version = "))
        except FileNotFoundError:
            from importlib.metadata import version

            return version("foredraft")

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value: object = _read_version()
        elif name in _LAZY or name in _COMFYUI:
            try:
                value = getattr(_importlib.import_module({**_LAZY, **_COMFYUI}[name], __package__), name)
            except AttributeError as error:
                # Else `hasattr`, by which ComfyUI looks for nodes, would call a broken installation "no nodes".
                raise ImportError(f"{name} cannot be loaded: {error}") from error
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
