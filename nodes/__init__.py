"""The ComfyUI layer over the pipelines."""
