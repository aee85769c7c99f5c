"""What HTTP and Thrift ask for: submissions, lifecycle changes, reads."""
