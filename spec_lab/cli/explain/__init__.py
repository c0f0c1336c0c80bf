"""Meanings of all options: read from the configs in conf/, and from the sources of what they name.

``reference`` reads, ``query`` finds, ``terminal`` prints (``spec-lab explain KEY``) and ``markdown`` writes
docs/reference. Nothing that a config names is imported.
"""
