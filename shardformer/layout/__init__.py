"""Every choice of how a model is laid out, resolved once: the Layout, the mesh, and the parameters' specs."""

from shardformer.layout.choices import Layout, resolve

__all__ = ["Layout", "resolve"]
