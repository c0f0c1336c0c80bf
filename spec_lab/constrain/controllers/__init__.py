"""Controllers ready to use, and examples of how to write one: a class with ``step`` and ``fork``, and ``load``.

Each has a config of its own name under ``conf/constraint``.
"""
