"""HTTP services of nimbus and supervisors.

Server, guard, authentication, declared routes with their description, log files.
"""
