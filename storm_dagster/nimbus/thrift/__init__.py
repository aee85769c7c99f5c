"""Storm's Nimbus service over Thrift, for the ``storm`` command and streamparse
(``docs/decisions.md#storm-compatibility``).
"""
