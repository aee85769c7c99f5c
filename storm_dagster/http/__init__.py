"""Parts of the HTTP services of nimbus and supervisors: serving, guarding, log files,
description.
"""
