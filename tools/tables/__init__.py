"""Writes the tables of pages again, each from the record or the code that a mark above it names.

::

    python -m tools.tables

A table of a page stands between two marks::

    <!-- table: MAKER ARGUMENTS -->
    | ... |
    <!-- table: end -->

``MAKER`` is one of :data:`~tools.tables.makers.MAKERS`, and says what the arguments are. A record
is named by its path in ``tools/bench/results``. The command changes nothing but tables, and prints
the pages that it has changed; a test makes all tables again and compares.
"""
