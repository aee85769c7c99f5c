"""Placement rules: the choice of a slot for each task.

The rules are pure functions of plain values. Spark's Python workers import these modules, so they
import only the standard library and constants of ``model``; ``build``, ``plan``, ``explain`` and
``assignment_checks`` are exceptions.
"""
