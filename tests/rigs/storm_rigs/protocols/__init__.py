"""Documents and messages of HTTP and Thrift, regular and hostile."""
