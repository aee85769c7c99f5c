"""Storm's Nimbus service over Thrift: for the ``storm`` command line, streamparse, and other clients."""
