"""``scripts/gpu_check``: whether kernels, plugin, sessions and texts on a GPU are right, and how fast; in minutes.

``table``: the parts and their shares of the time. ``running``: each part in a process of its own. ``findings``: what a
part says. ``report``: JSON and a page. The other modules are the parts.
"""
