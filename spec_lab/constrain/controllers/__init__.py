"""Controllers, also as examples of how to write one: a class with ``step`` and ``fork``, and a function ``load``.

Each has a config under ``conf/constraint``.
"""
