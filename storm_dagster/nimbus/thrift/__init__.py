"""Storm's Nimbus service over Thrift (design 6.4): for the ``storm`` command line, streamparse, and other clients."""
