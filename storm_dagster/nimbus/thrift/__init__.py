"""Storm's Nimbus service over Thrift, for the ``storm`` command and streamparse.

See ``docs/decisions.md#storm-compatibility``.
"""
