"""Nodes for ComfyUI that draw at a Diptych service. This folder is installed in `custom_nodes/`: see README.md."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
