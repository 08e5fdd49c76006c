"""The Gradio demo, and the ComfyUI frontend extension in comfyui/."""
