"""The demo behind ``geomesh demo``: one small training, three ways, over emulated regions.

``model`` and ``data`` hold the task, ``speeds`` the emulated GPUs, ``train`` one rank of one arm,
``run`` the whole run.  Nothing here is imported by the rest of the package.
"""
