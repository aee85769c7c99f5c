"""Dagster's own code server, with runs in forks of a prepared process.

A stock code server starts a new interpreter for each run, which takes one to three seconds before
the first step. Here ``multiprocessing``'s fork server starts the runs: it has loaded Dagster, its
storage, this package and the libraries of a placement, but no module of users, so that each run has
the users' current code.
"""
