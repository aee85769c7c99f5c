"""Placement rules: the choice of a slot for each task. Pure functions of plain values.

Spark's Python workers import these modules, so that none of them imports more than the standard
library and constants of ``model``, except ``build``, ``plan``, ``explain`` and
``assignment_checks``.
"""
